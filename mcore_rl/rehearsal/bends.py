"""What Megatron and torch ask of data, of other ranks or of an accelerator's kernels, and a rehearsal must answer.

Each ``Bend`` replaces one name while the room is open, and puts it back.  The project's own code runs as it is, but for
what a kernel of the accelerator does in one piece and PyTorch's CPU in several.

Numbers that data decide are set: experts are chosen evenly, but for ``imbalance`` times as many rows for this rank;
other ranks say what this rank says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mcore_rl.families.flops import visible_pairs
from mcore_rl.rehearsal.meter import DEVICE, DeviceMeter

if TYPE_CHECKING:
    from mcore_rl.config.algorithm import DistillConfig
    from mcore_rl.ground.types import TrainBatch
    from mcore_rl.training.distillation import DistillationStep, Teacher
    from mcore_rl.training.engine import Engine
    from mcore_rl.training.microbatch import Microbatch

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Bend:
    """One name that is replaced.  owner: its module or class.  why: what stops a rehearsal without it."""

    owner: Any
    name: str
    why: str
    replace: Replace


@contextmanager
def bent(bends: list[Bend]) -> Iterator[None]:
    """Within: the names are replaced."""
    with ExitStack() as stack:
        for bend in bends:
            real = getattr(bend.owner, bend.name)
            if bend.name in vars(bend.owner):
                stack.callback(setattr, bend.owner, bend.name, real)
            else:  # inherited
                stack.callback(delattr, bend.owner, bend.name)
            setattr(bend.owner, bend.name, bend.replace(real))
        yield


def bends_of(meter: DeviceMeter, *, accelerator: bool, imbalance: float) -> list[Bend]:
    """The bends of a rehearsal.  accelerator: with an accelerator's kernels.  imbalance: see ``rank.rehearse``."""
    from megatron.core.transformer.moe import token_dispatcher

    from mcore_rl.parallel import cpu
    from mcore_rl.training import distillation, engine, grouped_experts, vision

    bends = [
        Bend(cpu, "CPU", "Megatron's current device is the rehearsal's", lambda _: DEVICE),  # type: ignore[arg-type, return-value]
        Bend(torch.nn.Module, "to", "torch swaps fake parameters, which others hold", lambda real: _move_parameters),
        Bend(vision, "init_device", "a tower begins with random numbers", lambda real: lambda device: DEVICE),
        Bend(dist, "all_gather_object", "other ranks have no objects", lambda real: _gather_own(meter)),
        Bend(dist, "broadcast_object_list", "other ranks have no objects", lambda real: _broadcast_own(meter)),
        Bend(torch, "tensor", "a tensor made on the device would be real", lambda real: _made_on_host(real)),
        Bend(FakeTensor, "tolist", "reads number by number", lambda real: lambda self: meter.values(self)),
        Bend(engine, "run_schedule", "marks what runs once for each microbatch", lambda real: _marked(real, meter)),
        Bend(engine.Engine, "_logits_of", "there are no frozen weights", lambda real: _frozen_logits(meter)),
        Bend(
            distillation.Teacher,
            "for_step",
            "the data say which rows are trained, and by which teacher",
            lambda real: _taught(meter),
        ),
        Bend(
            token_dispatcher.MoEAlltoAllTokenDispatcher,
            "preprocess",
            "the router's choices decide how many rows go where",
            lambda real: _forced(real, meter, imbalance),
        ),
        Bend(
            token_dispatcher,
            "permute",
            "its masked_select gives as many rows as were chosen, which the caller knows",
            lambda real: _selecting(real, meter),
        ),
        Bend(
            grouped_experts.LocalDispatcher,
            "dispatch_postprocess",
            "the router's choices decide how many rows an expert has",
            _counted,
        ),
    ]
    return bends + (_kernels(meter) if accelerator else [])


def _move_parameters(self: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """``Module.to(device)``: new parameters with the marks of the old ones."""
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device != device:
                moved = torch.nn.Parameter(parameter.data.to(device), requires_grad=parameter.requires_grad)
                for mark, value in vars(parameter).items():
                    setattr(moved, mark, value)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    return self


def _made_on_host(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(real)
    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = real(data, *args, device=None if device == DEVICE else device, **kwargs)
        return made.to(DEVICE) if device == DEVICE else made

    return make


def _gather_own(meter: DeviceMeter) -> Callable[..., None]:
    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        meter.read("all_gather_object")
        objects[:] = [own] * len(objects)

    return gather


def _broadcast_own(meter: DeviceMeter) -> Callable[..., None]:
    def broadcast(objects: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
        meter.read("broadcast_object_list")
        objects[0] = {"": 1.0, **objects[0]}  # the engine's sums: the last stage says at least the loss

    return broadcast


def _marked(real: Callable[..., Any], meter: DeviceMeter) -> Callable[..., Any]:
    @functools.wraps(real)
    def run(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        settings = chunks[0].config
        finish = settings.finalize_model_grads_func

        def finish_once(*args: Any, **kwargs: Any) -> Any:
            meter.per_step = True
            return finish(*args, **kwargs)

        meter.per_step = False
        settings.finalize_model_grads_func = finish_once if finish is not None else None
        try:
            return real(chunks, *args, **kwargs)
        finally:
            settings.finalize_model_grads_func = finish
            meter.per_step = True

    return run


def _frozen_logits(meter: DeviceMeter) -> Callable[..., dict[int, Tensor]]:
    """Every row is trained.  The pass of the frozen weights is left out: it is one of scoring."""

    def logits_of(self: Engine, snapshot: str, batch: TrainBatch, microbatches: list[Microbatch]) -> dict[int, Tensor]:
        if not self.groups.is_last_stage:
            return {}
        columns = self.models[-1].output_layer.output_size_per_partition
        shapes = {each.index: (len(each.targets_N), columns) for each in microbatches}
        return {index: meter.host_tensor(shape, self.dtype) for index, shape in shapes.items()}

    return logits_of


def _taught(meter: DeviceMeter) -> Callable[..., DistillationStep]:
    """Every row is trained, and each teacher has as many."""

    def for_step(
        self: Teacher, batch: TrainBatch, microbatches: list[Microbatch], config: DistillConfig, device: torch.device
    ) -> DistillationStep:
        from mcore_rl.training.distillation import DistillationStep

        sizes = [len(each.targets_N) for each in microbatches]
        teachers = len(self.rows)
        places = [torch.arange(size) for size in sizes]
        counts = [[size * (n + 1) // teachers - size * n // teachers for n in range(teachers)] for size in sizes]
        hidden_MH = meter.host_tensor((max(sizes), self.rows[0].shape[1]), self.rows[0].dtype)
        rows = [each.to(device) for each in self.rows]
        return DistillationStep(self, config, rows, hidden_MH, places, places, counts)

    return for_step


def _forced(real: Callable[..., Any], meter: DeviceMeter, imbalance: float) -> Callable[..., Any]:
    @functools.wraps(real)
    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        real(self, routing_map)
        meter.read("numbers of rows, to the host")
        rows = routing_map.size(0) * self.config.moe_router_topk  # that this rank sends
        mine = round(rows * min(imbalance, self.ep_size) / self.ep_size)
        per_expert = _evenly(mine, self.num_local_experts)
        sources = self.ep_size * self.tp_size
        if sources > 1:
            rank = self.ep_group.rank()
            others = iter(_evenly(rows - mine, max(1, self.ep_size - 1)))
            self.input_splits = np.array([mine if each == rank else next(others) for each in range(self.ep_size)])
            self.output_splits = np.full(self.ep_size, mine)
            self.output_splits_tp = np.full(self.tp_size, mine * self.ep_size)
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = torch.tensor(per_expert).repeat(sources, 1)
        return torch.tensor(per_expert) * sources

    return preprocess


def _counted(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def dispatch_postprocess(self: Any, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, counts_E, probs = real(self, hidden_states, probs)
        return rows, torch.tensor(_evenly(len(rows), counts_E.numel())).to(DEVICE), probs

    return dispatch_postprocess


def _evenly(number: int, parts: int) -> list[int]:
    each, more = divmod(number, parts)
    return [each + (part < more) for part in range(parts)]


def _selecting(real: Callable[..., Any], meter: DeviceMeter) -> Callable[..., Any]:
    @functools.wraps(real)
    def permute(tokens: Tensor, routing_map: Tensor, *args: Any, num_out_tokens: int, **kwargs: Any) -> Any:
        meter.num_selected = num_out_tokens
        try:
            return real(tokens, routing_map, *args, num_out_tokens=num_out_tokens, **kwargs)
        finally:
            meter.num_selected = None

    return permute


# ---- kernels that an accelerator has in one piece ----


def _kernels(meter: DeviceMeter) -> list[Bend]:
    """What runs as one kernel on an accelerator: torch.compile's fusions, attention."""
    import torch.nn.functional as F
    from megatron.core.fusions import fused_bias_swiglu

    from mcore_rl.training import attention, attention_kernels, grouped_product, norm, rotation

    fusions = [
        Bend(owner, name, "torch.compile makes one kernel of it", _shaped_as(shape))
        for owner, name, shape in (
            (fused_bias_swiglu, "swiglu", _half),
            (fused_bias_swiglu, "bias_swiglu", _half),
            (fused_bias_swiglu, "weighted_swiglu", _half),
            (fused_bias_swiglu, "swiglu_back", _of_second),
            (fused_bias_swiglu, "bias_swiglu_back", _of_second),
            (fused_bias_swiglu, "weighted_swiglu_back", _of_both),
            (norm, "normed", _of_first),
            (norm, "normed_back", _norm_gradients),
            (rotation, "rotated", _of_first),
            (rotation, "rotated_back", _of_first),
        )
    ]
    attend = _Attention(meter)
    return [
        *fusions,
        Bend(norm, "compiles", "asks the device", lambda real: lambda x: True),
        Bend(attention, "varlen_can_run", "asks the device", lambda real: _has_varlen),
        Bend(grouped_product, "multiplies_groups", "asks the device", lambda real: _has_grouped),
        Bend(attention, "attend_varlen", "knows the lengths that its operations depend on", attend.lengths_known),
        Bend(attention_kernels, "varlen_attn", "runs on an accelerator only", lambda real: attend.packed),
        Bend(F, "scaled_dot_product_attention", "the CPU has other kernels", lambda real: attend.dense),
    ]


def _shaped_as(shape: Callable[..., Any]) -> Replace:
    return lambda real: shape


def _half(projected: Tensor, *_: Tensor) -> Tensor:
    """The product of a gated projection: half as wide."""
    return projected.new_empty((*projected.shape[:-1], projected.shape[-1] // 2))


def _of_first(x: Tensor, *_: Any) -> Tensor:
    """As large as what it is made of, and contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _of_second(grad: Tensor, projected: Tensor, *_: Tensor) -> Tensor:
    """The gradient of the projection."""
    return torch.empty_like(projected)


def _of_both(grad: Tensor, projected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the projection and of the weights of its rows."""
    return torch.empty_like(projected), torch.empty_like(weights)


def _norm_gradients(grad: Tensor, rows: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The gradients of a norm's input and of its weight."""
    return torch.empty_like(rows), torch.empty_like(weight)


def _has_varlen(query: Tensor, value: Tensor, packed: Any, window: int | None = None) -> bool:
    from mcore_rl.training.attention_kernels import _VARLEN_DTYPES, _VARLEN_HEAD_DIM_MULTIPLE, _VARLEN_MAX_HEAD_DIM

    width = query.shape[-1]
    fits = width % _VARLEN_HEAD_DIM_MULTIPLE == 0 and width <= _VARLEN_MAX_HEAD_DIM
    return query.dtype in _VARLEN_DTYPES and width == value.shape[-1] and fits


def _has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16


class _Attention:
    """Attention by one kernel, which keeps its inputs, its output and a float32 number for each head and row.

    Operations are those of the pairs that the causal mask and the window leave; backward has five products for
    forward's two (arXiv:2205.14135, appendix B).
    """

    def __init__(self, meter: DeviceMeter) -> None:
        self._pairs = 0
        attention = self

        class Attend(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
                out = query.new_empty((*query.shape[:-1], value.shape[-1]))
                ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
                ctx.operations = 2 * heads * attention._pairs * (query.shape[-1] + value.shape[-1])
                meter.compute(ctx.operations, "attention")
                return out

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
                query, key, value, _, _ = ctx.saved_tensors
                meter.compute(2.5 * ctx.operations, "attention backward")
                return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None

        self._function = Attend

    def lengths_known(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``attend_varlen`` that notes the pairs of its segments first."""

        @functools.wraps(real)
        def attend(query_T: Any, key_T: Any, value_T: Any, packed: Any, scale: float, window: int | None = None) -> Any:
            runs = zip(packed.segments.query_lengths, packed.segments.key_lengths, strict=True)
            self._pairs = sum(_visible_pairs(queries, keys, window) for queries, keys in runs)
            return real(query_T, key_T, value_T, packed, scale, window)

        return attend

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
    ) -> Tensor:
        """``varlen_attn`` of torch 2.13, which takes groups of heads: query [T, heads, d]."""
        return self._function.apply(query, key, value, query.shape[1])  # type: ignore[no-any-return, no-untyped-call]

    def dense(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """``F.scaled_dot_product_attention``: query [1, heads, q, d], causal with the last query at the last key.

        A vision tower's is [windows, heads, q, d], and each patch sees all of its window.
        """
        if kwargs.get("is_causal") or kwargs.get("attn_mask") is not None:
            self._pairs = _visible_pairs(query.shape[-2], key.shape[-2], None)
        else:
            self._pairs = query.shape[0] * query.shape[-2] * key.shape[-2]
        return self._function.apply(query, key, value, query.shape[1])  # type: ignore[no-any-return, no-untyped-call]


def _visible_pairs(queries: int, keys: int, window: int | None) -> int:
    """The pairs of the last ``queries`` of ``keys`` tokens with the keys that they see."""
    hidden = keys - queries
    return visible_pairs(keys, window) - (visible_pairs(hidden, window) if hidden else 0)
