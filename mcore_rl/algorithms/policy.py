"""The actor's loss: policy loss, entropy bonus, KL to the reference and divergence from a teacher, token by token.

Every metric is a sum over trained tokens; divided by the trained tokens of the global minibatch it is a mean over
tokens, whatever the loss's own aggregation:

- ``actor/policy_loss``: the policy loss, importance weights included
- ``actor/clip_fraction``, ``_low``, ``_high`` (losses with a clip range), ``_dual`` (ppo_clip)
- ``actor/ratio``, ``actor/approx_kl`` (k3), ``actor/approx_kl_k1``: between the policy before the step (old) and the
  current one, if there are old log-probs; and as maxima ``actor/log_ratio_rise`` and ``actor/log_ratio_fall``, the
  largest ``log r`` and ``-log r``, nats
- ``actor/entropy``: if entropies are computed
- ``actor/kl_loss``: the KL to the reference, before its coefficient
- ``actor/NAME``: what else a policy loss of a user's file sums
- ``distill/DIVERGENCE``, and as a maximum ``distill/DIVERGENCE_max``: from the teacher, before its coefficient; of
  several, ``distill/DIVERGENCE/NAME`` too, a mean over the tokens that this one teaches

Those of pairs, ``pairs/*``, are sums and means over responses (``preference.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from mcore_rl.algorithms.kl import PENALTIES, kl_k1, kl_k3
from mcore_rl.algorithms.losses.aggregation import sum_token_losses
from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios, masked_sum, trained_rows
from mcore_rl.algorithms.preference import PREFIX, means
from mcore_rl.algorithms.role_loss import RoleLoss, UpdateSums
from mcore_rl.config import algorithm_registry
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.types import TAUGHT_BY, LossInputs, LossSums

TAUGHT = "taught"  # metrics of the loss alone: the tokens that each teacher teaches
# The loss's name of a mean over trained tokens -> its key in metrics.jsonl.
REPORTED = {
    "actor/ratio": "actor/ratio_mean",
    "actor/approx_kl_k1": "actor/kl_k1",
    "actor/approx_kl": "actor/kl_k3",
    "actor/clip_fraction_low": "actor/clip_fraction_low",
    "actor/clip_fraction_high": "actor/clip_fraction_high",
    "actor/clip_fraction_dual": "actor/clip_fraction_dual",
    "actor/selected_fraction": "actor/selected_fraction",
    "actor/kl_loss": "kl/loss",
}
# Sums of our own losses.  Any other is of a user's loss, and is reported as it is.
_OURS = frozenset({*REPORTED, "actor/policy_loss", "actor/clip_fraction", "actor/entropy"})
_OUR_PREFIXES = ("distill/", f"{TAUGHT}/", PREFIX, "router/")


@dataclass(frozen=True)
class ActorLoss(RoleLoss):
    """The actor's loss as a sum; see the module.  teacher: the term that a teacher adds; None: it adds none.

    taught_by: the names of several teachers, by their numbers in the batch's ``TAUGHT_BY``.

    ``aggregate(weight * policy_loss - entropy_coeff * entropy + kl_loss_coef * kl + distill.coef * divergence)``
    """

    config: ActorConfig
    teacher: DistillConfig | None = None
    taught_by: tuple[str, ...] = ()

    @property
    def with_entropy(self) -> bool:
        """Whether the engine must compute entropies with gradient, which only the entropy bonus needs."""
        return self.config.entropy_coeff != 0

    @property
    def distill(self) -> DistillConfig | None:
        """The divergence from a teacher that the engine must compute; None: none."""
        return self.teacher

    @property
    def with_pairs(self) -> bool:
        """Whether the policy loss looks at both sequences of a pair."""
        return algorithm_registry.policy_loss(self.config.loss_mode).pairs

    @property
    def with_full_kl(self) -> bool:
        """Whether the engine must compute the exact KL to the reference."""
        return self.config.with_full_kl

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's rows; without a trained row, a zero that is connected to the graph.

        Needs advantages; old log-probs if the policy loss does; with ``use_kl_loss`` reference log-probs, or with
        ``with_full_kl`` the KL itself; with ``with_entropy`` entropies.
        """
        config = self.config
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None, "an actor's forward pass makes log-probs"
        losses: TokenLosses = algorithm_registry.policy_loss(config.loss_mode).load()(inputs, config)
        policy_N = losses.loss_N if inputs.weights_N is None else losses.loss_N * inputs.weights_N
        loss_N = policy_N
        per_token = {"actor/policy_loss": policy_N}

        if inputs.entropy_N is not None:
            per_token["actor/entropy"] = inputs.entropy_N
        if self.with_entropy:
            assert inputs.entropy_N is not None, "an entropy bonus needs entropies"
            loss_N = loss_N - config.entropy_coeff * inputs.entropy_N
        if config.use_kl_loss:
            kl_N = self._kl(inputs)
            loss_N = loss_N + config.kl_loss_coef * kl_N
            per_token["actor/kl_loss"] = kl_N
        maxima = _extremes(inputs)
        if self.teacher is not None:
            assert inputs.divergence_N is not None, "the divergence is the engine's to compute (train_step's distill)"
            name = f"distill/{self.teacher.divergence.value}"
            divergence_N = inputs.divergence_N
            loss_N = loss_N + self.teacher.coef * divergence_N
            per_token[name] = divergence_N
            maxima[f"{name}_max"] = divergence_N.detach().masked_fill(~inputs.mask_N, -torch.inf).amax()
        if inputs.old_logprobs_N is not None:
            per_token |= _change(inputs)
        metrics = losses.metrics | {name: masked_sum(x_N.detach(), inputs.mask_N) for name, x_N in per_token.items()}
        if self.teacher is not None and self.taught_by:
            metrics |= self._by_teacher(f"distill/{self.teacher.divergence.value}", inputs)
        total = sum_token_losses(loss_N, inputs, config.loss_agg_mode)
        return LossSums(total=total, metrics=metrics, maxima=maxima)

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """See ``RoleLoss``.  ``actor/ratio_first`` is of the first minibatch, where ``p / old`` must be 1."""
        of_tokens = {key: sums.mean(name) for name, key in REPORTED.items()}
        own = {name for name in sums.totals() if not name.startswith(_OUR_PREFIXES)} - _OURS
        of_tokens |= {name: sums.mean(name) for name in sorted(own)}
        of_tokens["actor/ratio_first"] = sums.mean("actor/ratio", first=True)
        metrics = {key: value for key, value in of_tokens.items() if value is not None}
        rise = sums.largest("actor/log_ratio_rise")
        fall = sums.largest("actor/log_ratio_fall")
        if rise is not None and fall is not None:
            metrics |= {"actor/ratio_max": exp(rise), "actor/ratio_min": exp(-fall)}
        if self.teacher is not None:
            name = f"distill/{self.teacher.divergence.value}"
            both = {name: sums.mean(name), f"{name}_max": sums.largest(f"{name}_max")}
            metrics |= {key: value for key, value in both.items() if value is not None}
            totals = sums.totals()
            metrics |= {
                f"{name}/{who}": totals[f"{name}/{who}"] / count
                for who in self.taught_by
                if (count := totals.get(f"{TAUGHT}/{who}"))
            }
        if self.with_pairs:
            totals = {name.removeprefix(PREFIX): x for name, x in sums.totals().items() if name.startswith(PREFIX)}
            metrics |= {f"{PREFIX}{name}": value for name, value in means(totals).items()} if totals else {}
        return metrics | ({"kl/coef": self.config.kl_loss_coef} if self.config.use_kl_loss else {})

    @torch.no_grad()
    def _by_teacher(self, name: str, inputs: LossInputs) -> dict[str, Tensor]:
        """Sums of the divergence over the tokens that each teacher teaches, and how many these are."""
        assert inputs.divergence_N is not None
        name_S = inputs.mask_N.new_zeros(max(inputs.num_sequences, 1), dtype=torch.int64)  # one without sequences, too
        name_S[: inputs.num_sequences] = inputs.extra_S[TAUGHT_BY].long()
        sums = inputs.divergence_N.new_zeros(2, len(self.taught_by))
        values = torch.stack([inputs.divergence_N, torch.ones_like(inputs.divergence_N)]) * inputs.mask_N
        sums.index_add_(1, inputs.expand(name_S), values)
        keys = [f"{key}/{who}" for key in (name, TAUGHT) for who in self.taught_by]
        return dict(zip(keys, sums.view(-1), strict=True))

    def _kl(self, inputs: LossInputs) -> Tensor:
        """The KL to the reference in each row, [N], nats."""
        if self.with_full_kl:
            assert inputs.full_kl_N is not None, "this KL is the engine's to compute (train_step's kl_to)"
            return inputs.full_kl_N
        assert inputs.logprobs_N is not None and inputs.ref_logprobs_N is not None, "a KL loss needs the reference's"
        return PENALTIES[self.config.kl_loss_type](inputs.logprobs_N, inputs.ref_logprobs_N)


def policy_loss(config: ActorConfig) -> ActorLoss:
    """The actor's loss, which can be pickled."""
    return ActorLoss(config)


@torch.no_grad()
def _change(inputs: LossInputs) -> dict[str, Tensor]:
    """How far the policy moved since it scored the samples, per token: ratio, and KL estimates in nats; each [N]."""
    change_N = log_ratios(inputs)
    zero_N = torch.zeros_like(change_N)
    return {
        "actor/ratio": change_N.exp(),
        "actor/approx_kl": kl_k3(zero_N, change_N),
        "actor/approx_kl_k1": kl_k1(zero_N, change_N),
    }


@torch.no_grad()
def _extremes(inputs: LossInputs) -> dict[str, Tensor]:
    """The maxima of the module's list; none without old log-probs."""
    if inputs.old_logprobs_N is None:
        return {}
    change_N = log_ratios(inputs)
    changes = {"actor/log_ratio_rise": change_N, "actor/log_ratio_fall": -change_N}
    return {name: x_N.masked_fill(~inputs.mask_N, -torch.inf).amax() for name, x_N in changes.items()}
