"""Minibatches as frameworks pad them, and our losses beside theirs; for tests/parity/test_verl.py and test_trl.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.config.roles import ActorConfig, LossAggregation
from tests.algorithms import loss_cases
from tests.algorithms.loss_cases import Minibatch
from tests.support.settings import actor_config

TIGHT = dict(atol=1e-9, rtol=1e-9)
NEAR = dict(atol=1e-7, rtol=1e-7)  # where verl adds 1e-8 to a count
SEEDS = range(25)
CONSTANT = 30.0  # of the longest row, by which verl divides, and TRL as its longest completion


def rows_of(batch: Minibatch, name: str) -> Tensor:
    """A field of a minibatch as [S, longest], with gradient to the same leaf."""
    x = batch.mask.double() if name == "mask" else batch.fields[name]
    return pad_sequence(list(x.split(list(batch.lengths))), batch_first=True)


def minibatches() -> Iterator[Minibatch]:
    """One advantage a response, as group estimators have it; the last is masked, and some have one token or none."""
    for seed in SEEDS:
        batch = loss_cases.drawn(seed, lengths=(2, 5, 1, 17, 30, 4))
        advantages = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        yield replace(batch, fields=batch.fields | {"advantages": advantages[batch.sequence]})


def actor(mode: str, aggregation: LossAggregation = LossAggregation.token_mean, **changes: Any) -> ActorConfig:
    return actor_config(
        loss_mode=mode, loss_agg_mode=aggregation, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.6,
        tau_pos=1.125, tau_neg=1.75, **changes,
    )  # fmt: skip


def ours_and_theirs(batch: Minibatch, config: ActorConfig, theirs: Tensor) -> None:
    """The loss and all gradients."""
    counts_S = sequence_counts(batch.mask, batch.lengths)
    mine = policy_loss(config)(loss_cases.whole(batch)).total / loss_denominator(
        counts_S, config.loss_agg_mode, CONSTANT
    )
    bound = NEAR if config.loss_agg_mode is LossAggregation.seq_mean_token_mean else TIGHT
    torch.testing.assert_close(mine, theirs, **bound)
    for one, other in zip(batch.gradients(mine), batch.gradients(theirs), strict=True):
        torch.testing.assert_close(one, other, **bound)
