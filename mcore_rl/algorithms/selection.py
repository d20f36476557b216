"""Selects, over the whole step, the tokens that ``clip_cov`` and ``kl_cov`` treat apart, by their covariance.

The covariance of a token is ``(A - mean A) (log p - mean log p)`` (arXiv:2505.22617, section 4), of the policy before
the step; means are over the trained tokens of the step.  verl takes both from the microbatch at hand, with the current
policy; the two agree in the first update of a step whose batch is one microbatch.  Here tokens are selected once,
before the first update, so that the selection depends on no microbatch, packing, rank or minibatch.  Each rank computes
keys of its own tokens (``select``), the controller finds the smallest selected key (``threshold``), and
``step_numbers.finish`` subtracts it from each token's key; keys of 0 or more are selected.  Tokens with equal keys are
selected together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import Trained
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.config.algorithm_registry import policy_loss
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What selection needs to know of the whole step, over its trained tokens.

    advantage, logprob: their means.  num_selected: how many tokens to select.  seed: of the uniform draws.
    """

    advantage: float
    logprob: float
    num_selected: int
    seed: int


@dataclass(frozen=True)
class SequencesInStep:
    """What a rank must know of its sequences to select tokens.

    advantages_S: float32, one per sequence; None if the batch has one per token.  index_S: their places in the step.
    """

    advantages_S: NDArray[np.float32] | None
    index_S: Sequence[int]


def num_selected(config: ActorConfig, num_tokens: int) -> int:
    """How many of ``num_tokens`` trained tokens the loss selects: its share, rounded down; 0 if it selects none.

    A loss that selects takes at least one token, as in verl.
    """
    selection = policy_loss(config.loss_mode).selection
    return 0 if selection is None else max(1, int(getattr(config, selection.share) * num_tokens))


def select(
    batch: TrainBatch, index_S: Sequence[int], config: ActorConfig, moments: Moments
) -> tuple[Tensor, NDArray[np.float32]]:
    """(keys of a rank's tokens, float32 [T], -inf if they cannot be selected; the ``num_selected`` largest of them).

    batch: the rank's sequences, with final advantages.
    index_S: the place of each sequence in the step, which seeds its draws.
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
    candidates_M = keys_M[keys_M > -torch.inf]
    return keys_T, candidates_M.topk(min(moments.num_selected, len(candidates_M))).values.numpy()


def select_tokens(
    batch: TrainBatch, given: SequencesInStep, config: ActorConfig, numbers: StepNumbers, moments: Moments
) -> dict[str, Any]:
    """``select`` as ranks run it: all keys, as a field, and the largest.  numbers: of the step."""
    keys_T, largest = select(finish(batch, given.advantages_S, numbers), given.index_S, config, moments)
    return {"selection_T": keys_T, "largest": largest}


def threshold(largest: Sequence[NDArray[np.float32]], num_selected: int) -> float:
    """The smallest selected key; inf if there is no candidate.  largest: the largest keys of each rank."""
    keys = np.sort(np.concatenate(largest))[::-1]
    return float(keys[min(num_selected, len(keys)) - 1]) if len(keys) else math.inf


def _uniform(lengths_S: Sequence[int], index_S: Sequence[int], seed: int) -> Tensor:
    """A draw from [0, 1) for each token, [T]; it depends only on the seed, the sequence and the token's place in it."""
    drawn = [np.random.default_rng((seed, index)).random(n) for n, index in zip(lengths_S, index_S, strict=True)]
    return torch.from_numpy(np.concatenate(drawn))
