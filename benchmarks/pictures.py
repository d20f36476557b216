"""Pixels prepared for a tower in a second and its attention, by ours and by transformers', on one core and in one run.

    python benchmarks/pictures.py [--pictures 24] [--json results.json]

Pictures: noise, smoothed, of sizes like Geometry3K's drawings and like photographs, as JPEG.  Each way begins with the
decoded picture: ours makes uint8 patches, ``Qwen2VLImageProcessorPil`` float32 ones, and asked for no rescaling and no
normalisation the same numbers as ours, which is checked.  Beside it: how long decoding takes, which both need, and how
long the tokens of a picture take to be known, for which ours reads the header alone.

Attention: of one picture in a block of Qwen2.5-VL-7B's tower (16 heads of 80, windows of 64 patches), forward and
backward in float32.  transformers calls SDPA once a window; ours, windows of one length at once.  The results must be
the same bits.

Target: ours prepares at least as many pixels a second, and attends at least as fast.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mcore_rl.data.media.images import decoded, image_size
from mcore_rl.data.media.pixels import patches_of
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.training.tower_attention import attend_by_windows

SIZES = {"drawings": (400, 300), "photographs": (1600, 1200)}
PATCH = 14
WINDOW = 112  # pixels
HEADS, WIDTH = 16, 80
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one kind of pictures.  *_mpx_s: megapixels of the pictures as they are, a second.  *_ms: of one picture."""

    kind: str
    width: int
    height: int
    tokens: int
    ours_mpx_s: float
    transformers_mpx_s: float
    decoding_ms: float
    header_ms: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours_mpx_s / self.transformers_mpx_s


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Of one picture in one block.  windows: how many it has, of which ``lengths`` differ.  *_ms: forward, backward."""

    kind: str
    patches: int
    windows: int
    lengths: int
    ours_ms: float
    transformers_ms: float

    @property
    def ratio(self) -> float:
        """Theirs over ours."""
        return self.transformers_ms / self.ours_ms


def files(size: tuple[int, int], count: int) -> list[bytes]:
    made = []
    for seed in range(count):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(2)).save(file, format="JPEG", quality=90)
        made.append(file.getvalue())
    return made


def best_seconds(work: Callable[[Any], object], over: Sequence[Any]) -> float:
    """Of one item, in the best of ``ROUNDS``."""
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for each in over:
            work(each)
        taken.append(time.perf_counter() - began)
    return min(taken) / len(over)


def measure(kind: str, count: int) -> Result:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizing = Sizing(PATCH)
    bounds = {"shortest_edge": sizing.min_pixels, "longest_edge": sizing.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, size=bounds)
    contents = files(SIZES[kind], count)
    pictures = [decoded(content) for content in contents]
    raw = processor(images=pictures[:1], do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
    assert (patches_of(pictures[0], sizing)[0] == raw).all(), "ours and theirs are different pixels"
    pixels = SIZES[kind][0] * SIZES[kind][1] / 1e6
    ours = best_seconds(lambda image: patches_of(image, sizing), pictures)
    theirs = best_seconds(lambda image: processor(images=[image], return_tensors="np"), pictures)
    return Result(
        kind=kind,
        width=SIZES[kind][0],
        height=SIZES[kind][1],
        tokens=sizing.grid(*SIZES[kind]).tokens,
        ours_mpx_s=pixels / ours,
        transformers_mpx_s=pixels / theirs,
        decoding_ms=1e3 * best_seconds(decoded, contents),
        header_ms=1e3 * best_seconds(image_size, contents),
    )


def attend(kind: str) -> Attention:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.vision_utils import get_vision_window_index

    grid = Sizing(PATCH).grid(*SIZES[kind])
    _, boundaries = get_vision_window_index(torch.tensor([[1, grid.h, grid.w]]), grid.merge, WINDOW, PATCH)
    lengths = boundaries.diff().tolist()
    draw = torch.Generator().manual_seed(1)
    inputs: Any = torch.randn(3, 1, HEADS, grid.patches, WIDTH, generator=draw, requires_grad=True)
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1, training=False)
    options: dict[str, Any] = {"attention_mask": None, "scaling": WIDTH**-0.5, "dropout": 0.0, "is_causal": False}

    def ours() -> Tensor:
        return attend_by_windows(module, *inputs.unbind(0), cu_seq_lens_q=boundaries, **options)[0]

    def theirs() -> Tensor:
        parts = zip(*(each.split(lengths, dim=2) for each in inputs.unbind(0)), strict=True)
        return torch.cat([sdpa_attention_forward(module, *part, **options)[0] for part in parts], dim=1)  # type: ignore[arg-type]

    assert torch.equal(ours(), theirs()), "ours and theirs are different numbers"
    taken = [1e3 * best_seconds(lambda way: way().sum().backward(), [way]) for way in (ours, theirs)]
    return Attention(
        kind=kind,
        patches=grid.patches,
        windows=len(lengths),
        lengths=len(set(lengths)),
        ours_ms=taken[0],
        transformers_ms=taken[1],
    )


def show_attention(results: Sequence[Attention], console: Console) -> None:
    headings = ("pictures", "patches", "windows", "lengths", "ours, ms", "transformers, ms", "ratio")
    table = Table(*headings, show_edge=False)
    for each in results:
        table.add_row(
            each.kind, f"{each.patches}", f"{each.windows}", f"{each.lengths}", f"{each.ours_ms:.1f}",
            f"{each.transformers_ms:.1f}", f"{each.ratio:.1f}",
        )  # fmt: skip
    console.print(table)


def show(results: Sequence[Result], console: Console) -> None:
    headings = (
        "pictures",
        "size",
        "tokens",
        "ours, Mpx/s",
        "transformers, Mpx/s",
        "ratio",
        "decoding, ms",
        "header, ms",
    )
    table = Table(*headings, show_edge=False)
    for each in results:
        table.add_row(
            each.kind, f"{each.width} x {each.height}", f"{each.tokens}", f"{each.ours_mpx_s:.1f}",
            f"{each.transformers_mpx_s:.1f}", f"{each.ratio:.1f}", f"{each.decoding_ms:.2f}", f"{each.header_ms:.3f}",
        )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=24, help="of each kind (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    results = [measure(kind, options.pictures) for kind in SIZES]
    console = Console()
    show(results, console)
    torch.set_num_threads(1)
    attention = [attend(kind) for kind in SIZES]
    show_attention(attention, console)
    everything: list[Result | Attention] = [*results, *attention]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in everything], indent=1))
    return 0 if all(each.ratio >= 1 for each in everything) else 1


if __name__ == "__main__":
    sys.exit(main())
