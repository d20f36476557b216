"""What a rank makes of its own scored sequences: KL, rewards of tokens, raw advantages, correction.

No sequence depends on another here.  What is known of each token stays where the tokens are (``TokenAdvantages``); what
is known of each sequence goes to the controller (``SequenceStats``), which estimates what spans all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.estimation import token_advantages
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs
from mcore_rl.algorithms.correction import CorrectionSums, correct
from mcore_rl.algorithms.kl import penalty
from mcore_rl.algorithms.ragged import Spreads, Trained, sequence_counts, sequence_sums
from mcore_rl.algorithms.shaping import mask_truncated
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.types import SentAsArrays, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Outcomes(SentAsArrays):
    """What is known of each response.

    scores_S: float32, finite.
    truncated_S: bool, cut off at its limit.
    greedy_S: float32, the score of the greedy response to the same prompt; None where nobody asks for it.
    parts_SK: float32, the K parts of the score that ``gdpo_reward_keys`` names; None where it names none.
    """

    scores_S: Tensor
    truncated_S: Tensor
    greedy_S: Tensor | None = None
    parts_SK: Tensor | None = None

    def of(self, members: Sequence[int]) -> Outcomes:
        """Of some responses."""
        chosen = list(members)
        greedy_S = None if self.greedy_S is None else self.greedy_S[chosen]
        parts_SK = None if self.parts_SK is None else self.parts_SK[chosen]
        return Outcomes(
            scores_S=self.scores_S[chosen], truncated_S=self.truncated_S[chosen], greedy_S=greedy_S, parts_SK=parts_SK
        )


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Of each token; [T].

    mask_T: bool, what is trained.
    advantages_T: of an estimator of ``Scope.token``, not yet whitened; None of another.
    returns_T: what the critic should have said; None without one.
    weights_T: what the policy loss is multiplied by, not yet divided by their mean; None is 1 everywhere.
    old_logprobs_T: the sampler's, in bypass mode; None leaves the batch's.
    """

    mask_T: Tensor
    advantages_T: Tensor | None
    returns_T: Tensor | None
    weights_T: Tensor | None
    old_logprobs_T: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SequenceStats(SentAsArrays):
    """Of each sequence; [S].

    responses_S: tokens of the response that the model wrote, int64.
    members_S: the same, of a response whose score its group is compared with, else 0; int64.
    counts_S: the same, of a response whose advantages are trained, else 0; int64.
    trained_S: those of them that are trained, which correction makes fewer, int64.
    scores_S: sum of all rewards.
    kl_S: sum of the KL in the reward over ``responses_S`` tokens, float64, nats; None where there is none.
    logprobs_S: sum of the old log-probs over ``counts_S`` tokens, float64, nats.
    advantages: of the raw ones of an estimator of ``Scope.token``; None of another.
    returns_S, values_S: sums over ``counts_S`` tokens, float64; None without a critic.
    correction: for ``correction_metrics``.
    """

    responses_S: Tensor
    members_S: Tensor
    counts_S: Tensor
    trained_S: Tensor
    scores_S: Tensor
    kl_S: Tensor | None
    logprobs_S: Tensor
    advantages: Spreads | None
    returns_S: Tensor | None
    values_S: Tensor | None
    correction: CorrectionSums


def compute_advantages(
    batch: TrainBatch, outcomes: Outcomes, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[TokenAdvantages, SequenceStats]:
    """Of the sequences of ``batch``.

    batch: with old and rollout log-probs, and turn rewards, values and reference log-probs where there are some.
    kl_coef: of the KL in the reward, as it stands in this step.
    """
    assert batch.old_logprobs_T is not None and batch.rollout_logprobs_T is not None
    kl_T, process_T = None, batch.turn_rewards_T
    if algorithm.use_kl_in_reward:
        assert batch.ref_logprobs_T is not None, "the KL in the reward needs the reference"
        kl_T = penalty(algorithm.kl_penalty)(batch.old_logprobs_T, batch.ref_logprobs_T).masked_fill_(~batch.mask_T, 0)
        of_kl_T = kl_T * -kl_coef  # where it arises (arXiv:1909.08593, eq. 2)
        process_T = of_kl_T if process_T is None else process_T + of_kl_T
    counted_T = batch.mask_T
    if algorithm.mask_truncated:
        counted_T = mask_truncated(batch.mask_T, batch.lengths_S, outcomes.truncated_S)
    inputs = AdvantageInputs(
        lengths_S=batch.lengths_S,
        mask_T=batch.mask_T if algorithm.masked_in_baseline else counted_T,
        outcome_S=outcomes.scores_S,
        process_T=process_T,
        values_T=batch.old_values_T,
        greedy_S=outcomes.greedy_S,
    )
    found = token_advantages(inputs, algorithm)
    trained, counts_S = inputs.trained, inputs.counts_S
    if counted_T is not inputs.mask_T:
        trained, counts_S = Trained(counted_T), sequence_counts(counted_T, batch.lengths_S)
    config = algorithm.rollout_correction
    correction = correct(batch.old_logprobs_T, batch.rollout_logprobs_T, trained, batch.lengths_S, config)
    bypassed_T = batch.rollout_logprobs_T if config.bypass_mode else None
    old_T = batch.old_logprobs_T if bypassed_T is None else bypassed_T
    raw_T, returns_T = (None, None) if found is None else (found.advantages_T, found.returns_T)

    def sums(x_T: Tensor) -> Tensor:
        return sequence_sums(trained.gather(x_T).double(), counts_S)

    stats = SequenceStats(
        responses_S=sequence_counts(batch.mask_T, batch.lengths_S),
        members_S=inputs.counts_S,
        counts_S=counts_S,
        trained_S=sequence_counts(correction.mask_T, batch.lengths_S),
        scores_S=inputs.scores_S,
        kl_S=None if kl_T is None else sequence_sums(kl_T.double(), batch.lengths_S),
        logprobs_S=sums(old_T),
        advantages=None if raw_T is None else Spreads.of(trained.gather(raw_T), counts_S),
        returns_S=None if returns_T is None else sums(returns_T),
        values_S=None if batch.old_values_T is None else sums(batch.old_values_T),
        correction=correction.sums,
    )
    of_tokens = TokenAdvantages(
        mask_T=correction.mask_T,
        advantages_T=raw_T,
        returns_T=returns_T,
        weights_T=correction.weights_T,
        old_logprobs_T=bypassed_T,
    )
    return of_tokens, stats
