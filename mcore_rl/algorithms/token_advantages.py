"""What a rank computes from its own scored sequences: KL, rewards of tokens, raw advantages, correction.

No sequence depends on another here.  Results per token stay on the rank (``TokenAdvantages``); results per sequence go
to the controller (``SequenceStats``), which computes everything that spans sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from mcore_rl.algorithms.advantages.estimation import token_advantages
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs
from mcore_rl.algorithms.advantages.ragged import Spreads, Trained, at_tokens, sequence_counts, sequence_sums
from mcore_rl.algorithms.correction import Correction, CorrectionSums, correct, drawn_tokens
from mcore_rl.algorithms.kl import PENALTIES, kl_k1
from mcore_rl.algorithms.shaping import mask_truncated
from mcore_rl.config.algorithm import AlgorithmConfig, OffPolicy
from mcore_rl.config.stages import TOKEN_REWARDS
from mcore_rl.ground.types import SentAsArrays, TrainBatch

TEACHER_LOGPROBS = "teacher_logprobs_T"  # the field that the role ``teacher`` makes


@dataclass(frozen=True, kw_only=True)
class Outcomes(SentAsArrays):
    """Score and truncation of each response.

    scores_S: float32, finite.
    truncated_S: bool, whether it was cut off at its length limit.
    greedy_S: float32, the score of the greedy response to the same prompt; None if the algorithm does not need it.
    parts_SK: float32, the K parts of the score that ``gdpo_reward_keys`` names; None if it names none.
    compared_S: bool, whether the response has siblings that its rewards were compared with, without which none is
    trained; None: nothing is compared before the estimation.
    """

    scores_S: Tensor
    truncated_S: Tensor
    greedy_S: Tensor | None = None
    parts_SK: Tensor | None = None
    compared_S: Tensor | None = None

    def of(self, members: Sequence[int]) -> Outcomes:
        """The outcomes of the responses at the places ``members``, in this order."""
        chosen = list(members)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return Outcomes(**{name: value[chosen] for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Results for each of a rank's tokens, [T].

    mask_T: bool, trained tokens.
    advantages_T: those of an estimator of ``Scope.token``, not yet whitened; None if the estimator has another scope.
    teacher_advantages_T: what a teacher adds to the final advantages (``config/algorithms/distill.py``); None without
    a teacher.
    returns_T: the critic's targets; None without a critic.
    weights_T: the factor of the policy loss, not yet divided by the mean weight; None is 1 everywhere.
    old_logprobs_T: with ``off_policy=bypass``, the sampler's; None: keep those of the batch.
    """

    mask_T: Tensor
    advantages_T: Tensor | None
    teacher_advantages_T: Tensor | None
    returns_T: Tensor | None
    weights_T: Tensor | None
    old_logprobs_T: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SequenceStats(SentAsArrays):
    """Results for each of a rank's sequences, [S].

    responses_S: tokens of the response that the model wrote, int64.
    members_S: the same if the response's score enters its group's baseline, else 0; int64.
    counts_S: the same if the response's advantages are trained, else 0; int64.
    trained_S: how many of these tokens are still trained after correction, int64.
    scores_S: the sum of all rewards.
    kl_S: the sum of the KL in the reward over ``responses_S`` tokens, float64, nats; None if there is no such KL.
    logprobs_S: the sum of the old log-probs over ``counts_S`` tokens, float64, nats; None without old log-probs.
    advantages: statistics of the raw advantages of an estimator of ``Scope.token``; None for another scope.
    reverse_kl: statistics of ``log p_old - log p_teacher``, nats; None without a teacher.
    returns_S, values_S: sums over ``counts_S`` tokens, float64; None without a critic.
    correction: for ``correction_metrics``; None without the trainer's log-probs.
    """

    responses_S: Tensor
    members_S: Tensor
    counts_S: Tensor
    trained_S: Tensor
    scores_S: Tensor
    kl_S: Tensor | None
    logprobs_S: Tensor | None
    advantages: Spreads | None
    reverse_kl: Spreads | None
    returns_S: Tensor | None
    values_S: Tensor | None
    correction: CorrectionSums | None


def compute_advantages(
    batch: TrainBatch, outcomes: Outcomes, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[TokenAdvantages, SequenceStats]:
    """(results per token, results per sequence) of the sequences of ``batch``, which are a rank's.

    batch: has rollout log-probs, and if the run has them turn rewards, rewards of tokens, values, and log-probs of
    reference and teacher.  It has old log-probs if the step has a pass for them (``config/step_plan.py``).
    outcomes: of the same sequences.
    kl_coef: the coefficient of the KL in the reward in this step.
    """
    assert batch.rollout_logprobs_T is not None
    bypassed_T = batch.rollout_logprobs_T if algorithm.off_policy is OffPolicy.bypass else None
    old_T = batch.old_logprobs_T if bypassed_T is None else bypassed_T
    kl_T = None
    process_T = batch.turn_rewards_T
    if algorithm.use_kl_in_reward:
        assert old_T is not None and batch.ref_logprobs_T is not None, "the KL in the reward needs both"
        kl_T = PENALTIES[algorithm.kl_penalty](old_T, batch.ref_logprobs_T).masked_fill_(~batch.mask_T, 0)
        of_kl_T = kl_T * -kl_coef  # a reward of the token where it arises (arXiv:1909.08593, eq. 2)
        process_T = of_kl_T if process_T is None else process_T + of_kl_T
    if (rewards_T := batch.extra_T.get(TOKEN_REWARDS)) is not None:
        process_T = rewards_T if process_T is None else process_T + rewards_T
    counted_T = _counted(batch, outcomes, algorithm)
    inputs = AdvantageInputs(
        lengths_S=batch.lengths_S,
        mask_T=batch.mask_T if algorithm.masked_in_baseline else counted_T,
        outcome_S=outcomes.scores_S,
        process_T=process_T,
        values_T=batch.old_values_T,
        greedy_S=outcomes.greedy_S,
    )
    raw = token_advantages(inputs, algorithm)
    trained = inputs.trained
    counts_S = inputs.counts_S
    if counted_T is not inputs.mask_T:
        trained = Trained(counted_T)
        counts_S = sequence_counts(counted_T, batch.lengths_S)
    correction = _corrected(batch, trained, algorithm)
    mask_T = trained.mask_T if correction is None else correction.mask_T
    raw_T, returns_T = (None, None) if raw is None else (raw.advantages_T, raw.returns_T)
    distance_T = _to_teacher(batch, old_T) if algorithm.distill.in_advantages else None

    def sums(x_T: Tensor) -> Tensor:
        return sequence_sums(trained.gather(x_T).double(), counts_S)

    stats = SequenceStats(
        responses_S=sequence_counts(batch.mask_T, batch.lengths_S),
        members_S=inputs.counts_S,
        counts_S=counts_S,
        trained_S=sequence_counts(mask_T, batch.lengths_S),
        scores_S=inputs.scores_S,
        kl_S=None if kl_T is None else sequence_sums(kl_T.double(), batch.lengths_S),
        logprobs_S=None if old_T is None else sums(old_T),
        advantages=None if raw_T is None else Spreads.of(trained.gather(raw_T), counts_S),
        reverse_kl=None if distance_T is None else Spreads.of(trained.gather(distance_T), counts_S),
        returns_S=None if returns_T is None else sums(returns_T),
        values_S=None if batch.old_values_T is None else sums(batch.old_values_T),
        correction=None if correction is None else correction.sums,
    )
    of_tokens = TokenAdvantages(
        mask_T=mask_T,
        advantages_T=raw_T,
        teacher_advantages_T=None if distance_T is None else distance_T * -algorithm.distill.coef,
        returns_T=returns_T,
        weights_T=None if correction is None else correction.weights_T,
        old_logprobs_T=bypassed_T,
    )
    return of_tokens, stats


def estimate_tokens(
    batch: TrainBatch, outcomes: Outcomes, algorithm: AlgorithmConfig, kl_coef: float
) -> dict[str, Any]:
    """``compute_advantages`` as ranks run it: fields of tokens, their names, and ``stats`` for the controller."""
    of_tokens, stats = compute_advantages(batch, outcomes, algorithm, kl_coef)
    made = {name: x_T for name, x_T in vars(of_tokens).items() if x_T is not None}
    return {**made, "fields": tuple(made), "stats": stats}


def _counted(batch: TrainBatch, outcomes: Outcomes, algorithm: AlgorithmConfig) -> Tensor:
    """The tokens whose advantages are trained, bool [T]; ``batch.mask_T`` itself if all are."""
    counted_T = batch.mask_T
    if algorithm.mask_truncated:
        counted_T = mask_truncated(counted_T, batch.lengths_S, outcomes.truncated_S)
    if outcomes.compared_S is not None and not bool(outcomes.compared_S.all()):
        counted_T = counted_T & at_tokens(outcomes.compared_S, batch.lengths_S)
    return counted_T


def _to_teacher(batch: TrainBatch, old_T: Tensor | None) -> Tensor:
    """``log p_old - log p_teacher`` of each token, nats."""
    assert old_T is not None, "the teacher is compared with the policy before the step"
    return kl_k1(old_T, batch.extra_T[TEACHER_LOGPROBS])


def _corrected(batch: TrainBatch, trained: Trained, algorithm: AlgorithmConfig) -> Correction | None:
    """None without the trainer's log-probs."""
    old_T = batch.old_logprobs_T
    drawn_T = batch.rollout_logprobs_T
    config = algorithm.rollout_correction
    if old_T is None or drawn_T is None:
        return None
    drawn = drawn_tokens(trained, drawn_T)
    correction = correct(old_T, drawn_T, drawn, batch.lengths_S, config, weighs=algorithm.weighs)
    if drawn is trained:
        return correction
    return replace(correction, mask_T=correction.mask_T | (trained.mask_T & ~drawn.mask_T))
