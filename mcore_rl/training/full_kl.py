"""The exact KL divergence from the policy to its reference at given tokens, from vocabulary-parallel logits of both.

With z = logits / temperature of the policy and r of the reference, each less its maximum over the vocabulary:

    S = sum exp(z)    R = sum exp(r)    D = sum exp(z) (z - r) / S
    KL(policy || reference) = D - log S + log R
    d KL / dz = p (z - r - D)

where p = exp(z) / S.  The differences z - r are taken column by column, so that two equal policies have a KL and a
gradient of exactly 0.  A soft cap is applied to both as ``token_logprobs`` does.  Each rank sums over its own columns;
two all-reduces of [M]-vectors join the sums, and backward communicates nothing.

The reference is the same model with other weights, which are not in place while the policy trains.  So its logits were
computed before and kept: in the model's dtype, at trained tokens only, in host memory, read a few tokens at a time.

With ``token_logprobs`` on the same logits, call ``full_kl`` second: autograd then runs its backward first, before
``token_logprobs`` overwrites the logits.  In the wrong order the version counter of the logits stops the run.
``full_kl`` allocates a gradient of its own: another [T, V_local].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_FLOAT_MAX = torch.finfo(torch.float32).max


def full_kl(
    logits_TV: Tensor,
    reference_MV: Tensor,
    mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_bytes: int,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """KL(softmax(logits / temperature) || softmax(reference / temperature)) at each token of ``mask_T``, in nats.

    logits_TV: [T, V_local] of the policy, finite; rank r of ``group`` holds columns [r * V_local, (r + 1) * V_local).
    mask_T: bool [T], the same on every rank.  reference_MV: logits of the reference at the M tokens of the mask, on any
    device; no gradient flows into them.  Other arguments as in ``token_logprobs``.

    Returns float32 [T], 0 outside of the mask, the same on every rank, differentiable in ``logits_TV`` once, also with
    M = 0.  Wrong shapes are bugs of the caller: AssertionError.  So is another number of rows than the mask has:
    RuntimeError, on an accelerator when the device comes to it.
    """
    assert reference_MV.shape[1] == logits_TV.shape[1], (
        f"{tuple(reference_MV.shape)} logits of the reference for {tuple(logits_TV.shape)}"
    )
    # The reference says how many rows there are: the host need not wait for the device to count them.
    torch._assert_async(mask_T.sum() == len(reference_MV), "the reference has logits of other rows than the mask")
    rows_M = torch.nonzero_static(mask_T, size=len(reference_MV)).squeeze(1)
    assert temperature > 0 and (soft_cap is None or soft_cap > 0)
    num_columns = logits_TV.shape[1]
    first_column = 0 if group is None else dist.get_rank(group) * num_columns
    num_valid = min(max(vocab_size - first_column, 0), num_columns)
    rows = max(1, round(chunk_bytes / (4 * num_columns)))
    kl_M: Tensor = _FullKl.apply(  # type: ignore[no-untyped-call]  # torch's own
        logits_TV, reference_MV, rows_M, num_valid, 1.0 / temperature, soft_cap, group, rows
    )
    return kl_M.new_zeros(len(mask_T)).index_add(0, rows_M, kl_M)


class _FullKl(torch.autograd.Function):
    """Per-token values are [M, 1] inside, so that they broadcast along the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        reference_MV: Tensor,
        rows_M: Tensor,
        num_valid: int,
        inverse_temperature: float,
        soft_cap: float | None,
        group: dist.ProcessGroup | None,
        rows: int,
    ) -> Tensor:
        ctx.num_valid, ctx.inverse_temperature, ctx.soft_cap, ctx.rows = num_valid, inverse_temperature, soft_cap, rows
        maxima = logits_TV.new_full((2, len(rows_M), 1), -_FLOAT_MAX, dtype=torch.float32)
        sums = torch.zeros((3, len(rows_M), 1), dtype=torch.float32, device=logits_TV.device)
        for span, z_CV, r_CV in _chunks(ctx, logits_TV, reference_MV, rows_M):
            torch.amax(z_CV, dim=1, keepdim=True, out=maxima[0, span])
            torch.amax(r_CV, dim=1, keepdim=True, out=maxima[1, span])
            z_CV.sub_(maxima[0, span])
            r_CV.sub_(maxima[1, span])
            exp_CV = z_CV.exp()
            torch.sum(exp_CV, dim=1, keepdim=True, out=sums[0, span])
            torch.sum(exp_CV.mul_(z_CV.sub_(r_CV)), dim=1, keepdim=True, out=sums[2, span])
            torch.sum(r_CV.exp_(), dim=1, keepdim=True, out=sums[1, span])
        # From this rank's maxima m to the global ones, M: exp(z - M) = exp(z - m) exp(m - M), and z - r shifts too.
        moved = maxima.clone()
        if group is not None and len(rows_M):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        moved.sub_(maxima)  # of a rank of padding alone so low that its exp is 0
        sums[2] += (moved[0] - moved[1]) * sums[0]
        sums *= torch.stack([moved[0], moved[1], moved[0]]).exp_()
        if group is not None and len(rows_M):
            dist.all_reduce(sums, group=group)
        mean_M1 = sums[2] / sums[0]
        ctx.save_for_backward(logits_TV, reference_MV, rows_M, maxima, sums[0], mean_M1)
        return (mean_M1 - sums[0].log() + sums[1].log()).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, reference_MV, rows_M, maxima, sum_M1, mean_M1 = ctx.saved_tensors
        scale_M1 = grad_M.unsqueeze(1) * ctx.inverse_temperature / sum_M1
        grad_TV = torch.zeros_like(logits_TV)
        for span, z_CV, r_CV in _chunks(ctx, logits_TV, reference_MV, rows_M):
            slope_CV = None if ctx.soft_cap is None else _cap_slope(z_CV, ctx)
            z_CV.sub_(maxima[0, span])
            r_CV.sub_(maxima[1, span])
            grad_CV = torch.sub(z_CV, r_CV).sub_(mean_M1[span]).mul_(z_CV.exp_()).mul_(scale_M1[span])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_TV[rows_M[span], : ctx.num_valid] = grad_CV.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None, None, None


def _chunks(
    ctx: Any, logits_TV: Tensor, reference_MV: Tensor, rows_M: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(slice of the M tokens, z, r) a few tokens at a time; z and r are float32 copies without padding columns.

    Yields nothing if all of this rank's columns are padding.
    """
    if ctx.num_valid == 0:
        return
    for start in range(0, len(rows_M), ctx.rows):
        span = slice(start, start + ctx.rows)
        z_CV = logits_TV[rows_M[span], : ctx.num_valid].float()
        r_CV = reference_MV[span, : ctx.num_valid].to(z_CV.device, torch.float32, copy=True)
        for x_CV in (z_CV, r_CV):
            if ctx.soft_cap is not None:
                x_CV.div_(ctx.soft_cap).tanh_().mul_(ctx.soft_cap)
            x_CV.mul_(ctx.inverse_temperature)
        yield span, z_CV, r_CV


def _cap_slope(z_CV: Tensor, ctx: Any) -> Tensor:
    """The derivative of the soft cap, from its output: ``1 - (capped / cap)^2``."""
    return z_CV.div(ctx.inverse_temperature * ctx.soft_cap).square_().neg_().add_(1.0)
