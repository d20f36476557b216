"""What router replay costs: passes that record or repeat experts beside plain ones, and the check of samples.

    python benchmarks/router_replay.py [--rounds 7] [--json results.json]

One process on the CPU in bfloat16, a mixture of 4 layers and 32 experts, of which a token takes 4; 8 sequences of 256
tokens in a microbatch.  The kinds of passes take turns, and each is compared with its plain neighbour: the ratio is the
median over the rounds, of processor time, so that a busy machine disturbs less.  The check is of one sample of 8,192
tokens with the experts of Qwen3-30B-A3B.  Targets: at most 5 % of a pass, and 20 ms; exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mcore_rl.config.engine import Device, EngineConfig, OptimizerConfig
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.protocol import Sample
from mcore_rl.rollout.routes import checked_routes
from mcore_rl.training.engine import Engine

LONGEST = 256
SEQUENCES = 8
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=64,
    vocab_size=4096,
    max_position_embeddings=LONGEST,
    moe=MoeConfig(num_experts=32, top_k=4, ffn_hidden_size=96),
)
QWEN3_30B = replace(MODEL, num_layers=48, moe=MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=768))
MOST = 0.05
MOST_CHECK_S = 0.02


def policy_gradient(inputs: LossInputs) -> LossSums:
    """The negative mean log-prob, which needs no advantages."""
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def seconds(run: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def passes(rank: Rank, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each kind of pass, round by round."""
    torch.set_num_threads(1)
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    settings = EngineConfig(device=Device.cpu, microbatch_tokens=2048, optim=OptimizerConfig(lr=0.0))
    engine = Engine("actor", MODEL, ParallelConfig(), settings, groups, platform)
    tokens_T = torch.randint(0, MODEL.vocab_size, (SEQUENCES * LONGEST,), generator=torch.Generator().manual_seed(0))
    mask_T = torch.arange(len(tokens_T)) % LONGEST > 0
    plain = TrainBatch(lengths_S=(LONGEST,) * SEQUENCES, tokens_T=tokens_T, mask_T=mask_T)
    told = replace(plain, routing_TLK=engine.score(plain, record_routing=True).routing_TLK)
    counts = Denominators(loss=float(mask_T.sum()), tokens=len(tokens_T), sequences=SEQUENCES)
    kinds: dict[str, Callable[[], object]] = {
        "log-probs": lambda: engine.score(plain),
        "log-probs, recorded": lambda: engine.score(plain, record_routing=True),
        "log-probs, repeated": lambda: engine.score(told),
        "update": lambda: engine.train_step(plain, policy_gradient, counts),
        "update, repeated": lambda: engine.train_step(told, policy_gradient, counts),
    }
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, run in [*kinds.items()] * (rounds + 1):
        taken[kind].append(seconds(run))
    return {kind: times[1:] for kind, times in taken.items()}  # the first warms up


def check_s(rounds: int) -> float:
    """Seconds of the check of one sample of 8,192 tokens."""
    moe = QWEN3_30B.moe
    assert moe is not None
    few = np.random.default_rng(0).random((256, QWEN3_30B.num_layers, moe.num_experts)).argsort(-1)[..., : moe.top_k]
    experts = np.tile(few, (32, 1, 1))[:-1].astype(np.uint8)
    tokens = np.zeros(len(experts) + 1 - 100, dtype=np.int32)
    sample = Sample(
        prompt_id="p",
        index=0,
        tokens=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=(),
        finish=FinishReason.stop,
        experts=experts,
    )
    return statistics.median(seconds(lambda: checked_routes(sample, 100, QWEN3_30B)) for _ in range(rounds))


def main() -> int:
    """Measures, prints, and says whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind of pass, after a warm-up")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    taken = run_ranks(passes, 1, (given.rounds,))[0]
    checked = check_s(given.rounds)
    table = Table("pass", "processor seconds", "of 1,000 tokens, ms", "more than without")
    excess = {}
    for kind, times in taken.items():
        plain = taken[kind.partition(",")[0]]
        excess[kind] = statistics.median(one / other for one, other in zip(times, plain, strict=True)) - 1
        took = statistics.median(times)
        table.add_row(kind, f"{took:.2f}", f"{took / SEQUENCES / LONGEST * 1e6:.0f}", f"{excess[kind]:+.1%}")
    table.add_row("check of a sample of 8,192 tokens", f"{checked:.4f}", f"{checked / 8.192 * 1e3:.1f}", "")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(excess | {"check_s": checked}))
    return int(max(excess.values()) > MOST or checked > MOST_CHECK_S)


if __name__ == "__main__":
    sys.exit(main())
