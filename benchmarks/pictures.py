"""Pixels prepared for a tower in a second, by ours and by transformers' processor, on one core and in one run.

    python benchmarks/pictures.py [--pictures 24] [--json results.json]

Pictures: noise, smoothed, of sizes like Geometry3K's drawings and like photographs, as JPEG.  Each way begins with the
decoded picture: ours makes uint8 patches, ``Qwen2VLImageProcessorPil`` float32 ones, and asked for no rescaling and no
normalisation the same numbers as ours, which is checked.  Beside it: how long decoding takes, which both need, and how
long the tokens of a picture take to be known, for which ours reads the header alone.

Target: ours prepares at least as many pixels a second.  Exits with 1 where it is missed.
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
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from rich.console import Console
from rich.table import Table

from mcore_rl.data.media.images import decoded, image_size
from mcore_rl.data.media.pixels import patches_of
from mcore_rl.data.media.sizes import Sizing

SIZES = {"drawings": (400, 300), "photographs": (1600, 1200)}
PATCH = 14
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


def files(size: tuple[int, int], count: int) -> list[bytes]:
    made = []
    for seed in range(count):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(2)).save(file, format="JPEG", quality=90)
        made.append(file.getvalue())
    return made


def best_seconds(work: Callable[[Any], object], over: Sequence[Any]) -> float:
    """Of one item, in the best of ``ROUNDS``: of the processor, which what else runs hardly changes."""
    taken = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for each in over:
            work(each)
        taken.append(time.process_time() - began)
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
            each.kind,
            f"{each.width} x {each.height}",
            f"{each.tokens}",
            f"{each.ours_mpx_s:.1f}",
            f"{each.transformers_mpx_s:.1f}",
            f"{each.ratio:.1f}",
            f"{each.decoding_ms:.2f}",
            f"{each.header_ms:.3f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=24, help="of each kind (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    results = [measure(kind, options.pictures) for kind in SIZES]
    show(results, Console())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    return 0 if all(each.ratio >= 1 for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
