"""A frozen teacher beside the policy: its output projection, and how far the policy is from it over the vocabulary.

Of the teacher's model only the output rows are here, those of the columns that this tensor rank has of the policy's
vocabulary, whatever the teacher's own layout is.  They are in host memory, and on the device for as long as a step is
trained.  Its last hidden states come with the batch.  ``divergence.py`` has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.not_a_number import NanCheck
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families.blocks import EMBEDDING_TENSOR, OUTPUT_TENSOR
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import Platform, pinned_empty_like
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.divergence import divergence, num_local_columns
from mcore_rl.training.microbatch import Microbatch
from mcore_rl.training.model import DTYPES, padded_vocab_size
from mcore_rl.types import TrainBatch
from mcore_rl.weights.tensor_slice import TensorSlice


@dataclass(frozen=True)
class Teacher:
    """The teacher's output projection on this rank.

    rows_VH: those of this rank's columns of the policy's vocabulary, without padding, in host memory.
    soft_cap: of its logits.
    """

    rows_VH: Tensor
    soft_cap: float | None

    @classmethod
    def load(
        cls, directory: Path, precision: Precision, policy: ModelConfig, groups: ProcessGroups, platform: Platform
    ) -> Teacher:
        """Reads the rows of this rank's columns from a Hugging Face checkpoint, and nothing else of it.

        precision: of the teacher's hidden states.  policy: whose vocabulary is split over the tensor ranks of
        ``groups``.  Raises CheckpointError if the rows cannot be read, or are no numbers.
        """
        _, model = model_of(read_config(directory))
        tp, rank = groups.layout.tp, groups.coords.tp
        columns = padded_vocab_size(policy.vocab_size, tp) // tp
        count = num_local_columns(policy.vocab_size, columns, rank)
        name = (EMBEDDING_TENSOR if model.tie_output else OUTPUT_TENSOR).name
        shape, check = (count, model.hidden_size), NanCheck()
        rows_VH = pinned_empty_like(platform, torch.empty(shape, dtype=DTYPES[precision], device="meta"))
        if count:
            with HfCheckpoint.open(directory) as checkpoint:
                checkpoint.read_into(name, TensorSlice((rank * columns, 0), shape), rows_VH)
        check.see(name, rows_VH)
        if problems := check.problems():
            raise CheckpointError(str(directory), problems)
        return cls(rows_VH, model.output_soft_cap)

    def for_step(
        self, batch: TrainBatch, microbatches: Sequence[Microbatch], config: DistillConfig, device: torch.device
    ) -> DistillationStep:
        """What one optimizer step on ``batch`` needs of the teacher; the output rows go to ``device``."""
        hidden_MH, scored_T = batch.teacher_hidden_MH, batch.teacher_scored_T
        assert hidden_MH is not None and scored_T is not None, "the teacher has not scored this batch"
        place_T = torch.where(scored_T, scored_T.cumsum(0) - 1, -1)
        mask_T, places, states = batch.mask_T.cpu(), [], []
        for microbatch in microbatches:
            targets_N = microbatch.targets_N.cpu()
            rows_M = ((targets_N >= 0) & mask_T[targets_N.clamp(min=0)]).nonzero().squeeze(1)
            states_M = place_T[targets_N[rows_M]]
            assert bool((states_M >= 0).all()), "a trained token has no hidden state of the teacher"
            places.append(rows_M)
            states.append(states_M)
        return DistillationStep(self, config, self.rows_VH.to(device), hidden_MH, places, states)


@dataclass(frozen=True)
class DistillationStep:
    """A teacher in one optimizer step.

    rows_VH: on the device.  hidden_MH: of the whole batch, in host memory.
    places: of each microbatch, its trained rows.  states: the places of their hidden states in ``hidden_MH``.
    """

    teacher: Teacher
    config: DistillConfig
    rows_VH: Tensor
    hidden_MH: Tensor
    places: list[Tensor]
    states: list[Tensor]

    def divergence(self, index: int, logits_NV: Tensor, temperature: float, vocabulary: dict[str, Any]) -> Tensor:
        """The divergence of microbatch ``index``, nats, [N], 0 at rows that are not trained; with gradient.

        logits_NV: of the policy.  vocabulary: the arguments that ``token_logprobs`` shares.
        """
        device = logits_NV.device
        return divergence(
            logits_NV,
            self.hidden_MH[self.states[index]].to(device),
            self.rows_VH,
            self.places[index].to(device),
            self.config.divergence,
            beta=self.config.jsd_beta,
            temperature=temperature,
            teacher_soft_cap=self.teacher.soft_cap,
            **vocabulary,
        )
