"""The experts of a rank, computed all at once: Megatron's ``SequentialMLP`` with grouped products in place of its loop.

Megatron's loop (transformer/moe/experts.py:910, 0.16.1) waits for the device to say how many rows each expert has, and
launches every expert by itself.  Parameters, their names and their places in checkpoints stay Megatron's: one weight an
expert.  Invariant: on the CPU equal to the loop bit for bit, gradients too (tests/training/test_grouped_experts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mcore_rl.training.adapters import add_of_groups
from mcore_rl.training.grouped_product import Groups, grouped_linear, of_each_row


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
        config = self.config
        weights_T1 = probs_T.unsqueeze(-1)
        if config.bias_activation_fusion:
            fused: Tensor = weighted_bias_swiglu_impl(projected_TF, None, weights_T1, False)  # not stored as fp8
            return fused
        gate_TF, up_TF = projected_TF.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate_TF = gate_TF.clamp(max=limit)
            up_TF = up_TF.clamp(-limit, limit)
        product_TF = config.activation_func(gate_TF) * (up_TF + config.glu_linear_offset)
        weighed: Tensor = (product_TF * weights_T1).to(product_TF.dtype)
        return weighed


def _linear(linears: Sequence[Any], groups: Groups, rows_TI: Tensor) -> Tensor:
    """The product of one linear of every expert, with its adapters', without its bias."""
    out_TO = grouped_linear(rows_TI, groups, [linear.weight for linear in linears])
    adapters = [linear.lora for linear in linears if "lora" in linear._modules]
    return add_of_groups(adapters, groups, rows_TI, out_TO) if adapters else out_TO
