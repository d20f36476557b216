"""What a scoring pass says of a rank's sequences, and the same from the forward of their only update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import Trained, sequence_sums
from mcore_rl.algorithms.correction import MEASURE, CorrectionSums, correct, drawn_tokens
from mcore_rl.ground.types import SequenceScores, TokenScores, TrainBatch


@dataclass(frozen=True)
class OwnScores:
    """Of sequences that an update scored itself (``config/step_plan.py``).

    scores: of the scoring pass.  correction: the agreement of trainer and sampler, as ``compute_advantages`` has it.
    """

    scores: SequenceScores
    correction: CorrectionSums


def own_scores(batch: TrainBatch, scores: TokenScores) -> OwnScores:
    """From the scores of ``batch`` before its update.  Nothing is corrected: that would need them before the update."""
    assert scores.logprobs_T is not None and batch.rollout_logprobs_T is not None
    trained = drawn_tokens(Trained(batch.mask_T), batch.rollout_logprobs_T)
    correction = correct(scores.logprobs_T, batch.rollout_logprobs_T, trained, batch.lengths_S, MEASURE, weighs=False)
    return OwnScores(sums_per_sequence(batch, scores.logprobs_T, scores.entropy_T), correction.sums)


def sums_per_sequence(batch: TrainBatch, scored_T: Tensor, entropy_T: Tensor | None) -> SequenceScores:
    """Sums over the trained tokens of each sequence.  scored_T: log-probs or values."""
    return SequenceScores(
        sums_S=_sums(batch, scored_T), entropy_S=None if entropy_T is None else _sums(batch, entropy_T)
    )


def _sums(batch: TrainBatch, x_T: Tensor) -> Tensor:
    return sequence_sums(x_T.double().masked_fill_(~batch.mask_T, 0), batch.lengths_S)
