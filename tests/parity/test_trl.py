"""TRL's own loss against ours, on random ragged batches; skipped where TRL is not installed.

It is no dependency: ``tools/set_up_oracles.sh`` puts it, and what it imports, beside the environment, of the versions
in ``tests/oracles.txt``.

The loss is a method, which is called on an object that has what it reads.  Batches have holes in their masks, and
responses that are masked or of one token.  ``KNOWN`` lists in what we differ on purpose; a test that meets an entry
names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.config.roles import LossAggregation
from tests.algorithms.loss_cases import Minibatch
from tests.support.loss_parity import CONSTANT, actor, minibatches, ours_and_theirs, rows_of
from tests.support.oracles import oracles

KNOWN = {
    "trl's cispo": "has no lower bound and its upper bound is epsilon_high itself, not 1 + epsilon_high",
    "trl's k3": "is exact everywhere: ours goes on along its tangent past a log-ratio of 10",
    "means over sequences": "are over those that are trained; TRL counts those that are masked, too",
}


@pytest.fixture(scope="module")
def grpo_trainer() -> Iterator[Any]:
    with oracles("TRL"):
        yield import_module("trl.trainer.grpo_trainer").GRPOTrainer


class OneProcess:
    """Of accelerate, what the loss asks for."""

    num_processes, sync_gradients = 1, True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    gather_for_metrics = gather


def trl_loss(trainer: Any, batch: Minibatch, loss_type: str, level: str = "token", **arguments: Any) -> Tensor:
    mask, logprobs = rows_of(batch, "mask"), rows_of(batch, "logprobs")
    args = dict(delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.125, sapo_temperature_neg=1.75)
    known = dict(
        args=SimpleNamespace(**args | arguments), loss_type=loss_type, importance_sampling_level=level, beta=0.0,
        epsilon_low=0.2, epsilon_high=0.3, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=True,
        vllm_importance_sampling_correction=True, aux_loss_enabled=False, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, model=SimpleNamespace(training=False), accelerator=OneProcess(),
        max_completion_length=int(CONSTANT), _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )  # fmt: skip
    if "ref" in arguments:
        known["beta"] = 0.7
    ids = torch.zeros(len(batch.lengths), 1, dtype=torch.long)
    inputs = dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=mask.long(), completion_mask=mask,
        advantages=torch.stack([x[0] for x in batch.fields["advantages"].split(list(batch.lengths))]),
        old_per_token_logps=rows_of(batch, "old_logprobs"), importance_sampling_ratio=rows_of(batch, "weights"),
        ref_per_token_logps=rows_of(batch, "ref_logprobs"), num_items_in_batch=mask.sum(),
    )  # fmt: skip
    loss: Tensor = trainer._compute_loss(SimpleNamespace(**known), None, inputs)
    return loss


TRL = [
    ("dapo", "ppo_clip", LossAggregation.token_mean, {"delta": 1.6}),
    ("bnpo", "ppo_clip", LossAggregation.token_mean, {"delta": 1.6}),
    ("grpo", "ppo_clip", LossAggregation.seq_mean_token_mean, {"delta": 1.6}),
    ("dr_grpo", "ppo_clip", LossAggregation.sum_over_constant, {"delta": 1.6}),
    ("dapo", "ppo_clip", LossAggregation.token_mean, {}),  # without delta: no dual clip
    ("sapo", "sapo", LossAggregation.seq_mean_token_mean, {}),
]


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize(("loss_type", "mode", "aggregation", "changes"), TRL)
def test_losses_are_trl_s(
    grpo_trainer: Any,
    loss_type: str,
    mode: str,
    aggregation: LossAggregation,
    changes: dict[str, Any],
    with_kl: bool,
) -> None:
    """``trl's k3``: log-ratios to the reference stay below 10.  ``means over sequences``: put right."""
    for batch in minibatches():
        theirs = trl_loss(grpo_trainer, batch, loss_type, **changes, **({"ref": True} if with_kl else {}))
        if aggregation is not LossAggregation.token_mean:
            trained = int((sequence_counts(batch.mask, batch.lengths) > 0).sum())
            theirs = theirs * len(batch.lengths) / trained
        config = actor(mode, aggregation, use_kl_loss=with_kl, kl_loss_coef=0.7)
        config.clip_ratio_c = changes.get("delta")
        ours_and_theirs(batch, config, theirs)


def test_gspo_is_trl_s_sequence_level_ratio(grpo_trainer: Any) -> None:
    """With one advantage a response; importance weights of tokens are left out, which TRL multiplies once a token."""
    for batch in minibatches():
        batch = replace(batch, fields=batch.fields | {"weights": torch.ones_like(batch.fields["weights"])})
        theirs = trl_loss(grpo_trainer, batch, "grpo", level="sequence")
        trained = int((sequence_counts(batch.mask, batch.lengths) > 0).sum())
        theirs = theirs * len(batch.lengths) / trained
        ours_and_theirs(batch, actor("gspo", LossAggregation.seq_mean_token_mean), theirs)


def test_cispo_is_trl_s_with_its_bounds(grpo_trainer: Any) -> None:
    """``trl's cispo``: handed our bounds in its words."""
    for batch in minibatches():
        theirs = trl_loss(grpo_trainer, batch, "cispo")
        config = replace(actor("cispo"), clip_ratio_low=1.0, clip_ratio_high=0.3 - 1.0)
        ours_and_theirs(batch, config, theirs)
