"""What computing prompts once saves: seconds of an update that repeats them over one that does not, beside the count.

    python benchmarks/shared_prompts.py [--samples 8] [--rounds 3] [--json results.json]

One process on the CPU in float32, a dense model of 4 layers; a step has the samples of two prompts, in one microbatch.
Both ways take turns with the same weights and tokens; the ratio is the median over the rounds, of processor time, which
a busy machine disturbs less.  The limit is the ratio of the operations that the model needs (``families/flops.py``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mcore_rl.config.engine import Device, EngineConfig, OptimizerConfig, Precision, SharePrompts
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.data.shared_prompts import stems_of
from mcore_rl.families.flops import forward_flops
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine

PROMPTS = 2
BUDGET = 65_536
LENGTHS = ((512, 32), (512, 128), (256, 256), (128, 512), (32, 512))  # tokens of a prompt, and of an answer
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=32,
    vocab_size=1024,
    max_position_embeddings=1024,
)


@dataclass(frozen=True)
class Ratio:
    """How often an update that shares fits into one that repeats.

    prompt, answer: tokens.  update, score: processor seconds that repeating takes over sharing.  limit: of operations.
    saved: share of the tokens.  difference: of the losses, relative.
    """

    prompt: int
    answer: int
    update: float
    score: float
    limit: float
    saved: float
    difference: float


def policy_gradient(inputs: LossInputs) -> LossSums:
    """The negative sum of log-probs, which needs no advantages."""
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def sampled(prompt: int, answer: int, samples: int) -> TrainBatch:
    """``samples`` of each of the prompts."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, MODEL.vocab_size, (PROMPTS, 1, prompt), generator=random)
    answers = torch.randint(0, MODEL.vocab_size, (PROMPTS, samples, answer), generator=random)
    tokens = torch.cat([prompts.expand(-1, samples, -1), answers], dim=2)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, :, prompt:] = True
    return TrainBatch(
        lengths_S=(prompt + answer,) * (PROMPTS * samples), tokens_T=tokens.flatten(), mask_T=mask.flatten()
    )


def ratios(rank: Rank, samples: int, rounds: int) -> list[Ratio]:
    """The ratio of each of ``LENGTHS``."""
    torch.set_num_threads(1)
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    settings = EngineConfig(
        device=Device.cpu,
        precision=Precision.float32,
        microbatch_tokens=BUDGET,
        share_prompts=SharePrompts.auto,
        optim=OptimizerConfig(lr=0.0),
    )
    engine = Engine("actor", MODEL, ParallelConfig(), settings, groups, platform)
    return [_ratio(engine, prompt, answer, samples, rounds) for prompt, answer in LENGTHS]


def _ratio(engine: Engine, prompt: int, answer: int, samples: int, rounds: int) -> Ratio:
    batch = sampled(prompt, answer, samples)
    counts = Denominators(loss=float(batch.mask_T.sum()), tokens=batch.tokens_T.numel(), sequences=len(batch.lengths_S))
    updates = []
    scores = []
    losses = dict[bool, float]()
    for number in range(rounds + 1):
        seconds: dict[tuple[str, bool], float] = {}
        for shares in (False, True):
            engine.shares_prompts = shares
            begin = time.process_time()
            losses[shares] = engine.train_step(batch, policy_gradient, counts).loss
            seconds["update", shares] = time.process_time() - begin
            begin = time.process_time()
            engine.score(batch, with_entropy=False)
            seconds["score", shares] = time.process_time() - begin
        if number:  # the first warms up
            updates.append(seconds["update", False] / seconds["update", True])
            scores.append(seconds["score", False] / seconds["score", True])
    stems = stems_of(batch.tokens_T.numpy(), batch.mask_T.numpy(), batch.lengths_S)
    whole = forward_flops(MODEL, batch.lengths_S)
    again = forward_flops(MODEL, [stem.shared for stem in stems for _ in stem.members[1:]])
    return Ratio(
        prompt=prompt,
        answer=answer,
        update=statistics.median(updates),
        score=statistics.median(scores),
        limit=whole / (whole - again),
        saved=sum(stem.saved for stem in stems) / sum(batch.lengths_S),
        difference=abs(losses[True] - losses[False]) / abs(losses[False]),
    )


def show(measured: Sequence[Ratio], samples: int) -> Table:
    """The ratios as a table."""
    heads = ("prompt : answer", "tokens saved", "limit", "update", "log-probs", "losses differ by")
    table = Table(*heads, title=f"seconds that repeat prompts over seconds that do not, {samples} samples a prompt")
    for each in measured:
        table.add_row(
            f"{each.prompt} : {each.answer}",
            f"{each.saved:.0%}",
            f"{each.limit:.2f}",
            f"{each.update:.2f}",
            f"{each.score:.2f}",
            f"{each.difference:.0e}",
        )
    return table


def main() -> int:
    """Measures and prints; exits with 1 where the losses differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="of each length, after a warm-up")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    measured = run_ranks(ratios, 1, (given.samples, given.rounds))[0]
    Console().print(show(measured, given.samples))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")
    return int(max(each.difference for each in measured) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
