"""Log-probs and entropies of tokens, forward and backward: ``token_logprobs`` against what one would write.

    python benchmarks/logprobs.py [--tokens 4096] [--device auto] [--json results.json]
    python benchmarks/logprobs.py --sweep        # time of chunk sizes instead; no targets

The plain path is ``log_softmax(logits.float(), -1)``, a gather, and ``-(p log p).sum()`` under autograd.  Every path of
every case runs in a process of its own, one after the other.  Extra memory is the peak during forward and backward less
what was in use before them (the logits, the targets, torch itself): resident memory on a CPU, the allocator's on an
accelerator.  Time is the best of the repetitions.  The limit is the time to move the bytes that nobody can avoid, the
logits read in forward and read and written in backward, at the bandwidth of a copy measured in the same process.

Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import Platform, detect, memory, reset_peak_memory, set_device, synchronize
from mcore_rl.training.logprobs import cache_sized_chunk_bytes, token_logprobs

if TYPE_CHECKING:  # benchmarks/gpu.py measures by these functions where no rich is installed
    from rich.table import Table

VOCAB_SIZES = (152_064, 32_000)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MEMORY_TARGET = 0.35
TIME_TARGET = 0.8
PLAIN_FLOAT32_COPIES = 7  # [T, V]: the five that the plain path was seen to hold at once, the logits, one to spare
SWEEP_TOKENS = 512
SWEEP_CHUNK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
Outputs = tuple[Tensor, Tensor]
TokenPath = Callable[[Tensor, Tensor], Outputs]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One path of one case.  The means of the outputs show that both paths computed the same."""

    time_s: float
    extra_bytes: int
    logits_bytes: int
    bandwidth_bytes_s: float
    mean_logprob: float
    mean_entropy: float

    @property
    def limit_s(self) -> float:
        """Seconds for the bytes that nobody can avoid: read in forward, read and written in backward."""
        return 3 * self.logits_bytes / self.bandwidth_bytes_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of one case."""

    vocab_size: int
    dtype: str
    plain: Measurement
    fused: Measurement

    @property
    def memory_ratio(self) -> float:
        """Extra memory of the fused path over that of the plain one."""
        return self.fused.extra_bytes / self.plain.extra_bytes

    @property
    def time_ratio(self) -> float:
        """Time of the fused path over that of the plain one."""
        return self.fused.time_s / self.plain.time_s

    @property
    def passed(self) -> bool:
        """Whether both targets are met."""
        return self.memory_ratio <= MEMORY_TARGET and self.time_ratio <= TIME_TARGET


def plain_path(logits_TV: Tensor, targets_T: Tensor) -> Outputs:
    """What one would write."""
    log_p_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    logprobs_T = log_p_TV.gather(1, targets_T.unsqueeze(1)).squeeze(1)
    return logprobs_T, -(log_p_TV.exp() * log_p_TV).sum(-1)


def fused_path(chunk_bytes: int) -> TokenPath:
    """``token_logprobs`` with a given chunk size."""

    def path(logits_TV: Tensor, targets_T: Tensor) -> Outputs:
        logprobs_T, entropy_T = token_logprobs(
            logits_TV, targets_T, vocab_size=logits_TV.shape[1], chunk_bytes=chunk_bytes
        )
        assert entropy_T is not None
        return logprobs_T, entropy_T

    return path


def fill(logits_TV: Tensor) -> None:
    """Standard normal logits times 2, without a temporary of their size."""
    generator = torch.Generator(logits_TV.device).manual_seed(0)
    for start in range(0, logits_TV.shape[0], 64):
        logits_TV[start : start + 64].normal_(std=2.0, generator=generator)


def run_once(platform: Platform, path: TokenPath, logits_TV: Tensor, targets_T: Tensor) -> tuple[float, int, Outputs]:
    """Seconds, extra bytes at the peak, and the outputs, of one forward and backward down to the logits.

    The logits are made anew, since one of the paths overwrites them.
    """
    fill(logits_TV)
    leaf_TV = logits_TV.detach().requires_grad_()
    synchronize(platform)
    reset_peak_memory(platform)
    bytes_before = memory(platform).allocated_bytes
    start = time.perf_counter()
    through_TV = leaf_TV.view_as(leaf_TV)  # the output of an operation, as a projection's is
    logprobs_T, entropy_T = path(through_TV, targets_T)
    torch.autograd.grad(logprobs_T.mean() - 0.01 * entropy_T.mean(), through_TV)
    synchronize(platform)
    seconds = time.perf_counter() - start
    return seconds, memory(platform).peak_bytes - bytes_before, (logprobs_T.detach(), entropy_T.detach())


def copy_bandwidth(platform: Platform, device: torch.device) -> float:
    """Bytes per second, read and written, of a copy far larger than any cache; the best of five."""
    source = torch.ones(2**30, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = []
    for _ in range(5):
        synchronize(platform)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(platform)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def measure(platform: Platform, path: str, vocab_size: int, dtype: str, tokens: int, repetitions: int) -> Measurement:
    """Memory of the first repetition, the best time of all."""
    device = set_device(platform, 0)
    run = plain_path if path == "plain" else fused_path(cache_sized_chunk_bytes(platform))
    run_once(platform, run, torch.empty(8, 64, device=device), torch.arange(8, device=device))  # loads libraries
    bandwidth = copy_bandwidth(platform, device)
    logits_TV = torch.empty(tokens, vocab_size, dtype=DTYPES[dtype], device=device)
    targets_T = torch.arange(tokens, device=device) * 37 % vocab_size
    runs = [run_once(platform, run, logits_TV, targets_T) for _ in range(repetitions)]
    _, extra_bytes, (logprobs_T, entropy_T) = runs[0]
    return Measurement(
        time_s=min(seconds for seconds, _, _ in runs),
        extra_bytes=extra_bytes,
        logits_bytes=logits_TV.nbytes,
        bandwidth_bytes_s=bandwidth,
        mean_logprob=logprobs_T.mean().item(),
        mean_entropy=entropy_T.mean().item(),
    )


def measure_in_a_process(options: argparse.Namespace, path: str, vocab_size: int, dtype: str) -> Measurement:
    """``measure`` in a fresh process of this script: nothing that another case left behind is counted."""
    flags = {"--worker": path, "--vocab-size": vocab_size, "--dtype": dtype, "--tokens": options.tokens}
    flags |= {"--device": options.device, "--repetitions": options.repetitions}
    command = [sys.executable, __file__, *(str(part) for item in flags.items() for part in item)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"the {path} path of V={vocab_size} {dtype} ended with {finished.returncode}")
    return Measurement(**json.loads(finished.stdout))


def compare(platform: Platform, options: argparse.Namespace, vocab_size: int, dtype: str) -> Comparison:
    """Both paths of one case, one after the other; they must agree on the outputs."""
    needed = PLAIN_FLOAT32_COPIES * 4 * options.tokens * vocab_size
    free = memory(platform).free_bytes
    if needed > free:
        raise SystemExit(
            f"the plain path of V={vocab_size} may need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: "
            f"write --tokens {options.tokens * free // needed} or less"
        )
    plain = measure_in_a_process(options, "plain", vocab_size, dtype)
    fused = measure_in_a_process(options, "fused", vocab_size, dtype)
    for name in ("mean_logprob", "mean_entropy"):
        difference = abs(getattr(plain, name) - getattr(fused, name))
        assert difference < 1e-4, f"{name} of V={vocab_size} {dtype} differs by {difference} between the paths"
    return Comparison(vocab_size=vocab_size, dtype=dtype, plain=plain, fused=fused)


def comparison_table(platform: Platform, options: argparse.Namespace, comparisons: Sequence[Comparison]) -> Table:
    """One row a case."""
    from rich.table import Table

    where = f"{platform.device_name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    table = Table(title=f"log-probs and entropies, forward + backward, T={options.tokens:,}\n{where}")
    for heading in ("V", "logits", "extra GiB plain", "fused", f"ratio (<= {MEMORY_TARGET})"):
        table.add_column(heading, justify="right")
    for heading in ("time s plain", "fused", f"ratio (<= {TIME_TARGET})", "limit s", "fused / limit", "verdict"):
        table.add_column(heading, justify="right")
    for case in comparisons:
        gib = [f"{side.extra_bytes / 2**30:.3f}" for side in (case.plain, case.fused)]
        seconds = [f"{side.time_s:.3g}" for side in (case.plain, case.fused)]
        limit_s = case.fused.limit_s
        limit = [
            f"{limit_s:.3g} at {case.fused.bandwidth_bytes_s / 1e9:.0f} GB/s",
            f"{case.fused.time_s / limit_s:.1f}",
        ]
        verdict = "[green]pass[/green]" if case.passed else "[red]MISSED[/red]"
        ratios = [f"{case.memory_ratio:.4f}", f"{case.time_ratio:.3f}"]
        table.add_row(f"{case.vocab_size:,}", case.dtype, *gib, ratios[0], *seconds, ratios[1], *limit, verdict)
    return table


def sweep_table(platform: Platform) -> Table:
    """Nanoseconds per logit of forward and backward for a range of chunk sizes."""
    from rich.table import Table

    device = set_device(platform, 0)
    table = Table(title=f"ns per logit, forward + backward, T={SWEEP_TOKENS}; {torch.get_num_threads()} threads")
    cases = [(vocab_size, dtype) for vocab_size in VOCAB_SIZES for dtype in DTYPES]
    table.add_column("chunk tokens", justify="right")
    for vocab_size, dtype in cases:
        table.add_column(f"MiB\nV={vocab_size:,}", justify="right")
        table.add_column(f"ns\n{dtype}", justify="right")
    rows = [[str(chunk_tokens)] for chunk_tokens in SWEEP_CHUNK_TOKENS]
    for vocab_size, dtype in cases:
        logits_TV = torch.empty(SWEEP_TOKENS, vocab_size, dtype=DTYPES[dtype], device=device)
        targets_T = torch.arange(SWEEP_TOKENS, device=device)
        for row, chunk_tokens in zip(rows, SWEEP_CHUNK_TOKENS, strict=True):
            chunk_bytes = 4 * chunk_tokens * vocab_size
            path = fused_path(chunk_bytes)
            seconds = min(run_once(platform, path, logits_TV, targets_T)[0] for _ in range(3))
            row += [f"{chunk_bytes / 2**20:.2f}", f"{seconds / logits_TV.numel() * 1e9:.2f}"]
    for row in rows:
        table.add_row(*row)
    return table


def parse_options() -> argparse.Namespace:
    """The command line; the hidden flags are those of ``measure_in_a_process``."""
    parser = argparse.ArgumentParser(description="token_logprobs against log_softmax under autograd")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", choices=[device.value for device in Device], default=Device.auto.value)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--sweep", action="store_true", help="time chunk sizes instead")
    parser.add_argument("--worker", choices=["plain", "fused"], help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=list(DTYPES), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Exit status: 1 where a target is missed."""
    from rich.console import Console

    options = parse_options()
    platform = detect(Device(options.device))
    if options.worker is not None:
        case = (options.worker, options.vocab_size, options.dtype, options.tokens, options.repetitions)
        print(json.dumps(asdict(measure(platform, *case))))
        return 0
    console = Console(width=max(Console().width, 160))
    if options.sweep:
        console.print(sweep_table(platform))
        return 0
    comparisons = [compare(platform, options, vocab_size, dtype) for vocab_size in VOCAB_SIZES for dtype in DTYPES]
    console.print(comparison_table(platform, options, comparisons))
    if options.json is not None:
        rows = [
            asdict(case) | {"memory_ratio": case.memory_ratio, "time_ratio": case.time_ratio, "passed": case.passed}
            for case in comparisons
        ]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(case.passed for case in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
