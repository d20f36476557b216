"""Losses of whole responses of which some are preferred: log-probs in, one loss per pair or response out.

Nothing here knows a microbatch or a rank: ``preference.py`` sums log-probs over tokens and adds the losses up, and
validation calls the same functions on the controller.  Sums are over the trained tokens of a response, in nats.  A
response without a trained token has sums and means of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.config.preference import PreferenceConfig, PreferenceLoss

# A mean log-prob nearer to 0 counts as this one, whose odds are a million; at 0 they are infinite.
SUREST = -1e-6


@dataclass(frozen=True)
class Responses:
    """R responses.  logprobs_R, ref_logprobs_R: sums, of the policy and of the reference.  counts_R: trained tokens.

    ref_logprobs_R: None where the loss needs no reference.
    """

    logprobs_R: Tensor
    ref_logprobs_R: Tensor | None
    counts_R: Tensor

    def chosen(self, index_P: Tensor) -> Responses:
        """The responses ``index_P``."""
        ref_R = self.ref_logprobs_R
        return Responses(self.logprobs_R[index_P], None if ref_R is None else ref_R[index_P], self.counts_R[index_P])

    @property
    def mean_logprobs_R(self) -> Tensor:
        """Log-probs per trained token."""
        return self.logprobs_R / self.counts_R.clamp(min=1)

    def log_ratios(self, config: PreferenceConfig) -> Tensor:
        """``log p - log p_ref`` of each response, [R]; its mean over tokens with ``length_normalized``."""
        assert self.ref_logprobs_R is not None, "a log-ratio needs the reference's log-probs"
        changes_R = self.logprobs_R - self.ref_logprobs_R
        return changes_R / self.counts_R.clamp(min=1) if config.length_normalized else changes_R


def rewards(responses: Responses, config: PreferenceConfig) -> Tensor:
    """The reward of each response, [R], that the loss fits: ``beta`` times log-ratios, or times mean log-probs."""
    if config.row.reference:
        return config.strength * responses.log_ratios(config)
    return config.strength * responses.mean_logprobs_R


def _smoothed(margins_P: Tensor, config: PreferenceConfig) -> Tensor:
    """``-(1 - s) log sigma(h) - s log sigma(-h)``."""
    smoothing = config.label_smoothing
    return -(1 - smoothing) * logsigmoid(margins_P) - smoothing * logsigmoid(-margins_P)


def _dpo(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    return _smoothed(rewards(chosen, config) - rewards(rejected, config) - margin_P, config)


def _ipo(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    difference_P = chosen.log_ratios(config) - rejected.log_ratios(config)
    return (difference_P - 1 / (2 * config.strength)).square()


def _hinge(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    return torch.relu(1 - (rewards(chosen, config) - rewards(rejected, config) - margin_P))


def _simpo(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    return _smoothed(rewards(chosen, config) - rewards(rejected, config) - config.gamma - margin_P, config)


def _orpo(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    return -config.strength * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(responses: Responses) -> Tensor:
    """``log(p / (1 - p))`` of ``p``, the geometric mean of the tokens' probabilities."""
    mean_R = responses.mean_logprobs_R.clamp(max=SUREST)
    return mean_R - torch.log(-torch.expm1(mean_R))


PairFunction = Callable[[Responses, Responses, Tensor, PreferenceConfig], Tensor]
OF_PAIRS: dict[PreferenceLoss, PairFunction] = {
    PreferenceLoss.dpo: _dpo,
    PreferenceLoss.ipo: _ipo,
    PreferenceLoss.hinge: _hinge,
    PreferenceLoss.simpo: _simpo,
    PreferenceLoss.orpo: _orpo,
}


def pair_losses(chosen: Responses, rejected: Responses, margin_P: Tensor, config: PreferenceConfig) -> Tensor:
    """The loss of each pair, [P], with gradient.  margin_P: what the data says the difference of rewards must exceed.

    ``config.loss`` is a loss of pairs; its formula and paper are in ``config/preference.py``.
    """
    loss_P = OF_PAIRS[config.loss](chosen, rejected, margin_P, config)
    return loss_P - config.sft_weight * chosen.mean_logprobs_R if config.sft_weight else loss_P


def kto(responses: Responses, label_R: Tensor, kl: float, config: PreferenceConfig) -> Tensor:
    """KTO's loss of each response, [R], with gradient (arXiv:2402.01306, eq. 8).

    label_R: 1 where desirable, 0 where not.  kl: the estimate of ``KL(policy || reference)``, nats, not below 0, the
    same for all of an optimizer step.
    """
    sign_R = 2 * label_R - 1
    weight_R = config.desirable_weight * label_R + config.undesirable_weight * (1 - label_R)
    above_R = sign_R * (rewards(responses, config) - config.strength * kl)
    return weight_R * torch.sigmoid(-above_R)
