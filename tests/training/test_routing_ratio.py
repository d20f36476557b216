"""In bfloat16 another layout rounds otherwise and sends some tokens to other experts; with replay it does not.

The ratio of the first update is then 1 but for the rounding of equal sums: 0.027 in its logarithm was seen, and 0.29
without replay.  One process stands for the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, Precision
from mcore_rl.ground.types import LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from tests.support import batches, engines, full_weights, hf_reference, models
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

MODEL = models.moe()
LAYOUTS = ("tp=2,etp=1", "cp=2")
ROUNDING = 0.06  # of a log ratio, in nats: more is no rounding


@dataclass(frozen=True)
class Update:
    """Trained tokens whose ratio to one process is not 1 but for rounding, and the share of experts that differ."""

    beyond_rounding: float
    difference: float | None


def far_tokens(inputs: LossInputs) -> LossSums:
    """A policy gradient that also counts the tokens whose ratio is not 1 but for rounding."""
    assert inputs.logprobs_N is not None and inputs.old_logprobs_N is not None
    change_N = (inputs.logprobs_N - inputs.old_logprobs_N).detach().abs() * inputs.mask_N
    total = -(inputs.logprobs_N * inputs.mask_N).sum()
    return LossSums(total=total, metrics={"beyond": (change_N > ROUNDING).sum()})


def _update(engine: Engine, batch: TrainBatch) -> Update:
    metrics = engine.train_step(batch, far_tokens, batches.denominators(batch)).metrics
    return Update(metrics["beyond"], metrics.get("router/difference"))


def _measure(rank: Rank, start: Weights) -> dict[str, tuple[Update, Update]]:
    """By layout, the first update without replay and with it; also where one process repeats its own choice."""
    batch = batches.ragged(MODEL.vocab_size, batches.LENGTHS * 24)
    still = OptimizerConfig(lr=0.0)
    settings = engines.config(precision=Precision.bfloat16, microbatch_tokens=256, optim=still)

    def load(chunks: list[torch.nn.Module]) -> None:
        full_weights.load_full(chunks, start)

    with engines.world(rank):
        with engines.groups_of("") as groups:
            one = engines.build(groups, MODEL, settings, load=load)  # type: ignore[arg-type]
            sampled = one.score(batch, record_routing=True)
        free = replace(batch, old_logprobs_T=sampled.logprobs_T)
        told = replace(free, routing_TLK=sampled.routing_TLK)
        updates = {}
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:
                engine = engines.build(groups, MODEL, settings, layout=layout, load=load)  # type: ignore[arg-type]
                updates[layout] = _update(engine, free), _update(engine, told)
    return updates


@pytest.fixture(scope="module")
def measured(processes: None) -> dict[str, tuple[Update, Update]]:
    start = hf_reference.full_weights(hf_reference.build(MODEL), MODEL)
    return run_ranks(_measure, 2, (start,))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_ratio_is_1_under_another_layout(layout: str, measured: dict[str, tuple[Update, Update]]) -> None:
    free, told = measured[layout]
    assert free.beyond_rounding >= 1 and free.difference is None, "without replay some tokens go elsewhere"
    assert told.beyond_rounding == 0
    assert told.difference is not None and 0 < told.difference < 0.05


def test_the_same_kernels_make_a_ratio_of_exactly_1(processes: None) -> None:
    (changes_T,) = run_ranks(_alone, 1, ())
    assert changes_T.numel() > 100 and not changes_T.any()


def _alone(rank: Rank) -> Tensor:
    """|log ratio| of one process that repeats its choice in bfloat16, in the forward pass of an update."""
    batch = batches.ragged(MODEL.vocab_size)
    settings = engines.config(precision=Precision.bfloat16, microbatch_tokens=48)
    with engines.world(rank), engines.groups_of("") as groups:
        engine = engines.build(groups, MODEL, settings)
        first = engine.score(batch, record_routing=True)
        told = replace(batch, old_logprobs_T=first.logprobs_T, routing_TLK=first.routing_TLK)
        step = engine.train_step(told, far_tokens, batches.denominators(batch), with_scores=True)
        assert step.scores is not None and step.scores.logprobs_T is not None and first.logprobs_T is not None
        return (step.scores.logprobs_T - first.logprobs_T).abs()
