"""Tokens that a loss treats apart, chosen over the whole step: the covariances of ``clip_cov`` and ``kl_cov``.

The covariance of a token is ``(A - mean A) (log p - mean log p)`` (arXiv:2505.22617, section 4), of the policy before
the step; means are over the trained tokens of the step.  verl takes both from the microbatch that it trains, with the
policy of that moment; the two agree in the first update of a step whose batch is one microbatch.  Here the choice is
made once, before the first update, so that it depends on no microbatch, packing, rank or minibatch: each rank makes
keys of its own tokens (``select``), the controller finds the least key that is selected (``threshold``), and
``step_numbers.finish`` takes it from each token's key.  Tokens with equal keys go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.algorithms.ragged import Trained
from mcore_rl.config.algorithm_registry import policy_loss
from mcore_rl.config.roles import ActorConfig
from mcore_rl.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of the whole step, over its trained tokens.

    advantage, logprob: means.  num_selected: tokens that are to be selected.  seed: of the uniform draws.
    """

    advantage: float
    logprob: float
    num_selected: int
    seed: int


def num_selected(config: ActorConfig, num_tokens: int) -> int:
    """The loss's share of the trained tokens, rounded down; at least one, as in verl; 0 of a loss that selects none."""
    selection = policy_loss(config.loss_mode).selection
    return 0 if selection is None else max(1, int(getattr(config, selection.share) * num_tokens))


def select(
    batch: TrainBatch, index_S: Sequence[int], config: ActorConfig, moments: Moments
) -> tuple[Tensor, NDArray[np.float32]]:
    """Keys of a rank's tokens, float32 [T], -inf where they cannot be selected; and its ``num_selected`` largest.

    batch: finished, with the advantages that are trained.
    index_S: the place of each sequence in the step, by which its draws are made.
    config: names the loss.
    moments: of the step.
    """
    selection = policy_loss(config.loss_mode).selection
    assert selection is not None, f"{config.loss_mode} selects no tokens"
    assert batch.old_logprobs_T is not None and batch.advantages_T is not None
    trained = Trained(batch.mask_T)
    advantages_M, logprobs_M = (trained.gather(x_T).double() for x_T in (batch.advantages_T, batch.old_logprobs_T))
    covariance_M = (advantages_M - moments.advantage) * (logprobs_M - moments.logprob)
    uniform_M = trained.gather(_uniform(batch.lengths_S, index_S, moments.seed))
    keys_M = selection.load()(covariance_M, uniform_M, config).float()
    keys_T = torch.full((len(batch.mask_T),), -torch.inf)
    keys_T[batch.mask_T] = keys_M
    found_M = keys_M[keys_M > -torch.inf]
    return keys_T, found_M.topk(min(moments.num_selected, len(found_M))).values.numpy()


def threshold(largest: Sequence[NDArray[np.float32]], num_selected: int) -> float:
    """The least key that is selected, of the largest keys of each rank; inf where there is no candidate."""
    keys = np.sort(np.concatenate(largest))[::-1]
    return float(keys[min(num_selected, len(keys)) - 1]) if len(keys) else math.inf


def _uniform(lengths_S: Sequence[int], index_S: Sequence[int], seed: int) -> Tensor:
    """A draw from [0, 1) for each token, which depends on the sequence and the token's place in it alone; [T]."""
    drawn = [np.random.default_rng((seed, index)).random(n) for n, index in zip(lengths_S, index_S, strict=True)]
    return torch.from_numpy(np.concatenate(drawn))
