"""Products of groups of rows with one matrix each, which experts are made of: all in one kernel, or one after another.

``torch._grouped_mm`` (torch 2.11 and 2.13: aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupedMMUtils.h) reads where a
group ends on the device, so that the host never waits to learn it.  It is used where it is one kernel; elsewhere it
would read the ends back itself and multiply group by group, and ``Groups.counts`` does that once for all products.

Matrices are stacked where they are used, and once more in backward: a stack that lived until backward would be a second
copy of a layer's experts.  Invariant: on the CPU equal to the loop bit for bit, with all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mcore_rl.parallel.device import multiplies_groups

_ALIGNED_BYTES = 16  # of every stride (check_valid_strides_and_return_transposed)
_MOST_GROUPS = 1023  # GroupMM.cu: one thread each
_HOST = torch.device("cpu")  # without an index, which a rehearsed device has
_ONES = 8  # columns of ones, so that their stride is aligned


class Groups:
    """Rows of one group after another.  counts_E: how many each has, integers, on the host or on ``device``."""

    def __init__(self, counts_E: Tensor, device: torch.device) -> None:
        self._counts_E = counts_E
        self._device = device

    @cached_property
    def _on_device_E(self) -> Tensor:
        return self._counts_E.to(self._device, non_blocking=True)

    @cached_property
    def ends_E(self) -> Tensor:
        """Where each group ends, int32 on the device."""
        return self._on_device_E.cumsum(0).to(torch.int32)

    @cached_property
    def is_empty_E11(self) -> Tensor:
        """Which groups have no rows, bool on the device, to be spread over their matrices."""
        return (self._on_device_E == 0)[:, None, None]

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each group.  The host waits for the device if they are there."""
        return [int(count) for count in self._counts_E.tolist()]

    @property
    def on_host(self) -> bool:
        """Whether ``counts`` makes nobody wait."""
        return self._counts_E.device == _HOST

    def split(self, rows_T: Tensor) -> Sequence[Tensor]:
        """``rows_T`` group by group.  Of one group they are all, and nothing is read."""
        return (rows_T,) if self._counts_E.numel() == 1 else rows_T.split(self.counts)


def one_kernel(rows_T: Tensor, num_groups: int, widths: Sequence[int]) -> bool:
    """Whether one kernel makes each of the products that ``widths`` are sides of, forward and backward."""
    return (
        1 < num_groups <= _MOST_GROUPS
        and rows_T.shape[0] > 0
        and all(width * rows_T.element_size() % _ALIGNED_BYTES == 0 for width in widths)
        and multiplies_groups(rows_T.device, rows_T.dtype)
    )


def grouped_linear(rows_TI: Tensor, groups: Groups, matrices_OI: Sequence[Tensor]) -> Tensor:
    """[T, O]: every row times the transposed matrix of its group, as ``F.linear``.

    Gradients of the matrices come one by one, as those of separate products would: zeros where a group has no rows.
    """
    product = _OneKernel if one_kernel(rows_TI, len(matrices_OI), matrices_OI[0].shape) else _OneByOne
    out: Tensor = product.apply(rows_TI, groups, *matrices_OI)  # type: ignore[no-untyped-call]
    return out


def of_each_row(groups: Groups, num_rows: int, vectors_O: Sequence[Tensor], weights_T1: Tensor | None = None) -> Tensor:
    """[T, O]: the vector of each row's group, a bias to add, times the row's weight; of ``num_rows`` rows."""
    out: Tensor = _OfEachRow.apply(groups, num_rows, weights_T1, *vectors_O)  # type: ignore[no-untyped-call]
    return out


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TI: Tensor, groups: Groups, *matrices_OI: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(rows_TI, *matrices_OI)
        return torch._grouped_mm(rows_TI, torch.stack(matrices_OI).mT, offs=groups.ends_E)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_TI, *matrices_OI = ctx.saved_tensors
        groups: Groups = ctx.groups
        grad_TO = grad_TO.contiguous()
        of_rows: Tensor | None = None
        of_matrices: Sequence[Tensor | None] = [None] * len(matrices_OI)
        if ctx.needs_input_grad[0]:
            of_rows = torch._grouped_mm(grad_TO, torch.stack(matrices_OI), offs=groups.ends_E)
        if ctx.needs_input_grad[2]:
            of_matrices = _summed_outer(grad_TO, rows_TI, groups).unbind()
        return of_rows, None, *of_matrices


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TI: Tensor, groups: Groups, *matrices_OI: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(rows_TI, *matrices_OI)
        parts = zip(groups.split(rows_TI), matrices_OI, strict=True)
        return _joined([part.matmul(matrix.t()) for part, matrix in parts])

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_TI, *matrices_OI = ctx.saved_tensors
        grads = ctx.groups.split(grad_TO)
        of_rows: Tensor | None = None
        of_matrices: Sequence[Tensor | None] = [None] * len(matrices_OI)
        if ctx.needs_input_grad[0]:
            of_rows = _joined([grad.matmul(matrix) for grad, matrix in zip(grads, matrices_OI, strict=True)])
        if ctx.needs_input_grad[2]:
            parts = zip(grads, ctx.groups.split(rows_TI), strict=True)
            of_matrices = [grad.t().matmul(part) for grad, part in parts]
        return of_rows, None, *of_matrices


class _OfEachRow(torch.autograd.Function):
    """Keeps no row for backward: they are as large as what the experts return."""

    @staticmethod
    def forward(ctx: Any, groups: Groups, num_rows: int, weights_T1: Tensor | None, *vectors_O: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(weights_T1, *vectors_O)
        rows_TO = _spread(groups, num_rows, vectors_O)
        return rows_TO if weights_T1 is None else rows_TO * weights_T1

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights_T1, *vectors_O = ctx.saved_tensors
        groups: Groups = ctx.groups
        of_weights = None
        if weights_T1 is not None:
            rows_TO = _spread(groups, grad_TO.shape[0], vectors_O)
            of_weights = (grad_TO * rows_TO).sum(-1, keepdim=True).to(weights_T1.dtype)
            grad_TO = (grad_TO * weights_T1).to(rows_TO.dtype)
        if groups.on_host or not one_kernel(grad_TO, len(vectors_O), (grad_TO.shape[1], _ONES)):
            return None, None, of_weights, *(part.sum(0) for part in groups.split(grad_TO))
        ones_TI = grad_TO.new_ones(grad_TO.shape[0], _ONES)
        of_vectors = _summed_outer(grad_TO.contiguous(), ones_TI, groups)[:, :, 0]
        return None, None, of_weights, *of_vectors.unbind()


def _spread(groups: Groups, num_rows: int, vectors_O: Sequence[Tensor]) -> Tensor:
    """[T, O]: the vector of each row's group."""
    places_T = torch.arange(num_rows, device=vectors_O[0].device, dtype=torch.int32)
    return torch.stack(tuple(vectors_O))[torch.searchsorted(groups.ends_E, places_T, right=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _summed_outer(left_TO: Tensor, right_TI: Tensor, groups: Groups) -> Tensor:
    """[E, O, I]: the outer products of the rows of each group, summed.

    Where a group has no rows torch's kernel leaves what was in memory (Blackwell: pytorch issue 172439).
    """
    return torch._grouped_mm(left_TO.t(), right_TI, offs=groups.ends_E).masked_fill_(groups.is_empty_E11, 0)
