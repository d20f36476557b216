"""Divergences over the vocabulary, forward and backward, beside ``token_logprobs`` on logits of the same shape.

    python benchmarks/divergence.py [--tokens 256] [--hidden 2048] [--device auto] [--json results.json]

Each divergence is timed with its products, which make the teacher's logits of hidden states in forward and again in
backward, and without them: less the time of so many products alone, measured in the same process.  The limit is the
time of the products: no kernel makes the teacher's logits without them.  Times are the best of the repetitions.

Exits with 1 where a KL without its products takes more than ``TARGET`` times what ``token_logprobs`` takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config.algorithm import Divergence
from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import Platform, detect, set_device, synchronize
from mcore_rl.training.divergence import PRODUCT_ROWS, divergence
from mcore_rl.training.logprobs import cache_sized_chunk_bytes, token_logprobs

VOCAB_SIZE = 152_064
TARGET = 1.3
# How often the teacher's logits are made: in forward, once more where they are mixed, and in backward.
PRODUCTS = {Divergence.reverse_kl: 2, Divergence.forward_kl: 2, Divergence.jensen_shannon: 3}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of one divergence.  products_s: of its products alone.  logprobs_s: of ``token_logprobs``."""

    divergence: str
    time_s: float
    products_s: float
    logprobs_s: float

    @property
    def ratio(self) -> float:
        """Over ``token_logprobs``, with the products."""
        return self.time_s / self.logprobs_s

    @property
    def ratio_without(self) -> float:
        """Over ``token_logprobs``, without the products."""
        return (self.time_s - self.products_s) / self.logprobs_s


def best_s(platform: Platform, run: Callable[[], object], repetitions: int) -> float:
    """The least seconds of ``run``, after one run that is not counted."""
    times = []
    for _ in range(repetitions + 1):
        synchronize(platform)
        start = time.perf_counter()
        run()
        synchronize(platform)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(platform: Platform, tokens: int, hidden: int, repetitions: int) -> list[Measurement]:
    """Every divergence on ``tokens`` tokens in bfloat16."""
    device = torch.device(platform.device_type)
    dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    logits_TV, hidden_TH, rows_VH = normal(tokens, VOCAB_SIZE), normal(tokens, hidden), normal(VOCAB_SIZE, hidden)
    rows_VH *= 2 * hidden**-0.5
    chunk_bytes, places_T = cache_sized_chunk_bytes(platform), torch.arange(tokens, device=device)

    def differentiated(value_of: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def run() -> object:
            through_TV = logits_TV.clone().requires_grad_().view_as(logits_TV)  # overwritten by ``token_logprobs``
            return torch.autograd.grad(value_of(through_TV).mean(), through_TV)

        return run

    def products() -> None:
        for block_BH in hidden_TH.split(PRODUCT_ROWS):
            block_BH @ rows_VH.t()

    copy_s = best_s(platform, logits_TV.clone, repetitions)
    shared: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "chunk_bytes": chunk_bytes}
    logprobs = differentiated(lambda x_TV: token_logprobs(x_TV, places_T, with_entropy=False, **shared)[0])
    logprobs_s, product_s = (best_s(platform, run, repetitions) for run in (logprobs, products))
    return [
        Measurement(
            divergence=kind.value,
            time_s=best_s(
                platform,
                differentiated(
                    lambda x_TV, kind=kind: divergence(x_TV, hidden_TH, [rows_VH], places_T, kind, **shared)
                ),
                repetitions,
            )
            - copy_s,
            products_s=count * product_s,
            logprobs_s=logprobs_s - copy_s,
        )
        for kind, count in PRODUCTS.items()
    ]


def main() -> int:
    """Prints a line for each divergence; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", type=Device, default=Device.auto)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    platform = detect(arguments.device)
    set_device(platform, 0)
    results = measure(platform, arguments.tokens, arguments.hidden, arguments.repetitions)
    for each in results:
        sys.stdout.write(
            f"{each.divergence:<15} {each.time_s:.3f} s, of which products {each.products_s:.3f} s; token_logprobs "
            f"{each.logprobs_s:.3f} s; {each.ratio:.2f} times, without products {each.ratio_without:.2f}\n"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    kls = [each for each in results if each.divergence != Divergence.jensen_shannon.value]
    return int(any(each.ratio_without > TARGET for each in kls))


if __name__ == "__main__":
    sys.exit(main())
