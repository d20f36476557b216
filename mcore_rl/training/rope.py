"""Rotary position embedding: the frequencies that transformers uses, in float32 and bit for bit.

Megatron computes its own (models/common/embeddings/rotary_pos_embedding.py), the same bit for bit, but with Llama 3.1's
constants written in, and none for longrope; ``set_frequencies`` replaces them.  ``rotation.py`` rotates by them.
Frequencies that change with the length of the input (dynamic NTK, longrope beyond the pre-training's length) are
deliberately not here.

The attention factor of yarn and longrope multiplies cosine and sine, so that the rotated part of a query-key product
carries its square.  Where heads are rotated wholly, we put that square into the softmax scale (``score_scale``), and
where they are rotated in part, that part of the key is multiplied by it (``ScaledKeyPart``): Transformer Engine's fused
rotation of packed sequences silently drops the factor (rope_utils.py, ``apply_rotary_pos_emb``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from mcore_rl.config.model import ModelConfig, MropeConfig, RopeConfig, RopeType
from mcore_rl.training.sequences import PackedSequences, row_positions


def inverse_frequencies(rope: RopeConfig, base: float, dim: int) -> Tensor:
    """Radians per position of each rotated pair: float32 [dim / 2] on the CPU, the fastest first.

    base: ``rotary_base``.  dim: rotated width of a head, even.  The attention factor is not included.  The order of
    operations is that of transformers 5 (modeling_rope_utils.py), so that no bit differs.
    """
    assert dim % 2 == 0, f"RoPE rotates pairs, and {dim} is odd"
    with torch.device("cpu"):
        powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        frequencies: Tensor = 1.0 / powers
        if rope.type is RopeType.linear:
            return frequencies / rope.factor
        if rope.type is RopeType.llama3:
            return _llama3(rope, frequencies)
        if rope.type is RopeType.yarn:
            return _yarn(rope, powers, base, dim)
        if rope.type is RopeType.longrope:
            return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * powers)
        assert rope.type is RopeType.default, f"rope type {rope.type} has no frequencies"
        return frequencies


def frequency_sets(model: ModelConfig) -> list[Tensor]:
    """The frequencies of all layers, or of those without a window and then of those with one."""
    sets = [inverse_frequencies(model.rope, model.rotary_base, model.rotary_dim)]
    if model.local_rotary_base is not None:
        sets.append(inverse_frequencies(RopeConfig(), model.local_rotary_base, model.rotary_dim))
    return sets


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Waves longer than the pre-training over ``low_freq_factor`` are slowed by ``factor``, short ones are kept."""
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > trained / rope.low_freq_factor
    fast = wavelengths < trained / rope.high_freq_factor
    kept = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - kept) * frequencies / rope.factor + kept * frequencies
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, between))


def _yarn(rope: RopeConfig, powers: Tensor, base: float, dim: int) -> Tensor:
    """arXiv:2309.00071, section 3.2: a ramp over dimensions from kept frequencies to those divided by ``factor``."""

    def dimension(rotations: float) -> float:
        # the dimension that turns so often within the pre-training's length
        waves = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(waves)) / (2 * math.log(base))

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by 0
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def set_frequencies(embedding: RotaryEmbedding, *frequencies: Tensor) -> None:
    """Make Megatron's ``embedding`` rotate by ``frequencies``; they move to the device of its own.

    Several sets stand beside one another in what it returns; each layer takes its own (``of_set``).
    """
    for each in frequencies:
        assert each.shape == embedding.inv_freq.shape, (
            f"{tuple(each.shape)} frequencies for {tuple(embedding.inv_freq.shape)}"
        )
    assert embedding.seq_len_interpolation_factor is None, "positions would be divided a second time"
    embedding.inv_freq = torch.cat(frequencies).to(embedding.inv_freq.device)


class PackedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]  # Megatron is untyped
    """Stands where Megatron's embedding does, for the local layers: cosines and sines, computed once for all of them.

    Those of packed sequences are of their tokens end to end, of the lengths that the host knows, and of this context
    rank's rows alone.  Transformer Engine's fused rotation wants Megatron's: the angles of the longest sequence.
    """

    @classmethod
    def instead_of(cls, embedding: RotaryEmbedding, device: torch.device, dtype: torch.dtype) -> PackedRotaryEmbedding:
        """One of the same width and for the same context ranks as Megatron's ``embedding``.

        dtype: of queries and keys, to which cosines and sines are rounded.
        """
        new = cls(2 * len(embedding.inv_freq), 1.0, use_cpu_initialization=True, cp_group=embedding.cp_group)
        new.inv_freq = embedding.inv_freq.to(device)
        new.dtype = dtype
        new.padded_lengths = ()
        new.first_positions = ()
        new.positions_3N = None
        return new

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        """Megatron's arguments and result; notes which sequences the next forward pass is for."""
        length: int = super().get_rotary_seq_len(*args, **options)
        packed = next((each for each in (*args, *options.values()) if isinstance(each, PackedSequences)), None)
        self.padded_lengths = (length,) if packed is None else packed.padded_lengths
        self.first_positions = () if packed is None else packed.first_positions
        self.positions_3N = None if packed is None else packed.positions_3N
        return length

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Cosines, then sines, [rows of this context rank, 1, 1, 2 * frequencies]; Megatron's arguments."""
        cp = self.cp_group
        device = self.inv_freq.device
        positions = row_positions(self.padded_lengths, cp.size(), cp.rank(), device, self.first_positions)
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)[:, None, None]


class AxesRotaryEmbedding(PackedRotaryEmbedding):
    """``PackedRotaryEmbedding`` by positions of three axes, which the sequences bring, row by row.

    So packing, context parallelism, recomputation and interleaved stages cannot part a row from its positions; Megatron
    cuts the axes of a whole packed tensor (MultimodalRotaryEmbedding, 0.16.1).  transformers' bits.
    """

    def rotate_by(self, mrope: MropeConfig) -> None:
        """Say which axis each frequency is of."""
        axes = [axis for axis, count in enumerate(mrope.sections) for _ in range(count)]
        if mrope.interleaved:
            axes = [0] * len(axes)
            for axis in (1, 2):
                for place in range(axis, min(3 * mrope.sections[axis], len(axes)), 3):
                    axes[place] = axis
        self.axis_F = torch.tensor(axes, device=self.inv_freq.device)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Cosines, then sines, as ``PackedRotaryEmbedding`` gives them."""
        if self.positions_3N is None:  # a token of text has the same position on each axis
            out: Tensor = super().forward(*args, **options)
            return out
        angles = self.positions_3N[self.axis_F].T.float() * self.inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)[:, None, None]


def of_set(cos_sin: Tensor, index: int, num_sets: int) -> Tensor:
    """Cosines and sines of set ``index`` alone, of what an embedding with ``num_sets`` sets of frequencies gives."""
    return cos_sin.unflatten(-1, (2, num_sets, -1))[..., index, :].flatten(-2)


def score_scale(model: ModelConfig) -> float:
    """The factor on query-key products of grouped-query attention.

    It is ``model.softmax_scale``, times the square of the rope's attention factor where all of a head is rotated.
    """
    assert model.mla is None, "latent attention rotates a part of each head"
    scale = model.head_dim**-0.5 if model.softmax_scale is None else model.softmax_scale
    return scale if model.rotary_dim < model.head_dim else scale * model.rope.attention_factor**2


class ScaledKeyPart(torch.nn.Module):
    """Multiplies the first ``rotary_dim`` elements of each key head by ``scale``; stands where a key norm would.

    It is built as Megatron builds one; config, hidden_size and eps are accepted and not used.
    """

    def __init__(self, config: object, hidden_size: int, eps: float, scale: float, rotary_dim: int) -> None:
        super().__init__()
        self.scale = scale
        self.rotary_dim = rotary_dim

    def forward(self, key: Tensor) -> Tensor:
        """key: [..., head_dim]; the result has its shape and dtype."""
        return torch.cat([key[..., : self.rotary_dim] * self.scale, key[..., self.rotary_dim :]], dim=-1)
