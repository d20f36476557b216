"""The experts of a rank, computed all at once, and the rows that they get where no token leaves its rank.

Megatron's loop (transformer/moe/experts.py:910, 0.16.1) waits for the device to say how many rows each expert has, and
launches every expert by itself.  Parameters, their names and their places in checkpoints stay Megatron's: one weight an
expert.  Invariant: on the CPU equal to the loop bit for bit, gradients too (tests/training/test_grouped_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.training.adapters import add_of_groups
from mcore_rl.training.grouped_product import Groups, grouped_linear, of_each_row

PIECE = 8192  # rows
Gate = Callable[[Tensor, Tensor], Tensor]  # (projections of gate and up, weights of the rows) -> the weighed product


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # Megatron is untyped
    """The MLPs of a rank's experts, by grouped products.  Takes ``SequentialMLP``'s arguments."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, hidden], rows of one expert after another; integers [E]; [T].  Returns ([T, hidden], no bias).

        Biases of the output are in it, weighed as the rows are.
        """
        rows_TH = permuted_local_hidden_states
        groups = Groups(tokens_per_expert, rows_TH.device)
        first = [expert.linear_fc1 for expert in self.local_experts]
        second = [expert.linear_fc2 for expert in self.local_experts]
        projected_TF = _linear(first, groups, rows_TH)
        if first[0].bias is not None:
            projected_TF = projected_TF + of_each_row(groups, len(rows_TH), [linear.bias for linear in first])
        out_TH = _linear(second, groups, self._activate(projected_TF, permuted_probs))
        if second[0].bias is not None:
            weights_T1 = permuted_probs.unsqueeze(-1)
            bias_TH = of_each_row(groups, len(rows_TH), [linear.bias for linear in second], weights_T1)
            out_TH = (out_TH + bias_TH).to(out_TH.dtype)
        return out_TH, None

    def _activate(self, projected_TF: Tensor, probs_T: Tensor) -> Tensor:
        """The gated activation, weighed by the router, as Megatron's MLP has it (transformer/mlp.py:171, 0.16.1)."""
        weights_T1 = probs_T.unsqueeze(-1)
        if self.config.bias_activation_fusion:
            fused: Tensor = weighted_bias_swiglu_impl(projected_TF, None, weights_T1, False)  # not stored as fp8
            return fused
        weighed: Tensor = _InPieces.apply(self._gate, projected_TF, weights_T1)  # type: ignore[no-untyped-call]
        return weighed

    def _gate(self, projected_TF: Tensor, weights_T1: Tensor) -> Tensor:
        """The activation that Megatron has no kernel for: clamped, or of another function than silu."""
        config = self.config
        gate_TF, up_TF = projected_TF.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate_TF = gate_TF.clamp(max=limit)
            up_TF = up_TF.clamp(-limit, limit)
        product_TF = config.activation_func(gate_TF) * (up_TF + config.glu_linear_offset)
        weighed: Tensor = (product_TF * weights_T1).to(product_TF.dtype)
        return weighed


class _InPieces(torch.autograd.Function):
    """A gate that keeps its inputs alone, and is computed again in backward, ``PIECE`` rows at a time.

    Of all experts at once its many steps would keep nine tensors, and backward take seven more.
    """

    @staticmethod
    def forward(ctx: Any, gate: Gate, projected_TF: Tensor, weights_T1: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(projected_TF, weights_T1)
        out_TF = projected_TF.new_empty(projected_TF.shape[0], projected_TF.shape[1] // 2)
        pieces = zip(*(rows.split(PIECE) for rows in (out_TF, projected_TF, weights_T1)), strict=True)
        for out, projected, weights in pieces:
            out.copy_(gate(projected, weights))
        return out_TF

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs = ctx.saved_tensors
        results = [torch.empty_like(rows) for rows in inputs]
        pieces = zip(*(rows.split(PIECE) for rows in (grad_TF, *inputs, *results)), strict=True)
        for grad, projected, weights, *parts in pieces:
            leaves = [projected.detach().requires_grad_(), weights.detach().requires_grad_()]
            with torch.enable_grad():
                out = ctx.gate(*leaves)
            for part, gradient in zip(parts, torch.autograd.grad(out, leaves, grad), strict=True):
                part.copy_(gradient)
        return None, *results


def _linear(linears: Sequence[Any], groups: Groups, rows_TI: Tensor) -> Tensor:
    """The product of one linear of every expert, with its adapters', without its bias."""
    out_TO = grouped_linear(rows_TI, groups, [linear.weight for linear in linears])
    adapters = [linear.lora for linear in linears if "lora" in linear._modules]
    return add_of_groups(adapters, groups, rows_TI, out_TO) if adapters else out_TO


class ExpertOutputLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """The output projection of an expert with biases (gpt-oss): the bias is reduced as the weight is.

    Megatron marks the bias for a sum over tensor ranks (tensor_parallel/layers.py:1228).  An expert is whole on a rank
    (etp=1), and those that hold it too sum its gradients already, so the bias would get several times its own.  It is
    marked as the weight is, so that the gradient norm counts it on every tensor rank: each holds other experts, or
    another part of the optimizer's state.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)


def keep_tokens_local(chunk: torch.nn.Module) -> None:
    """Give the layers of ``chunk`` a ``LocalDispatcher`` where no token leaves its rank.

    Not where Megatron's does more: fuses permutations, or overlaps shared experts.  Experts of Transformer Engine want
    their numbers of rows on the host.
    """
    for module in chunk.modules():
        if not isinstance(module, MoELayer) or not isinstance(module.experts, GroupedExperts):
            continue
        config = module.config
        stays = config.expert_model_parallel_size * config.expert_tensor_parallel_size == 1
        if stays and not config.moe_permute_fusion and not config.moe_shared_expert_overlap:
            module.token_dispatcher = LocalDispatcher(config)


class LocalDispatcher(MoETokenDispatcher):  # type: ignore[misc]  # Megatron is untyped
    """Sorts tokens that stay on their rank by expert; the host never waits for the device.

    M tokens of K choices give M * K rows, one expert after another, in order of tokens.  Megatron's dispatcher copies
    the numbers of rows to the host although nothing is sent, and cuts the rows into chunks that are in order already
    (``MoEAlltoAllTokenDispatcher``, 0.16.1 and 0.19.2); 0.16.1 selects rows by a mask, twice a layer, and the host
    waits to know how many there are (moe_utils.py:369).  There are tokens times choices, which the host knows.

    Invariant: rows, probabilities and sums are in Megatron's order, bit for bit.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, hidden], bool [M, E], [M, E].  Returns (rows [M * K, hidden], their probabilities [M * K])."""
        self._shape = hidden_states.shape
        tokens_MH = hidden_states.view(-1, self._shape[-1])
        num_tokens, num_experts = routing_map.shape
        self._counts_E = routing_map.sum(dim=0)
        chosen_T2 = torch.nonzero_static(routing_map.T, size=num_tokens * self.config.moe_router_topk)
        expert_T, self._token_T = chosen_T2.unbind(1)
        probs_T = probs.flatten().gather(0, self._token_T * num_experts + expert_T)
        return tokens_MH.index_select(0, self._token_T), probs_T

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, rows of each expert [E], probabilities); all on the device."""
        return hidden_states, self._counts_E, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum of each token's rows, [s, b, hidden]."""
        flat = torch.Size((self._shape.numel() // self._shape[-1], self._shape[-1]))
        summed: Tensor = unpermute(hidden_states, self._token_T, restore_shape=flat)
        return summed.view(self._shape)
