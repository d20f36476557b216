"""What each policy loss says of itself; their formulas are held by ``test_policy``."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import trained_rows
from mcore_rl.config.algorithm_registry import policy_losses
from tests.algorithms.loss_cases import drawn, whole
from tests.support.settings import actor_config
from tests.support.spy import spied

LOSSES = {mode: row for mode, row in policy_losses().items() if not row.pairs}  # the other needs pairs: test_preference


def test_rows_say_whether_old_logprobs_are_read() -> None:
    inputs = whole(drawn(0).without("old_logprobs"))
    for mode, row in LOSSES.items():
        try:
            row.load()(inputs, actor_config(loss_mode=mode))
        except AssertionError:
            assert row.needs_old, mode
        else:
            assert not row.needs_old, mode


def test_a_loss_reads_the_keys_that_it_says() -> None:
    for mode, row in LOSSES.items():
        config, read = spied(actor_config(loss_mode=mode))
        row.load()(whole(drawn(0)), config)
        if row.selection is not None:
            row.selection.load()(torch.zeros(2), torch.zeros(2), config)
            read.add(row.selection.share)
        assert {f"actor.{field}" for field in read} == row.own_keys, mode


def test_a_loss_counts_clips_of_trained_rows_alone() -> None:
    """By itself, too: without the zeros that ``policy`` puts into rows that are not trained."""
    for seed in range(5):
        inputs = whole(drawn(seed, lengths=(3, 4, 2, 6, 4)))
        for mode, row in LOSSES.items():
            config = actor_config(loss_mode=mode)
            alone, zeroed = row.load()(inputs, config).metrics, row.load()(trained_rows(inputs), config).metrics
            assert {name: float(x) for name, x in alone.items()} == {name: float(x) for name, x in zeroed.items()}, mode
