"""Multi-head latent attention (arXiv:2405.04434) for packed sequences, any RoPE and every layout.

Built on Megatron's ``Attention``, with the parameters of its ``MLASelfAttention``, which is not used (megatron-core
0.16.1, transformer/multi_latent_attention.py):
- It cannot be built without Transformer Engine: :62 believes that it is there, and :185 then asks whether a module is
  an instance of a mock.
- Without Transformer Engine it takes a column-parallel linear for the down projections and nothing else (:462), and
  gathers their output by a function whose backward pass keeps a rank's own slice (:607).  The rotated part of the key,
  which every rank uses for its own heads, so loses the gradient of all other ranks' heads; so it is in 0.19.2 (:739).
  Here the down projections are replicated, as Transformer Engine's are, and every rank projects its part of a sequence.
- It knows two types of RoPE, its yarn always rounds the bounds of the ramp, and it reads the boundaries of packed
  sequences back from the device twice a layer (models/common/embeddings/rope_utils.py:204).

Serves both layer specs: the linears are the spec's.  Deliberately not here: decoding with a cache, biases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.training.rope import inverse_frequencies
from mcore_rl.training.rotation import rotate
from mcore_rl.training.sequences import PackedSequences, row_positions


class ReplicatedLinear(torch.nn.Module):
    """``x @ weight.T`` with the whole weight [output_size, input_size] on every tensor rank.

    The local spec's counterpart of ``TELinear`` with ``parallel_mode="duplicated"``, with its constructor.
    Under sequence parallelism a rank sees a part of the tokens, so the weight is marked for Megatron's
    finalize_model_grads to sum its gradient over tensor ranks (``_allreduce_non_tensor_model_parallel_grads``).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not (bias or skip_bias_add or skip_weight_param_allocation)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x: [..., input_size].  Returns ([..., output_size], None); Megatron's linears return a bias there."""
        return F.linear(x, self.weight), None


class LatentAttention(Attention):
    """Self-attention whose keys and values are projections of one small latent per token.

    model: gives the widths and RoPE, which ``config`` lacks.  config: ``kv_channels`` is the width of a value head, and
    ``softmax_scale`` is used as it is.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        model: ModelConfig,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        assert config.sequence_parallel == (self.tp_group.size() > 1), "with tensor comes sequence parallelism"
        assert model.mla is not None and config.kv_channels == model.mla.v_head_dim
        self.mla = model.mla
        self.cos_sin_factor = model.rope.attention_factor
        frequencies = inverse_frequencies(model.rope, model.rotary_base, model.mla.qk_rope_head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self._build_projections(submodules)

    def _build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        config = self.config
        mla = self.mla
        heads = config.num_attention_heads

        def down(kind: type, width: int, name: str) -> torch.nn.Module:
            return build_module(
                kind,
                config.hidden_size,
                width,
                parallel_mode="duplicated",
                config=config,
                bias=False,
                init_method=config.init_method,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                tp_comm_buffer_name=name,
            )

        def up(kind: type, inputs: int, head_width: int, name: str) -> torch.nn.Module:
            return build_module(
                kind,
                inputs,
                heads * head_width,
                config=config,
                bias=False,
                init_method=config.init_method,
                gather_output=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=name,
                tp_group=self.pg_collection.tp,
            )

        def norm(kind: type, width: int) -> torch.nn.Module:
            return build_module(kind, hidden_size=width, config=config, eps=config.layernorm_epsilon)

        query_width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            self.linear_q_proj = up(submodules.linear_q_proj, config.hidden_size, query_width, "q_proj")
        else:
            self.linear_q_down_proj = down(submodules.linear_q_down_proj, mla.q_lora_rank, "q_down_proj")
            self.linear_q_up_proj = up(submodules.linear_q_up_proj, mla.q_lora_rank, query_width, "q_up_proj")
            self.q_layernorm = norm(submodules.q_layernorm, mla.q_lora_rank)
        latent = mla.kv_lora_rank
        head_width = mla.qk_nope_head_dim + mla.v_head_dim
        self.linear_kv_down_proj = down(submodules.linear_kv_down_proj, latent + mla.qk_rope_head_dim, "kv_down_proj")
        self.linear_kv_up_proj = up(submodules.linear_kv_up_proj, latent, head_width, "kv_up_proj")
        self.kv_layernorm = norm(submodules.kv_layernorm, latent)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """hidden_states: [s / tp, b, H], packed with b = 1.  Returns (the same shape, None for a bias)."""
        given = [name for name, value in unused.items() if value is not None]
        assert not given, f"latent attention knows no {given}"
        query, key, value = (x.contiguous() for x in self.get_query_key_value_tensors(hidden_states, packed_seq_params))
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        out = attend(
            query, key, value, attention_mask, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
        )
        if packed_seq_params is not None:
            out = out.reshape(out.shape[0], 1, -1)
        return self.linear_proj(out)[0], None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, packed_seq_params: PackedSequences | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of this rank's heads.

        hidden_states: [s / tp, b, H].  Returns [s, b, heads / tp, width], packed [t, heads / tp, width].  Width of a
        value: ``v_head_dim``; of query and key: unrotated plus rotated part.
        """
        mla = self.mla
        heads = self.num_attention_heads_per_partition
        if mla.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
        latents, _ = self.linear_kv_down_proj(hidden_states)
        latent, key_rope = torch.split(latents, [mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        keys_values, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        if self.config.sequence_parallel:
            # Backward sums over the tensor ranks: each knows the gradient of its own heads only.
            key_rope = gather_from_sequence_parallel_region(key_rope, group=self.tp_group)

        query, keys_values = (x.unflatten(-1, (heads, -1)) for x in (query, keys_values))
        key_rope = key_rope.unsqueeze(-2)
        if packed_seq_params is not None:
            query, keys_values, key_rope = (x.squeeze(1) for x in (query, keys_values, key_rope))
        query_nope, query_rope = torch.split(query, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        key_nope, value = torch.split(keys_values, [mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        cos, sin = self._cos_sin(packed_seq_params, query)
        query_rope, key_rope = (rotate(x, cos, sin, interleaved=mla.interleaved) for x in (query_rope, key_rope))
        query = torch.cat([query_nope, query_rope], dim=-1)
        key = torch.cat([key_nope, key_rope.expand(*key_nope.shape[:-1], -1)], dim=-1)
        return query, key, value

    def _cos_sin(self, packed: PackedSequences | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for this rank's rows, [rows, 1, ..., pairs], with as many dimensions as ``like``."""
        cp_group = self.pg_collection.cp
        if packed is None:
            lengths: tuple[int, ...] = (like.shape[0] * cp_group.size(),)
            firsts: tuple[int, ...] = ()
        else:
            assert isinstance(packed, PackedSequences), "the lengths of packed sequences are needed on the host"
            lengths = packed.padded_lengths
            firsts = packed.first_positions
        positions = row_positions(lengths, cp_group.size(), cp_group.rank(), like.device, firsts)
        angles = torch.outer(positions, self.inverse_frequencies)
        angles = angles.view(-1, *(1,) * (like.dim() - 2), angles.shape[1])
        cos = angles.cos() * self.cos_sin_factor
        sin = angles.sin() * self.cos_sin_factor
        return cos.to(like.dtype), sin.to(like.dtype)
