"""The policy's loss of preferences in an engine: sums over tokens, and each rank's share of the losses of pairs.

Every number of a pair is computed from sums over its two whole sequences, which all context ranks have; each rank adds
its share of it (``LossInputs.own_shares``), so that the ranks' sum has it once.

Metrics, sums over the responses of the global minibatch, whose numbers are ``chosen_count`` and ``rejected_count``:
``chosen_reward`` and ``rejected_reward`` (nats times beta), ``chosen_logprob`` and ``rejected_logprob`` (nats of a
whole response), and ``accuracy``: pairs whose preferred response has the higher reward, equal rewards counted half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import masked_sum, trained_rows
from mcore_rl.algorithms.preference_losses import Responses, kto, pair_losses, rewards
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.preference import PreferenceConfig
from mcore_rl.types import LossInputs, LossSums

MARGIN, WEIGHT, LABEL = "margin_S", "weight_S", "label_S"


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

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's shares; without a pair, a zero that is connected to the graph."""
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None, "a language model's forward pass makes log-probs"
        responses, dtype = responses_of(inputs), inputs.logprobs_N.dtype
        share_S, weight_S = inputs.own_shares(dtype), inputs.extra_S.get(WEIGHT)
        connected = masked_sum(inputs.logprobs_N, torch.zeros_like(inputs.mask_N))
        if self.config.row.pairs:
            assert inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
            first_P, second_P = inputs.pairs_P2.unbind(1)
            margin_P = inputs.extra_S[MARGIN][first_P].to(dtype) if MARGIN in inputs.extra_S else share_S.new_zeros(())
            loss = pair_losses(responses.chosen(first_P), responses.chosen(second_P), margin_P, self.config)
        else:
            label_S = inputs.extra_S[LABEL].to(dtype)
            first_P, second_P = (label_S > 0.5).nonzero().squeeze(1), (label_S <= 0.5).nonzero().squeeze(1)
            everyone_S = torch.arange(len(label_S), device=label_S.device)  # without those of an empty microbatch
            loss = kto(responses.chosen(everyone_S), label_S, self.kl, self.config)
        place = first_P if self.config.row.pairs else everyone_S
        if weight_S is not None:
            loss = loss * weight_S[place].to(dtype)
        total = (loss * share_S[place]).sum() + connected
        return LossSums(total=total, metrics=self._metrics(responses, first_P, second_P, share_S))

    @torch.no_grad()
    def _metrics(self, responses: Responses, first_P: Tensor, second_P: Tensor, share_S: Tensor) -> dict[str, Tensor]:
        reward_S, logprob_S, metrics = rewards(responses, self.config), responses.logprobs_R, dict[str, Tensor]()
        for name, place_P in (("chosen", first_P), ("rejected", second_P)):
            share_P = share_S[place_P]
            metrics[f"{name}_reward"] = (reward_S[place_P] * share_P).sum()
            metrics[f"{name}_logprob"] = (logprob_S[place_P] * share_P).sum()
            metrics[f"{name}_count"] = share_P.sum()
        if self.config.row.pairs:
            right_P = wins(reward_S[first_P], reward_S[second_P])
            metrics["accuracy"] = (right_P * share_S[first_P]).sum()
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
