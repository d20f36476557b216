"""What SPPO aims at: the log-ratio that a response is to have after the step (arXiv:2405.00675)."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithms.sppo import SppoConfig


def win_rate(groups: PromptGroups, config: SppoConfig) -> Tensor:
    """``A = eta (P - 1/2)``, P the share of the other members that score less; an equal score counts half.

    Scores that differ by rounding alone are equal (``PromptGroups.ranked_S``).

    The paper's ``P(y > pi_t | x)`` (eq. 4.4) averages a preference model's probabilities over the samples of a prompt,
    the response itself included; here scores decide, and a response does not compete with itself.
    """
    margins_S = torch.zeros_like(groups.scores_S)
    ranked_S = groups.ranked_S
    for members in groups.members_of(groups.has_siblings_S):
        scores_N = ranked_S[members]
        margins_S[members] = (scores_N[:, None] - scores_N[None, :]).sign().mean(1) / 2
    return config.sppo_eta * margins_S * groups.sizes_S / (groups.sizes_S - 1).clamp(min=1)


def softmean(groups: PromptGroups, config: SppoConfig) -> Tensor:
    """``A = eta R - log mean exp(eta R)``, the mean over all responses of the step (verl's recipe/sppo).

    It needs no group.  The policy that has these log-ratios is ``pi_t exp(eta R) / Z``, if all prompts had one Z.
    """
    scaled_S = config.sppo_eta * groups.raw_S
    if not groups.member_S.any():
        return torch.zeros_like(scaled_S)
    level = torch.logsumexp(scaled_S[groups.member_S], 0) - log(int(groups.member_S.sum()))
    return torch.where(groups.member_S, scaled_S - level, 0)
