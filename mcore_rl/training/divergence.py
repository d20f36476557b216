"""Divergences between a policy and a teacher over the whole vocabulary, from logits and the teacher's hidden states.

With p the policy's softmax and q the teacher's at one token, both at the sampling temperature, and beta in (0, 1):

    reverse_kl      KL(p || q) = sum p (log p - log q)
    forward_kl      KL(q || p) = sum q (log q - log p)
    jensen_shannon  (1 - beta) KL(p || m) + beta KL(q || m),  m = (1 - beta) p + beta q

The last is D_JSD(beta)(teacher || policy) of arXiv:2306.13649 (section 2), in the convention of TRL's
``GKDTrainer.generalized_jsd_loss``: with beta to 0 it is beta times the forward KL, with beta to 1, 1 - beta times
the reverse KL.  With z the policy's logits divided by the temperature:

    d KL(p || q) / dz = p (log p - log q - KL(p || q))
    d KL(q || p) / dz = p - q
    d JSD / dz        = (1 - beta) p (log p - log m - KL(p || m))

The teacher's logits are never whole: its last hidden states and its output rows of this rank's columns make them
``PRODUCT_ROWS`` tokens at a time, in forward and again in backward, and float32 copies are ``chunk_bytes`` large.
Columns of the teacher beyond the policy's vocabulary are left out: q is what it says of the tokens that the policy has.
Of several teachers each has output rows, and tokens, of its own; they are one pass with one gradient.

Vocabulary parallelism: each rank sums over its own columns, and two all-reduces of [M]-vectors join the sums, three for
``jensen_shannon``, which needs p and q themselves before it can mix them.  Backward communicates nothing.

All differences are taken column by column, so that equal logits have a divergence and a gradient of exactly 0.
``full_kl`` says in which order this and ``token_logprobs`` go over the same logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.config.algorithm import Divergence
from mcore_rl.training.logprobs import all_reduce, num_local_columns

PRODUCT_ROWS = 512  # so many tokens a product that reading the output rows takes less time than multiplying by them
_FLOAT_MAX = torch.finfo(torch.float32).max
# (slice of the M tokens, z, r): float32 copies of this rank's columns without padding.
Chunk = tuple[slice, Tensor, Tensor]


def divergence(
    logits_TV: Tensor,
    hidden_MH: Tensor,
    rows: Sequence[Tensor],
    places_M: Tensor,
    kind: Divergence,
    *,
    counts: Sequence[int] | None = None,
    vocab_size: int,
    chunk_bytes: int,
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The divergence ``kind`` between policy and teacher at the rows ``places_M`` of the logits, in nats.

    logits_TV: [T, V_local] of the policy, finite; rank r of ``group`` holds columns [r * V_local, (r + 1) * V_local).
    places_M: int64, each row at most once, the same on every rank.  hidden_MH: the teacher's last hidden states there.
    rows: [V, H] of each teacher, its output rows of this rank's columns below ``vocab_size``, in the dtype of
    ``hidden_MH``.  counts: how many of the M are each teacher's, one teacher after the other; None: there is one.
    beta: in (0, 1), for ``jensen_shannon``.  soft_cap, teacher_soft_cap: of each model's logits.  Other arguments as in
    ``token_logprobs``.

    Returns float32 [T], 0 at all other rows, the same on every rank, differentiable in ``logits_TV`` once, also with
    M = 0.  Wrong shapes are bugs of the caller: AssertionError.
    """
    num_columns = logits_TV.shape[1]
    num_valid = num_local_columns(vocab_size, num_columns, 0 if group is None else dist.get_rank(group))
    assert len(hidden_MH) == len(places_M), f"{len(hidden_MH)} hidden states for {len(places_M)} tokens"
    counts = (len(places_M),) if counts is None else tuple(counts)
    assert sum(counts) == len(places_M) and len(counts) == len(rows), f"{counts} tokens of {len(rows)} teachers"
    shapes = {tuple(rows_VH.shape) for rows_VH in rows}
    assert shapes == {(num_valid, hidden_MH.shape[1])}, f"{shapes} rows for {num_valid} columns"
    assert temperature > 0 and 0 < beta < 1 and kind is not Divergence.drawn
    settings = _Settings(
        kind,
        beta,
        num_valid,
        1.0 / temperature,
        soft_cap,
        teacher_soft_cap,
        group,
        teachers=tuple(zip(rows, counts, strict=True)),
        rows=max(1, round(chunk_bytes / (4 * num_columns))),
    )
    value_M: Tensor = _Divergence.apply(logits_TV, hidden_MH, places_M, settings)  # type: ignore[no-untyped-call]
    return value_M.new_zeros(len(logits_TV)).index_add(0, places_M, value_M)


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``divergence``.  num_valid: this rank's columns without padding.  rows: tokens of a chunk.

    teachers: the output rows of each, and how many of the tokens are its own.
    """

    kind: Divergence
    beta: float
    num_valid: int
    inverse_temperature: float
    soft_cap: float | None
    teacher_soft_cap: float | None
    group: dist.ProcessGroup | None
    teachers: tuple[tuple[Tensor, int], ...]
    rows: int


class _Divergence(torch.autograd.Function):
    """Per-token values are [M, 1] inside, so that they broadcast along the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, hidden_MH: Tensor, places_M: Tensor, settings: _Settings) -> Tensor:
        ctx.settings = settings
        tensors = (logits_TV, hidden_MH, places_M)
        log_sums, value_M1 = _normalisers(settings, *tensors)
        mean_M1 = value_M1
        if settings.kind is Divergence.jensen_shannon:
            to_mixture = _to_mixture(settings, log_sums, *tensors)
            mean_M1 = to_mixture[0]
            value_M1 = (1 - settings.beta) * mean_M1 + settings.beta * to_mixture[1]
        ctx.save_for_backward(*tensors, log_sums, mean_M1)
        return value_M1.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, log_sums, mean_M1 = ctx.saved_tensors
        settings, (logits_TV, _, places_M) = ctx.settings, tensors
        scale_M1 = grad_M.unsqueeze(1) * settings.inverse_temperature
        if settings.kind is Divergence.jensen_shannon:
            scale_M1 = scale_M1 * (1 - settings.beta)
        grad_TV = torch.zeros_like(logits_TV)
        for span, z_CV, r_CV in _chunks(settings, *tensors):
            slope_CV = cap_slope(z_CV, settings.soft_cap, settings.inverse_temperature)
            z_CV.sub_(log_sums[0, span])
            r_CV.sub_(log_sums[1, span])
            if settings.kind is Divergence.forward_kl:
                grad_CV = z_CV.exp_().sub_(r_CV.exp_())
            else:
                ratio_CV = r_CV.neg_().add_(z_CV)
                if settings.kind is Divergence.jensen_shannon:
                    ratio_CV = _over_mixture(ratio_CV, settings.beta)
                grad_CV = ratio_CV.sub_(mean_M1[span]).mul_(z_CV.exp_())
            grad_CV.mul_(scale_M1[span])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_TV[places_M[span], : settings.num_valid] = grad_CV.to(grad_TV.dtype)
        return grad_TV, None, None, None


def _normalisers(settings: _Settings, logits_TV: Tensor, hidden_MH: Tensor, places_M: Tensor) -> tuple[Tensor, Tensor]:
    """(log sum exp of both models' scaled logits, [2, M, 1]; the KL that ``settings.kind`` asks for, [M, 1])."""
    is_forward = settings.kind is Divergence.forward_kl
    chunks = _chunks(settings, logits_TV, hidden_MH, places_M)
    maxima, sums = joined_sums(chunks, len(places_M), logits_TV.device, settings.group, is_forward=is_forward)
    own, other = (1, 0) if is_forward else (0, 1)
    logs = sums[:2].log()
    return maxima + logs, sums[2] / sums[own] - logs[own] + logs[other]


def joined_sums(
    chunks: Iterable[Chunk],
    num_tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    is_forward: bool = False,
) -> tuple[Tensor, Tensor]:
    """(maxima of both models' scaled logits, [2, M, 1]; S, R and the sum below, [3, M, 1]), over the whole vocabulary.

    With S = sum exp(z), R = sum exp(r), z and r less their maxima: KL(p || q) = sum exp(z) (z - r) / S - log S + log R,
    and the other one (``is_forward``) with z and r exchanged.  Overwrites the chunks; a rank of padding alone has none.
    """
    maxima = torch.full((2, num_tokens, 1), -_FLOAT_MAX, dtype=torch.float32, device=device)
    sums = torch.zeros((3, num_tokens, 1), dtype=torch.float32, device=device)
    for span, z_CV, r_CV in chunks:
        for which, x_CV in enumerate((z_CV, r_CV)):
            torch.amax(x_CV, dim=1, keepdim=True, out=maxima[which, span])
            x_CV.sub_(maxima[which, span])
        own_CV, other_CV = (r_CV, z_CV) if is_forward else (z_CV, r_CV)
        exp_CV = own_CV.exp()
        torch.sum(exp_CV, dim=1, keepdim=True, out=sums[int(is_forward), span])
        torch.sum(exp_CV.mul_(own_CV.sub_(other_CV)), dim=1, keepdim=True, out=sums[2, span])
        torch.sum(other_CV.exp_(), dim=1, keepdim=True, out=sums[int(not is_forward), span])
    # From this rank's maxima m to the global ones, M: exp(z - M) = exp(z - m) exp(m - M), and z - r shifts too.
    moved = maxima.clone()
    all_reduce(maxima, dist.ReduceOp.MAX, group)
    moved.sub_(maxima)  # of a rank of padding alone so low that its exp is 0
    own, other = (1, 0) if is_forward else (0, 1)
    sums[2] += (moved[own] - moved[other]) * sums[own]
    sums *= torch.stack([moved[0], moved[1], moved[own]]).exp_()
    return maxima, all_reduce(sums, dist.ReduceOp.SUM, group)


def _to_mixture(
    settings: _Settings, log_sums: Tensor, logits_TV: Tensor, hidden_MH: Tensor, places_M: Tensor
) -> Tensor:
    """KL(p || m) and KL(q || m), [2, M, 1]."""
    sums = torch.zeros((2, len(places_M), 1), dtype=torch.float32, device=logits_TV.device)
    for span, z_CV, r_CV in _chunks(settings, logits_TV, hidden_MH, places_M):
        z_CV.sub_(log_sums[0, span])
        r_CV.sub_(log_sums[1, span])
        between_CV = z_CV - r_CV
        ratio_CV = _over_mixture(between_CV, settings.beta)
        torch.sum(z_CV.exp_().mul_(ratio_CV), dim=1, keepdim=True, out=sums[0, span])
        torch.sum(r_CV.exp_().mul_(ratio_CV.sub_(between_CV)), dim=1, keepdim=True, out=sums[1, span])
    return all_reduce(sums, dist.ReduceOp.SUM, settings.group)


def _over_mixture(between_CV: Tensor, beta: float) -> Tensor:
    """``log p - log m`` from d = ``log p - log q``: ``-log(1 - beta + beta exp(-d))``; no exponent is positive."""
    coefficient_CV = torch.where(between_CV >= 0, beta, 1 - beta)
    inside_CV = between_CV.abs().neg_().expm1_().mul_(coefficient_CV)
    return between_CV.clamp(max=0).sub_(inside_CV.log1p_())


def _chunks(settings: _Settings, logits_TV: Tensor, hidden_MH: Tensor, places_M: Tensor) -> Iterator[Chunk]:
    """A few tokens at a time; nothing if all of this rank's columns are padding."""
    if settings.num_valid == 0:
        return
    last = 0
    for rows_VH, count in settings.teachers:
        first = last
        last = last + count
        for block in range(first, last, PRODUCT_ROWS):
            teacher_BV = hidden_MH[block : min(block + PRODUCT_ROWS, last)] @ rows_VH.t()
            for start in range(0, len(teacher_BV), settings.rows):
                end = min(start + settings.rows, len(teacher_BV))
                span = slice(block + start, block + end)
                logits_CV = logits_TV[places_M[span], : settings.num_valid]
                z_CV = scaled(logits_CV, settings.soft_cap, settings.inverse_temperature)
                r_CV = scaled(teacher_BV[start:end], settings.teacher_soft_cap, settings.inverse_temperature)
                yield span, z_CV, r_CV


def scaled(logits_CV: Tensor, soft_cap: float | None, inverse_temperature: float) -> Tensor:
    """Float32 logits, capped, divided by the temperature; they may take the place of ``logits_CV``."""
    x_CV = logits_CV.float()
    if soft_cap is not None:
        x_CV.div_(soft_cap).tanh_().mul_(soft_cap)
    return x_CV.mul_(inverse_temperature)


def cap_slope(z_CV: Tensor, soft_cap: float | None, inverse_temperature: float) -> Tensor | None:
    """The derivative of the soft cap, from what ``scaled`` gave: ``1 - (capped / cap)^2``; None without a cap."""
    return None if soft_cap is None else z_CV.div(inverse_temperature * soft_cap).square_().neg_().add_(1.0)
