"""Conversations through the engine: log-probs at the model's turns, and a loss that sees nothing of tools and users.

The invariance gate trains masks with holes under every layout.  Here the holes are those of episodes as they are
assembled, and the expected loss is computed from prefixes, by a path that has no mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.config.engine import OptimizerConfig
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.ground.types import StepResult, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author
from mcore_rl.training.engine import Engine
from tests.support import batches, engines, models
from tests.support.forked import run_ranks
from tests.support.scripted_rollout import answered, conversation, turn
from tests.support.settings import actor_config

TOLERANCE = 1e-5
MODEL = models.dense()
LAYOUTS = ("", "cp=2")
MODEL_S, TOOL, USER = Author.model, Author.tool, Author.user
EPISODES = [
    conversation(0, [turn(MODEL_S, (10, 11, 12)), turn(TOOL, (20, 21)), turn(MODEL_S, (13,))], Score(1.0)),
    answered(1, Score(0.0), (4, 5, 6), (14, 15)),
    conversation(2, [turn(MODEL_S, (30,)), turn(USER, (31, 32, 33)), turn(MODEL_S, (34, 35)), turn(TOOL, (36,))],
                 Score(0.5)),
    answered(3, Score(1.0), (7,), (16, 17, 18, 19)),
]  # fmt: skip


def whole() -> TrainBatch:
    """With advantages that tell tokens apart, also where they must not be read."""
    batch = assemble(EPISODES).batch
    mark_T = torch.arange(len(batch.tokens_T)) / 10 - 1
    return replace(
        batch, tokens_T=batch.tokens_T.long(), advantages_T=torch.where(batch.mask_T, mark_T, 1000.0)
    )  # fmt: skip


@dataclass
class Observed:
    """One rank under one layout.  mine: its sequences.  logprobs_T: of them.  prefixes_M: the last token's log-prob of
    each prefix of ``prefixes``.
    """

    mine: TrainBatch
    logprobs_T: Tensor
    prefixes_M: Tensor
    step: StepResult


def prefixes(batch: TrainBatch) -> TrainBatch:
    """For every trained token a sequence of its own that ends there."""
    sequences = []
    for sequence, mask in zip(
        batch.tokens_T.split(list(batch.lengths_S)), batch.mask_T.split(list(batch.lengths_S)), strict=True
    ):
        sequences += [sequence[: place + 1] for place in mask.nonzero().flatten().tolist()]
    tokens_T = torch.cat(sequences)
    lengths = tuple(map(len, sequences))
    return TrainBatch(lengths_S=lengths, tokens_T=tokens_T, mask_T=torch.zeros(len(tokens_T), dtype=torch.bool))


def _observe_layout(groups: ProcessGroups, layout: str) -> Observed:
    def build() -> Engine:
        optim = OptimizerConfig(lr=0.0, clip_grad=0.0)
        return engines.build(groups, MODEL, engines.config(optim=optim), layout=layout)

    batch = whole()
    mine = engines.share_of(batch, groups)
    loss = policy_loss(actor_config(loss_mode="policy_gradient"))
    alone = prefixes(mine)
    logprobs_T, of_prefixes_T = build().score(mine).logprobs_T, build().score(alone).logprobs_T
    assert logprobs_T is not None and of_prefixes_T is not None
    last_M = torch.tensor(alone.lengths_S).cumsum(0) - 1
    step = build().train_step(mine, loss, batches.denominators(batch))
    return Observed(mine=mine, logprobs_T=logprobs_T, prefixes_M=of_prefixes_T[last_M], step=step)


def _observe(rank: Rank) -> dict[str, Observed]:
    by_layout = {}
    with engines.world(rank):
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:
                by_layout[layout] = _observe_layout(groups, layout)
    return by_layout


@pytest.fixture(scope="module")
def observed(processes: None) -> list[dict[str, Observed]]:
    return run_ranks(_observe, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_is_scored_after_all_that_was_said_before_it(layout: str, observed: list[dict[str, Observed]]) -> None:
    for rank in observed:
        seen = rank[layout]
        torch.testing.assert_close(seen.logprobs_T[seen.mine.mask_T], seen.prefixes_M, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_of_the_model_s_turns_alone(layout: str, observed: list[dict[str, Observed]]) -> None:
    shares = [rank[layout] for rank in observed] if layout == "" else [observed[0][layout]]
    total, count = 0.0, 0
    for share in shares:
        assert share.mine.advantages_T is not None
        total -= float((share.mine.advantages_T[share.mine.mask_T].double() * share.prefixes_M.double()).sum())
        count += int(share.mine.mask_T.sum())
    assert count == 13
    for rank in observed:
        assert rank[layout].step.loss == pytest.approx(total / count, abs=TOLERANCE)
        assert rank[layout].step.grad_norm > 0
    assert observed[0][layout].step.grad_norm == pytest.approx(observed[0][""].step.grad_norm, rel=1e-4)
