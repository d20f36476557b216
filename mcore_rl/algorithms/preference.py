"""Losses of preferences in an engine (DPO, arXiv:2305.18290, and its relatives), of a data set or of a run's own pairs.

Every number of a pair is computed from sums over its two whole sequences, which all context ranks have; each rank adds
its share of it (``LossInputs.own_shares``), so that the ranks' sum has it once.

Metrics, sums over the responses of the global minibatch, whose numbers are ``chosen_count`` and ``rejected_count``:
``chosen_reward`` and ``rejected_reward`` (nats times beta), ``chosen_logprob`` and ``rejected_logprob`` (nats of a
whole response), and ``accuracy``: pairs whose preferred response has the higher reward, equal rewards counted half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import TokenLosses, trained_rows
from mcore_rl.algorithms.preference_losses import Responses, kto, pair_losses, rewards
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.pairs import PairsConfig
from mcore_rl.config.prefer import PreferredConfig
from mcore_rl.config.preference import PreferenceConfig
from mcore_rl.ground.types import LossInputs, LossSums

MARGIN = "margin_S"
WEIGHT = "weight_S"
LABEL = "label_S"
PREFIX = "pairs/"  # of the metrics of pairs that a run draws itself


@dataclass(frozen=True)
class PreferencesLoss(RoleLoss):
    """The sum of the losses of pairs, or with ``kto`` of responses; the engine divides by their number.

    Reads log-probs, the reference's if the loss needs them, ``pairs_P2``, and of ``extra_S``, where they are there,
    ``margin_S`` (the first sequence's of a pair), ``weight_S`` (what the loss of a pair or a response is multiplied by;
    the first sequence's of a pair) and ``label_S`` (kto: 1 is desirable, 0 is not).

    kl: the estimate of the KL to the reference that ``kto`` reads, nats.  Can be pickled.
    """

    config: PreferenceConfig
    kl: float = 0.0

    @property
    def with_pairs(self) -> bool:
        """Whether it looks at both sequences of a pair."""
        return self.config.row.pairs

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's shares; without a pair, a zero that is connected to the graph."""
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None, "a language model's forward pass makes log-probs"
        share_S = inputs.own_shares(inputs.logprobs_N.dtype)
        total, metrics = (self._of_pairs if self.with_pairs else self._of_responses)(inputs, share_S)
        return LossSums(total=total, metrics=metrics)  # a sum over no pair is connected through their sums

    def _of_pairs(self, inputs: LossInputs, share_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
        loss_P, metrics = losses_of_pairs(inputs, self.config, share_S)
        return (loss_P * share_S[inputs.pairs_P2[:, 0]]).sum(), metrics

    def _of_responses(self, inputs: LossInputs, share_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        label_S = inputs.extra_S[LABEL].to(share_S.dtype)
        weight_S = inputs.extra_S.get(WEIGHT)
        there_S = torch.arange(len(label_S), device=label_S.device)  # an empty microbatch has sums, of nothing
        responses = responses_of(inputs).chosen(there_S)
        share_S = share_S[there_S]
        loss_S = kto(responses, label_S, self.kl, self.config)
        weighed_S = loss_S if weight_S is None else loss_S * weight_S.to(share_S.dtype)
        metrics = _metrics("chosen", responses, share_S * label_S, self.config)
        return (weighed_S * share_S).sum(), metrics | _metrics(
            "rejected", responses, share_S * (1 - label_S), self.config
        )


def preferences_loss(config: PreferredConfig) -> PreferencesLoss:
    """The loss of a policy that learns from preferences."""
    return PreferencesLoss(config.preference)


def preference(inputs: LossInputs, config: PairsConfig) -> TokenLosses:
    """The policy loss of pairs that a run draws itself: the one that ``config.preference`` names, of each pair.

    Both responses of a pair have a trained token, and each has the whole loss of its pair, spread evenly over its
    trained tokens.  With ``loss_agg_mode=seq_mean_token_sum``, whose divisor counts responses, the sum is the mean over
    pairs.
    """
    assert inputs.logprobs_N is not None and inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
    counts_S = inputs.sequence_sums(inputs.mask_N.to(inputs.logprobs_N.dtype))
    share_S = inputs.own_shares(inputs.logprobs_N.dtype)
    loss_P, metrics = losses_of_pairs(inputs, config.preference, share_S)
    loss_S = torch.zeros_like(counts_S).index_add(0, inputs.pairs_P2.flatten(), loss_P.repeat_interleave(2))
    loss_N = inputs.expand(loss_S / counts_S.clamp(min=1))
    return TokenLosses(loss_N=loss_N, metrics={f"{PREFIX}{name}": value for name, value in metrics.items()})


def losses_of_pairs(inputs: LossInputs, config: PreferenceConfig, share_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of each pair, weighed, [P] with gradient; the metrics of the module).

    share_S: this rank's share of each sequence, by which its metrics are multiplied.
    """
    assert inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
    responses, (first_P, second_P) = responses_of(inputs), inputs.pairs_P2.unbind(1)
    chosen = responses.chosen(first_P)
    rejected = responses.chosen(second_P)
    share_P = share_S[first_P]
    margin_S = inputs.extra_S.get(MARGIN)
    weight_S = inputs.extra_S.get(WEIGHT)
    margin_P = torch.zeros_like(share_P) if margin_S is None else margin_S[first_P].to(share_P.dtype)
    loss_P = pair_losses(chosen, rejected, margin_P, config)
    weighed_P = loss_P if weight_S is None else loss_P * weight_S[first_P].to(share_P.dtype)
    metrics = _metrics("chosen", chosen, share_P, config) | _metrics("rejected", rejected, share_S[second_P], config)
    with torch.no_grad():
        right_P = wins(rewards(chosen, config), rewards(rejected, config))
        metrics["accuracy"] = (right_P * share_P).sum()
    return weighed_P, metrics


@torch.no_grad()
def _metrics(side: str, responses: Responses, share_R: Tensor, config: PreferenceConfig) -> dict[str, Tensor]:
    """share_R: of each of ``responses``, 0 of those that are of another side."""
    return {
        f"{side}_reward": (rewards(responses, config) * share_R).sum(),
        f"{side}_logprob": (responses.logprobs_R * share_R).sum(),
        f"{side}_count": share_R.sum(),
    }


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the loss's sums over the responses, as the module has them, the means that are metrics."""
    metrics = dict[str, float]()
    for side in ("chosen", "rejected"):
        if count := sums[f"{side}_count"]:
            metrics |= {f"{side}_{name}": sums[f"{side}_{name}"] / count for name in ("reward", "logprob")}
    if "accuracy" in sums and sums["chosen_count"]:
        metrics["accuracy"] = sums["accuracy"] / sums["chosen_count"]
    if {"chosen_reward", "rejected_reward"} <= metrics.keys():
        metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
    return metrics


def wins(first_P: Tensor, second_P: Tensor) -> Tensor:
    """1 where the first is larger, 0 where the second is, 0.5 where they are equal."""
    return (1 + (first_P - second_P).sign()) / 2


def responses_of(inputs: LossInputs) -> Responses:
    """The sums over the trained tokens of each whole sequence, [num_sequences], at least one."""
    assert inputs.logprobs_N is not None
    ref_N = inputs.ref_logprobs_N
    return Responses(
        inputs.sequence_sums(inputs.logprobs_N),
        None if ref_N is None else inputs.sequence_sums(ref_N),
        inputs.sequence_sums(inputs.mask_N.to(inputs.logprobs_N.dtype)),
    )
