"""Linear attention by the gated delta rule (arXiv:2412.06464) for packed sequences and every layout.

Megatron's ``GatedDeltaNet`` with its parameters, their names and its description of a checkpoint, but not its
constructor and forward pass (megatron-core 0.16.1, ssm/gated_delta_net.py): it cannot be built without ``fla`` (:103),
refuses packed sequences (:297), its configuration refuses context parallelism (transformer_config.py:986), and it would
let ``layernorm_zero_centered_gamma`` reach the norm of its outputs, which is not zero-centred in Qwen3-Next.

Under context parallelism the projected queries, keys and values of all ranks are gathered, as in ``attention.py``, and
every rank computes the rule of all tokens, since the state goes from token to token, for its part of the heads; an
all-to-all brings back all heads of its own tokens.  Where key heads do not divide, every rank computes all of them.

Invariant: equal to transformers' ``Qwen3NextGatedDeltaNet`` and ``Qwen3_5GatedDeltaNet``, gradients too; nothing passes
from sequence to sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.config.model import LinearAttentionConfig
from mcore_rl.parallel.context import split_indices
from mcore_rl.parallel.device_details import current_device
from mcore_rl.training.attention import GatherRows, fixed_size, with_lengths
from mcore_rl.training.delta_rule import causal_convolution, gated_delta_rule, unit_length
from mcore_rl.training.sequences import PackedSequences, row_positions


class PackedGatedDeltaNet(GatedDeltaNet):  # type: ignore[misc]  # Megatron is untyped
    """A layer's linear attention; the spec's ``linear`` gives the widths, which ``config`` lacks."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        linear: LinearAttentionConfig,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        assert pg_collection is not None, "the layer passes its groups on"
        assert config.sequence_parallel == (pg_collection.tp.size() > 1), "with tensor comes sequence parallelism"
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.linear = linear
        # What ``GatedDeltaNet.sharded_state_dict`` and ``reset_parameters`` read, in either version of Megatron.
        self.tp_size = pg_collection.tp.size()
        self.conv_bias = False
        self.conv_init = None
        self.A_init_range = (1, 16)
        self.qk_dim = linear.key_dim
        self.v_dim = linear.value_dim
        self.num_value_heads = linear.num_value_heads
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        self.conv_dim_local_tp = (2 * self.qk_dim + self.v_dim) // self.tp_size
        keys = self.qk_dim_local_tp = self.qk_dim // self.tp_size
        values = self.v_dim_local_tp = self.v_dim // self.tp_size
        heads = self.num_v_heads_local_tp = self.dt_bias_dim = self.num_value_heads // self.tp_size
        self.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]
        self.in_proj_split_sections = (keys, keys, values, values, heads, heads)
        self._build(submodules)
        self.reset_parameters()

    def _build(self, submodules: GatedDeltaNetSubmodules) -> None:
        config = self.config
        groups = self.pg_collection
        dtype = self.config.params_dtype
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            self.in_proj_dim,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=groups.tp,
        )
        channels = self.conv_dim_local_tp
        taps = self.linear.conv_kernel_dim
        # Where Megatron's ``reset_parameters`` computes what it writes into them.
        device = None if config.use_cpu_initialization else current_device()
        self.conv1d = torch.nn.Conv1d(channels, channels, taps, groups=channels, bias=False, dtype=dtype, device=device)
        self.dt_bias = torch.nn.Parameter(torch.empty(self.num_v_heads_local_tp, dtype=dtype, device=device))
        self.A_log = torch.nn.Parameter(torch.empty(self.num_v_heads_local_tp, dtype=dtype, device=device))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.linear.value_head_dim, eps=config.layernorm_epsilon
        )
        self.out_proj = build_module(
            submodules.out_proj,
            self.v_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=groups.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        rotary_pos_emb: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """hidden_states: [s / tp, b, H], packed with b = 1.  Returns (the same shape, None for a bias).

        rotary_pos_emb: of the layers that attend; the rule knows the order of tokens without it.
        """
        given = [name for name, value in {"attention_mask": attention_mask, **unused}.items() if value is not None]
        assert not given, f"linear attention knows no {given}"
        projected, _ = self.in_proj(hidden_states)
        rows, batch, _ = projected.shape
        cp = self.pg_collection.cp.size()
        cp_rank = self.pg_collection.cp.rank()
        if packed_seq_params is None:
            packed = fixed_size(batch, rows * cp, cp, cp_rank, projected.device)
        else:
            packed = with_lengths(packed_seq_params, cp, cp_rank, projected.device)
        heads = self.num_v_heads_local_tp
        widths = [self.conv_dim_local_tp, heads * self.linear.value_head_dim, 2 * heads]
        mixed, gate, gates = torch.split(projected.transpose(0, 1).flatten(0, 1), widths, dim=-1)
        out = self._rule(torch.cat([mixed, gates], dim=-1), packed)
        out = self._gated(out.to(projected.dtype), gate.unflatten(-1, (heads, -1)))
        out = out.flatten(1).unflatten(0, (batch, rows)).transpose(0, 1).contiguous()
        return self.out_proj(out)[0], None

    def _rule(self, inputs: Tensor, packed: PackedSequences) -> Tensor:
        """[t, heads, width of values] from this rank's rows; recomputed in backward where core attention is."""
        config = self.config
        recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        if not (recompute and self.training):
            return self._of_rows(inputs, packed)
        return tensor_parallel.checkpoint(lambda x: self._of_rows(x, packed), False, inputs)

    def _of_rows(self, inputs: Tensor, packed: PackedSequences) -> Tensor:
        cp = packed.cp
        lengths = packed.padded_lengths
        if cp == 1:
            return self._of_heads(inputs, lengths, part=0, parts=1)
        inputs = GatherRows.apply(  # type: ignore[no-untyped-call]
            inputs, packed.gather_T, packed.scatter_T, self.pg_collection.cp
        )
        if self.linear.num_key_heads // self.tp_size % cp != 0:
            out_T = self._of_heads(inputs, lengths, part=0, parts=1)
            return out_T[split_indices(lengths, cp, packed.cp_rank).to(out_T.device)]
        out_T = self._of_heads(inputs, lengths, part=packed.cp_rank, parts=cp)
        of_each_rank = out_T.index_select(0, packed.scatter_T).to(inputs.dtype)
        of_all_heads = tensor_parallel.all_to_all(self.pg_collection.cp, of_each_rank)
        return of_all_heads.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1, 2)

    def _of_heads(self, inputs_T: Tensor, lengths: tuple[int, ...], *, part: int, parts: int) -> Tensor:
        """The rule of all tokens for part ``part`` of this tensor rank's heads: [T, heads / parts, width of values]."""
        linear = self.linear
        heads = self.num_v_heads_local_tp
        keys = self.qk_dim_local_tp
        values = self.v_dim_local_tp

        def own(x: Tensor, widths: list[int], dim: int) -> Tensor:
            if parts == 1:
                return x
            return torch.cat([each.chunk(parts, dim)[part] for each in x.split(widths, dim)], dim)

        inputs_T = own(inputs_T, [keys, keys, values, heads, heads], -1)
        weight = own(self.conv1d.weight.squeeze(1), [keys, keys, values], 0)
        keys = keys // parts
        values = values // parts
        heads = heads // parts
        mixed_T, gates_T = torch.split(inputs_T, [2 * keys + values, 2 * heads], dim=-1)
        positions_T = row_positions(lengths, 1, 0, inputs_T.device)
        mixed_T = F.silu(causal_convolution(mixed_T, weight, positions_T))
        query, key, value = torch.split(mixed_T, [keys, keys, values], dim=-1)
        sharing = linear.num_value_heads // linear.num_key_heads
        query, key = (
            unit_length(x.unflatten(-1, (-1, linear.key_head_dim))).repeat_interleave(sharing, dim=1)
            for x in (query, key)
        )
        beta, alpha = gates_T.float().chunk(2, dim=-1)
        a_log, dt_bias = (x.chunk(parts)[part].float() for x in (self.A_log, self.dt_bias))
        decay = -a_log.exp() * F.softplus(alpha + dt_bias)
        value = value.unflatten(-1, (-1, linear.value_head_dim))
        return gated_delta_rule(query, key, value, decay, beta.sigmoid(), lengths)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head, times the SiLU of its gate; as ``Qwen3NextRMSNormGated``."""
        return (self.out_norm(x) * F.silu(gate.float())).to(x.dtype)
