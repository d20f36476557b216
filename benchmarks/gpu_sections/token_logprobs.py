"""Log-probs and entropies of tokens: ``token_logprobs`` against ``log_softmax`` under autograd."""

from __future__ import annotations

import torch

from benchmarks.gpu_sections.section import GIB, Bench, Fact, Facts, guarded
from benchmarks.logprobs import DTYPES, PLAIN_FLOAT32_COPIES, VOCAB_SIZES, fused_path, plain_path, run_once
from mcore_rl.parallel.device import memory
from mcore_rl.training.logprobs import cache_sized_chunk_bytes

TOKENS = 4_096
REPETITIONS = 3


def facts(bench: Bench) -> Facts:
    """Time and extra memory of both paths in each dtype, and that they agree."""
    tokens = 64 if bench.tiny else TOKENS
    for vocab_size in (1_000,) if bench.tiny else VOCAB_SIZES:
        for name, dtype in DTYPES.items():
            yield from guarded(f"{vocab_size:,} {name}", of_case(bench, tokens, vocab_size, name, dtype))


def of_case(bench: Bench, tokens: int, vocab_size: int, name: str, dtype: torch.dtype) -> Facts:
    """One vocabulary in one dtype; without the plain path where it would not fit."""
    case = f"{tokens:,} x {vocab_size:,} {name}"
    logits_TV = torch.empty(tokens, vocab_size, dtype=dtype, device=bench.device)
    targets_T = torch.arange(tokens, device=bench.device) * 37 % vocab_size
    paths = {"plain": plain_path, "ours": fused_path(cache_sized_chunk_bytes(bench.platform))}
    if PLAIN_FLOAT32_COPIES * 4 * tokens * vocab_size > memory(bench.platform).free_bytes:
        yield Fact(what=f"plain: {case}", value="left out", beside="too little device memory is free")
        del paths["plain"]
    means = {}
    times = {}
    extras = {}
    for path_name, path in paths.items():
        runs = [run_once(bench.platform, path, logits_TV, targets_T) for _ in range(REPETITIONS)]
        times[path_name] = min(seconds for seconds, _, _ in runs)
        extras[path_name] = min(extra for _, extra, _ in runs)
        logprobs_T, entropy_T = runs[-1][2]
        means[path_name] = (logprobs_T.mean().item(), entropy_T.mean().item())
        beside = f"{extras[path_name] / GIB:.3f} GiB beyond the logits' {logits_TV.nbytes / GIB:.3f}"
        if path_name != "plain" and "plain" in paths:
            ratio = extras[path_name] / max(1, extras["plain"])
            beside += f"; {times['plain'] / times[path_name]:.2f} times as fast as plain, {ratio:.4f} of its memory"
            differences = [abs(a - b) for a, b in zip(means["plain"], means[path_name], strict=True)]
            beside += f"; means differ by {max(differences):.1e} nats"
        yield Fact(what=f"{path_name}: {case}", value=1e3 * times[path_name], unit="ms", beside=beside)
