"""Frozen teachers beside the policy: their output projections, and how far the policy is from them over the vocabulary.

Of a teacher's model only the output rows are here, those of the columns that this tensor rank has of the policy's
vocabulary, whatever the teacher's own layout is.  They are in host memory, and on the device for as long as a step is
trained that has a sequence of this teacher's.  Its last hidden states come with the batch.  ``divergence.py`` has the
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.not_a_number import NanCheck
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import EMBEDDING_TENSOR, OUTPUT_TENSOR
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.types import TAUGHT_BY, TrainBatch
from mcore_rl.parallel.device import Platform, pinned_empty_like
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.divergence import divergence
from mcore_rl.training.logprobs import num_local_columns
from mcore_rl.training.microbatch import Microbatch
from mcore_rl.training.model import DTYPES, padded_vocab_size
from mcore_rl.weights.tensor_slice import TensorSlice


@dataclass(frozen=True)
class Teacher:
    """The output projections on this rank of one teacher, or of several of one architecture.

    rows: [V, H] of each, those of this rank's columns of the policy's vocabulary, without padding, in host memory.
    soft_cap: of their logits.
    numbers: which of ``rows`` each number of the batch's ``TAUGHT_BY`` stands for.
    """

    rows: tuple[Tensor, ...]
    soft_cap: float | None
    numbers: tuple[int, ...] = (0,)

    @classmethod
    def load(
        cls,
        directories: Sequence[Path],
        precision: Precision,
        policy: ModelConfig,
        groups: ProcessGroups,
        platform: Platform,
        numbers: tuple[int, ...] = (0,),
    ) -> Teacher:
        """Reads the rows of this rank's columns from Hugging Face checkpoints, and nothing else of them.

        precision: of the teachers' hidden states.  policy: whose vocabulary is split over the tensor ranks of
        ``groups``.  Raises CheckpointError if the rows cannot be read, or are no numbers.
        """
        _, model = model_of(read_config(directories[0]))
        name = (EMBEDDING_TENSOR if model.tie_output else OUTPUT_TENSOR).name
        own = own_columns(policy, groups)
        shape = (len(own), model.hidden_size)
        rows = []
        for directory in directories:
            rows_VH = pinned_empty_like(platform, torch.empty(shape, dtype=DTYPES[precision], device="meta"))
            if own:
                with open_weights(directory) as checkpoint:
                    checkpoint.read_into(name, TensorSlice((own.start, 0), shape), rows_VH)
            check = NanCheck()
            check.see(name, rows_VH)
            if problems := check.problems():
                raise CheckpointError(str(directory), problems)
            rows.append(rows_VH)
        return cls(tuple(rows), model.output_soft_cap, numbers)

    def for_step(
        self, batch: TrainBatch, microbatches: Sequence[Microbatch], config: DistillConfig, device: torch.device
    ) -> DistillationStep:
        """What one optimizer step on ``batch`` needs of the teachers; the output rows go to ``device``."""
        hidden_MH = batch.teacher_hidden_MH
        scored_T = batch.teacher_scored_T
        assert hidden_MH is not None and scored_T is not None, "the teacher has not scored this batch"
        place_T = torch.where(scored_T, scored_T.cumsum(0) - 1, -1)
        teacher_T = self._teachers_of(batch).repeat_interleave(torch.tensor(batch.lengths_S))
        mask_T = batch.mask_T.cpu()
        places = []
        states = []
        counts = []
        for microbatch in microbatches:
            targets_N = microbatch.targets_N.cpu()
            rows_M = ((targets_N >= 0) & mask_T[targets_N.clamp(min=0)]).nonzero().squeeze(1)
            teacher_M, order_M = teacher_T[targets_N[rows_M]].sort(stable=True)
            rows_M = rows_M[order_M]
            states_M = place_T[targets_N[rows_M]]
            assert bool((states_M >= 0).all()), "a trained token has no hidden state of the teacher"
            places.append(rows_M)
            states.append(states_M)
            counts.append(teacher_M.bincount(minlength=len(self.rows)).tolist())
        taught = [any(of_microbatch[number] for of_microbatch in counts) for number in range(len(self.rows))]
        rows = [each.to(device) if here else each for each, here in zip(self.rows, taught, strict=True)]
        return DistillationStep(self, config, rows, hidden_MH, places, states, counts)

    def _teachers_of(self, batch: TrainBatch) -> Tensor:
        """The number of each sequence's teacher, int64 [S]."""
        name_S = batch.extra_S.get(TAUGHT_BY)
        if name_S is None:
            assert len(self.rows) == 1, "nobody says which teacher a sequence has"
            return torch.zeros(len(batch.lengths_S), dtype=torch.int64)
        return torch.tensor(self.numbers)[name_S.cpu().long()]


def own_columns(policy: ModelConfig, groups: ProcessGroups) -> range:
    """The columns of the policy's vocabulary that this tensor rank has, without padding."""
    tp = groups.layout.tp
    rank = groups.coords.tp
    columns = padded_vocab_size(policy.vocab_size, tp) // tp
    return range(rank * columns, rank * columns + num_local_columns(policy.vocab_size, columns, rank))


@dataclass(frozen=True)
class DistillationStep:
    """Teachers in one optimizer step.

    rows: of each that teaches a sequence of the step, on the device.  hidden_MH: of the whole batch, in host memory.
    places: of each microbatch, its trained rows, teacher by teacher.  states: the places of their hidden states in
    ``hidden_MH``.  counts: how many of these rows each teacher has.
    """

    teacher: Teacher
    config: DistillConfig
    rows: list[Tensor]
    hidden_MH: Tensor
    places: list[Tensor]
    states: list[Tensor]
    counts: list[list[int]]

    def divergence(self, index: int, logits_NV: Tensor, temperature: float, vocabulary: dict[str, Any]) -> Tensor:
        """The divergence of microbatch ``index``, nats, [N], 0 at rows that are not trained; with gradient.

        logits_NV: of the policy.  vocabulary: the arguments that ``token_logprobs`` shares.
        """
        device = logits_NV.device
        return divergence(
            logits_NV,
            self.hidden_MH[self.states[index]].to(device),
            self.rows,
            self.places[index].to(device),
            self.config.divergence,
            counts=self.counts[index],
            beta=self.config.jsd_beta,
            temperature=temperature,
            teacher_soft_cap=self.teacher.soft_cap,
            **vocabulary,
        )
