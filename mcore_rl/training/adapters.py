"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's linears, under every layout.

An adapted linear computes ``W x + scale * B (A x)``.  Tensor ranks exchange the r columns of ``A x``, not hidden ones:
- rows split (queries, gate and up): A is whole, each rank projects its own tokens, the r columns are gathered, and B
  has the rank's rows;
- columns split (outputs of attention and MLP): A has the rank's columns, the partial sums of r columns are summed and
  scattered over tokens, and B is whole;
- replicated (down projections of latent attention): both are whole, for the rank's own tokens;
- experts: the dispatcher has gathered a rank's tokens, and sums the outputs over its expert-tensor peers: no exchange.
A tensor that is whole on several ranks, each of which sees a part of the tokens or rows, has its gradient summed over
them: over tensor ranks by Megatron (``sequence_parallel``), over expert-tensor ranks by ``sum_expert_replicas``.

Adapters are float32 and are their own main weights; they compute in the dtype of the activations.  Values at the start
depend on the seed and the tensor's name alone.  Deliberately not here: dropout, with which the trainer would compute
another policy than the one that sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from mcore_rl.config.lora import AdapterInit
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.grouped_product import Groups, grouped_linear
from mcore_rl.training.sandwich import NormedRowParallelLinear
from mcore_rl.weights.adapter_table import AdaptedRule, AdapterTable
from mcore_rl.weights.binding import Bound, bind
from mcore_rl.weights.table import LocalTensor
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of


class Adapter(torch.nn.Module):
    """The adapters of one weight of this rank: an A and a B for each Hugging Face linear in it.

    lora_A, lora_B: their tensors, by the linear's number.  group: the tensor ranks to exchange with; None: nothing to.
    is_off: the linear computes as without them, see ``adapters_off``.
    """

    is_off = False

    def __init__(self, table: AdapterTable, adapted: AdaptedRule, local: LocalTensor, groups: ProcessGroups) -> None:
        super().__init__()
        self.splits_inputs = adapted.splits_inputs
        self.scale = table.lora.scale
        exchanges = local.num_shards > 1 and local.expert is None
        self.group = groups.tp if exchanges else None
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()
        for source, a, b in zip(adapted.sources, adapted.a, adapted.b, strict=True):
            for tensors, rule in ((self.lora_A, a), (self.lora_B, b)):
                index = local.index if rule.axis is adapted.rule.axis else 0
                held = LocalTensor(rule.name, local.chunk, rule, local.layer, local.expert, local.num_shards, index)
                tensor = torch.nn.Parameter(torch.zeros(table.shape(held), device=groups.device))
                _mark(tensor, rule.axis is adapted.rule.axis and local.num_shards > 1, rule.dim, local, groups)
                tensors[str(source)] = tensor
        rows = adapted.rows(table.model, local)
        self.rows: Tensor | None
        self.register_buffer("rows", None if rows is None else torch.tensor(rows, device=groups.device), False)

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """``output`` of the linear for input ``x``, with the adapters' part added."""
        if self.is_off:
            return output
        # Of a matrix torch takes the same product with gradient and without: a step's scores are the scoring pass's.
        inner = F.linear(x.reshape(-1, x.shape[-1]), self._a(x.dtype))
        if self.group is not None and self.splits_inputs:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        elif self.group is not None:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self.group)
        return output + self.scale * F.linear(inner, self._b(x.dtype)).view_as(output)

    @torch.no_grad()
    def change(self) -> Tensor:
        """``scale * B A``, what the adapters add to the rank's weight; float32."""
        return (self._b(torch.float32) @ self._a(torch.float32)).mul_(self.scale)

    def _a(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([a.to(dtype) for a in self.lora_A.values()])

    def _b(self, dtype: torch.dtype) -> Tensor:
        """All B's as one matrix for all A's: each row takes the columns of its own linear."""
        whole = torch.block_diag(*(b.to(dtype) for b in self.lora_B.values()))
        if self.rows is None:
            return whole
        return F.pad(whole, (0, 0, 0, 1))[self.rows]  # row -1 is zero: of a linear without adapters


def _mark(tensor: Tensor, is_split: bool, dim: int, local: LocalTensor, groups: ProcessGroups) -> None:
    """Tell Megatron over which ranks gradients are summed, and on which ranks the gradient norm counts them."""
    if local.expert is None:
        set_tensor_model_parallel_attributes(tensor, is_parallel=is_split, dim=dim if is_split else -1, stride=1)
        tensor.sequence_parallel = not is_split and groups.layout.tp > 1  # type: ignore[attr-defined]
        return
    # Tensor ranks hold different experts, or different shards of one: each counts.
    set_tensor_model_parallel_attributes(tensor, is_parallel=True, dim=dim, stride=1)
    tensor.allreduce = False  # type: ignore[attr-defined]  # but over the ranks that hold the same expert
    replicated = not is_split and groups.layout.etp > 1
    tensor.expert_replica = replicated  # type: ignore[attr-defined]
    tensor.shared = replicated and groups.coords.etp > 0  # type: ignore[attr-defined]  # not counted


def attach(chunks: Sequence[GPTModel], table: AdapterTable, groups: ProcessGroups) -> None:
    """Freeze the weights of ``chunks`` that ``table`` does not train, and give the adapted linears their adapters."""
    owners: dict[int, Any] = {
        id(parameter): module
        for chunk in chunks
        for module in chunk.modules()
        for parameter in module.parameters(recurse=False)
    }
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(table.canonical(name) is not None)
        if chunk.pre_process:
            # Recomputed layers have a gradient if their input has one (megatron/core/tensor_parallel/random.py).
            chunk.embedding.register_forward_hook(_require_grad)
    grouped = dict[Any, list[Adapter]]()
    for bound in bind(chunks, table.base, groups.rank):
        adapted = table.adapted.get(id(bound.local.rule))
        if adapted is None:
            continue
        linear = owners[id(bound.tensor)]
        adapter = Adapter(table, adapted, bound.local, groups)
        bound.tensor.adapter = adapter  # type: ignore[attr-defined]  # for ``weights/published.py``
        if not hasattr(linear, "weight"):  # Transformer Engine's grouped experts: weight0, weight1, ...
            grouped.setdefault(linear, []).append(adapter)
            continue
        linear.lora = adapter
        if bound.local.expert is not None:
            continue  # ``GroupedExperts`` adds them
        if not isinstance(linear, NormedRowParallelLinear):
            if hasattr(linear, "return_layernorm_output"):  # Transformer Engine fuses a norm with the linear behind it
                linear.return_layernorm_output = True
            linear.register_forward_hook(_add)
    for linear, adapters in grouped.items():
        linear.lora = torch.nn.ModuleList(adapters)
        linear.register_forward_hook(_add_grouped)


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within: ``chunks`` compute with the base alone; no rank exchanges anything for adapters."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_off = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_off = False


def _require_grad(module: torch.nn.Module, arguments: object, embeddings: Tensor) -> None:
    if torch.is_grad_enabled():
        embeddings.requires_grad_()


def _add(linear: Any, arguments: tuple[Tensor, ...], results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    x = arguments[0]
    output = results[0]
    if isinstance(output, tuple):  # Transformer Engine's norm and linear, without a bias: ((output, normed), None)
        (output, x), results = output, (output[0], *results[1:])
    elif len(results) == 3:  # with a bias: (output, bias, normed)
        x = results[2]
        results = results[:2]
    return linear.lora(x, output), *results[1:]


def _add_grouped(
    linear: Any, arguments: tuple[Tensor, Sequence[int]], results: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """arguments: rows of all experts of the rank, one expert after another, and the number of each."""
    rows = arguments[0]
    counts = torch.tensor(list(arguments[1]))
    return add_of_groups(list(linear.lora), Groups(counts, rows.device), rows, results[0]), *results[1:]


def add_of_groups(adapters: Sequence[Adapter], groups: Groups, rows: Tensor, output: Tensor) -> Tensor:
    """``output`` of linears, one a group of ``rows``, with the part of each one's adapters added to its rows."""
    if adapters[0].is_off:
        return output
    inner = grouped_linear(rows, groups, [adapter._a(rows.dtype) for adapter in adapters])
    added = grouped_linear(inner, groups, [adapter._b(rows.dtype) for adapter in adapters])
    return output + adapters[0].scale * added


@torch.no_grad()
def start(chunks: Sequence[torch.nn.Module], table: AdapterTable, rank: int, seed: int) -> None:
    """Write the values at the start into the adapters: A at random, by the seed and its name, and B zero."""
    for bound in bind(chunks, table, rank):
        if ".lora_B." in bound.local.name:
            bound.tensor.zero_()
        elif ".lora_A." in bound.local.name:
            _draw(bound, table, seed)


def _draw(bound: Bound, table: AdapterTable, seed: int) -> None:
    """Draws the whole A on the host, so that every layout takes its part of the same numbers."""
    rank, inputs = bound.local.rule.hf_shapes(table.model)[0]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{bound.local.hf_names[0]}".encode()))
    whole = torch.empty(rank, inputs)
    if table.lora.init is AdapterInit.gaussian:
        whole.normal_(0.0, 1 / rank, generator=generator)
    else:  # torch.nn.init.kaiming_uniform_(a=sqrt(5)), as torch.nn.Linear and PEFT
        bound_value = inputs**-0.5
        whole.uniform_(-bound_value, bound_value, generator=generator)
    for piece in table.pieces(bound.local):
        view_of(bound.tensor.detach(), piece.local_region).copy_(view_of(whole, TensorSlice(*piece.hf_region)))


@torch.no_grad()
def sum_expert_replicas(chunks: Sequence[DistributedDataParallel], groups: ProcessGroups) -> None:
    """Sum the gradients of adapter tensors that expert-tensor peers hold whole; after Megatron's own sums."""
    if groups.layout.etp == 1:
        return
    gradients = [
        parameter.main_grad
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if vars(parameter).get("expert_replica")
    ]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat, group=groups.etp)
    for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
