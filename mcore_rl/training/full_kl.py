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

from mcore_rl.training.divergence import Chunk, cap_slope, joined_sums, scaled
from mcore_rl.training.logprobs import num_local_columns


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
    num_valid = num_local_columns(vocab_size, num_columns, 0 if group is None else dist.get_rank(group))
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
        ctx.num_valid = num_valid
        ctx.inverse_temperature = inverse_temperature
        ctx.soft_cap = soft_cap
        ctx.rows = rows
        chunks = _chunks(ctx, logits_TV, reference_MV, rows_M)
        maxima, sums = joined_sums(chunks, len(rows_M), logits_TV.device, group)
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
            slope_CV = cap_slope(z_CV, ctx.soft_cap, ctx.inverse_temperature)
            z_CV.sub_(maxima[0, span])
            r_CV.sub_(maxima[1, span])
            grad_CV = torch.sub(z_CV, r_CV).sub_(mean_M1[span]).mul_(z_CV.exp_()).mul_(scale_M1[span])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_TV[rows_M[span], : ctx.num_valid] = grad_CV.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None, None, None


def _chunks(ctx: Any, logits_TV: Tensor, reference_MV: Tensor, rows_M: Tensor) -> Iterator[Chunk]:
    """A few tokens at a time; nothing if all of this rank's columns are padding."""
    if ctx.num_valid == 0:
        return
    for start in range(0, len(rows_M), ctx.rows):
        span = slice(start, start + ctx.rows)
        reference_CV = reference_MV[span, : ctx.num_valid].to(logits_TV.device, torch.float32, copy=True)
        z_CV = scaled(logits_TV[rows_M[span], : ctx.num_valid], ctx.soft_cap, ctx.inverse_temperature)
        r_CV = scaled(reference_CV, ctx.soft_cap, ctx.inverse_temperature)
        yield span, z_CV, r_CV
