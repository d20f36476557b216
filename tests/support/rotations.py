"""Cosines and sines as the local layers are given them, for any rank and without process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.training.model import transformer_config
from mcore_rl.training.rope import PackedRotaryEmbedding, set_frequencies
from mcore_rl.training.sequences import PackedSequences
from tests.support import engines, models

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ContextRank:
    """As much of a process group as the rotation asks for."""

    cp: int
    number: int

    def size(self) -> int:
        """How many ranks it has."""
        return self.cp

    def rank(self) -> int:
        """The number of this one."""
        return self.number


ALONE = ContextRank(1, 0)


def cosines_and_sines(
    frequencies: Sequence[Tensor],
    lengths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    group: ContextRank = ALONE,
) -> Tensor:
    """What the embedding of sets of ``frequencies`` gives for sequences of ``lengths``; unpacked: of one."""
    width = 2 * len(frequencies[0])
    megatrons = RotaryEmbedding(width, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
    embedding = PackedRotaryEmbedding.instead_of(megatrons, CPU, dtype)
    set_frequencies(embedding, *frequencies)
    parallel = ParallelConfig(cp=group.cp)
    config = transformer_config(models.dense(), parallel, engines.config(), LayerSpec.local)
    rows = torch.empty(sum(lengths) // group.cp, 1)
    sequences = PackedSequences.of(lengths, lengths, group.cp, group.number, CPU) if packed else None
    length = embedding.get_rotary_seq_len(None, None, rows, config, sequences)
    return embedding(length, packed_seq=packed)
