"""A microbatch's rows as a loss sees them: what the forward pass made, and the batch's fields at predicted tokens."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.parallel.groups import ProcessGroups, sum_over
from mcore_rl.training.microbatch import Microbatch
from mcore_rl.types import LossInputs, TrainBatch


def loss_inputs(
    batch: TrainBatch,
    microbatch: Microbatch,
    groups: ProcessGroups,
    *,
    logprobs_N: Tensor | None,
    entropy_N: Tensor | None,
    values_N: Tensor | None,
) -> LossInputs:
    """The ``LossInputs`` of ``microbatch``.  logprobs_N, entropy_N, values_N: of this forward pass, 0 at no target."""
    mask_N = microbatch.at_targets(batch.mask_T)
    assert mask_N is not None
    return LossInputs(
        mask_N=mask_N,
        sequence_N=microbatch.sequence_N,
        num_sequences=len(microbatch.lengths),
        sum_over_context=lambda x: sum_over(x, groups.cp),
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        values_N=values_N,
        old_logprobs_N=microbatch.at_targets(batch.old_logprobs_T),
        ref_logprobs_N=microbatch.at_targets(batch.ref_logprobs_T),
        rollout_logprobs_N=microbatch.at_targets(batch.rollout_logprobs_T),
        advantages_N=microbatch.at_targets(batch.advantages_T),
        returns_N=microbatch.at_targets(batch.returns_T),
        old_values_N=microbatch.at_targets(batch.old_values_T),
        weights_N=microbatch.at_targets(batch.weights_T),
        selection_N=microbatch.at_targets(batch.selection_T),
        extra_N=microbatch.extra_at_targets(batch.extra_T),
        extra_S=microbatch.extra_of_sequences(batch.extra_S),
        pairs_P2=microbatch.pairs(batch.pairs_S),
    )
