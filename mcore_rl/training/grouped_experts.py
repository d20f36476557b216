"""The experts of a rank, computed all at once: Megatron's ``SequentialMLP`` with grouped products in place of its loop.

Megatron's loop (transformer/moe/experts.py:910, 0.16.1) waits for the device to say how many rows each expert has, and
launches every expert by itself.  Parameters, their names and their places in checkpoints stay Megatron's: one weight an
expert.  Invariant: on the CPU equal to the loop bit for bit, gradients too (tests/training/test_grouped_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mcore_rl.training.adapters import add_of_groups
from mcore_rl.training.grouped_product import Groups, grouped_linear, of_each_row

PIECE = 8192  # rows
Gate = Callable[[Tensor, Tensor], Tensor]  # (projections of gate and up, weights of the rows) -> the weighed product


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # Megatron is untyped
    """The MLPs of a rank's experts.  Takes ``SequentialMLP``'s arguments."""

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
