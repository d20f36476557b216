"""TRL's own loss of reward models against ours; skipped where TRL is not installed.

See ``test_trl.py`` for how to have it.  The loss is a method, which is called on an object
that has what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.preference import MARGIN
from mcore_rl.algorithms.reward_loss import losses, score_sums
from mcore_rl.config.reward_training import RewardLossConfig
from tests.support.oracles import oracles

PAIRS = 6


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with oracles("TRL"):
        yield


def trl(score_S: Tensor, margin_P: Tensor | None, centre: float | None) -> tuple[Tensor, float]:
    """(loss, accuracy) of TRL.  score_S: those of the preferred answers, then the others'."""
    trainer = import_module("trl.trainer.reward_trainer").RewardTrainer

    def model(**asked: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=score_S[:, None])

    model.training = True  # type: ignore[attr-defined]
    same = SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x)
    metrics: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    known = SimpleNamespace(
        model=model, accelerator=same, args=SimpleNamespace(center_rewards_coefficient=centre), _metrics=metrics,
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(2 * PAIRS, 1)} | ({} if margin_P is None else {"margin": margin_P})
    loss: Tensor = trainer.compute_loss(known, model, inputs)
    return loss, metrics["train"]["accuracy"][0]


@pytest.mark.parametrize("centre", [None, 0.01])
@pytest.mark.parametrize("margins", [False, True])
def test_the_loss_is_that_of_trl(margins: bool, centre: float | None) -> None:
    random = torch.Generator().manual_seed(4)
    score_S = torch.randn(2 * PAIRS, generator=random, dtype=torch.float64).requires_grad_()
    margin_P = torch.rand(PAIRS, generator=random, dtype=torch.float64) if margins else None
    theirs, accuracy = trl(score_S, margin_P, centre)
    config = RewardLossConfig(centering_coef=centre or 0.0)
    first_P, second_P = torch.arange(2 * PAIRS).view(2, PAIRS)
    extra_S = {} if margin_P is None else {MARGIN: torch.cat([margin_P, margin_P])}
    ours = losses(score_S, first_P, second_P, extra_S, config).mean()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    for own, other in zip(*(torch.autograd.grad(loss, score_S) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=1e-12)
        assert own.any()
    sums = score_sums(score_S.detach(), first_P, second_P, extra_S, config, torch.ones(2 * PAIRS))
    assert float(sums["accuracy"]) / PAIRS == pytest.approx(accuracy)
