"""Log-probabilities and entropies of tokens from vocabulary-parallel logits, without a float32 copy of the logits.

The plain path, ``log_softmax(logits.float(), -1)`` under autograd, keeps several float32 [T, V] tensors alive: at
V=152,064 and 4,096 tokens, 2.5 GB each.  Here forward reads the logits once, a few tokens at a time, into a scratch
buffer that stays in the cache; backward reads them again and writes the gradient over them:

    z = logits / temperature - max          S = sum exp(z)          E = sum z exp(z) / S
    log p(target) = z[target] - log S       H = log S - E
    d log p / dz = onehot - p               dH / dz = -p (log p + H) = -p (z - E)

With a soft cap (Gemma 2), c = cap tanh(x / cap) takes the place of the logits x above, before the temperature.  It is
never stored: both passes compute it, and backward multiplies by dc / dx = 1 - (c / cap)^2.

Tensor parallelism (the vocabulary-parallel cross entropy of arXiv:1909.08053, section 3, with the entropy added): each
rank sums over its own columns and two all-reduces of [T]-vectors join the sums.  Backward communicates nothing.

The caller shifts targets against logits, masks, and reduces over tokens.

On an accelerator both passes are kernels (``logits_kernels``), which need no scratch buffer and no chunks.

Invariant: temporaries are at most ``chunk_bytes`` rounded to whole tokens, and a few [T]-vectors.

Why backward may overwrite the logits (Megatron-core 0.16.1 does so to its float32 softmax,
tensor_parallel/cross_entropy.py): a Linear's backward needs its input and its weight, never its output, so nothing
reads the logits again.  If something does (a tanh saves its output, a second loss saves the same logits), autograd's
version counter catches it: the write goes through ``detach()``, which shares the counter with the logits and all their
views, so a later reader stops with "modified by an inplace operation" instead of using wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.device_details import is_accelerators

_HAVE_TRITON = find_spec("triton") is not None
_UNDERFLOW = -128.0  # exp of it is exactly 0 in float32, and 0 * -128 is 0 where 0 * -inf would be no number
_FLOAT_MAX = torch.finfo(torch.float32).max


def token_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    vocab_size: int,
    chunk_bytes: int,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    with_entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    skips_untrained: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(logits / temperature)[target]`` and the entropy of that softmax, per token, in nats.

    logits_TV: [T, V_local], any float dtype, contiguous, the output of an operation such as a Linear; rank r of
    ``group`` holds columns [r * V_local, (r + 1) * V_local).  **Backward writes the gradient into its storage**: do not
    read the logits after it.  Pass all rows of the projection: the backward of a slice of rows copies [T, V].
    targets_T: [T] int64 in [0, vocab_size), the same on every rank.
    vocab_size: the true vocabulary; columns at or past it are padding, outside the softmax, with zero gradient.
    chunk_bytes: size of each of the two float32 scratch buffers (three with a soft cap), rounded to whole tokens, at
    least one.  It changes only the speed; take ``cache_sized_chunk_bytes(platform)``.
    temperature: positive; divides the logits.  soft_cap: positive; ``soft_cap * tanh(logits / soft_cap)`` takes the
    place of the logits before that, as in transformers and vLLM.
    with_entropy: False saves work and returns None for the entropy.
    group: the tensor-parallel group, None for whole logits.  Its ranks must pass the same T.
    skips_untrained: backward leaves out chunks without an upstream gradient (prompts).  The host reads which they are,
    so on an accelerator, where it would wait, leave it off: the kernels there skip such tokens anyway.

    Returns float32 [T] log-probabilities and float32 [T] entropies or None, the same on every rank, differentiable in
    ``logits_TV`` once.  Backward leaves out an entropy that the loss does not use.  T = 0 gives empty tensors that are
    connected to the graph.

    Wrong shapes or a second backward through the same graph are bugs of the caller: AssertionError.  So are wrong
    targets: RuntimeError, on an accelerator when the device comes to it.
    """
    assert logits_TV.dim() == 2, f"logits are [T, V_local], not {tuple(logits_TV.shape)}"
    assert logits_TV.is_contiguous(), "logits are contiguous: a copy would cost what this module saves"
    assert targets_T.shape == logits_TV.shape[:1], f"{tuple(targets_T.shape)} targets for {logits_TV.shape[0]} tokens"
    assert targets_T.dtype == torch.int64, f"targets are int64, not {targets_T.dtype}"
    assert temperature > 0, f"temperature={temperature} must be positive"
    assert soft_cap is None or soft_cap > 0, f"soft_cap={soft_cap} must be positive"
    assert chunk_bytes > 0, f"chunk_bytes={chunk_bytes} must be positive"
    in_vocabulary = ((targets_T >= 0) & (targets_T < vocab_size)).all()
    torch._assert_async(in_vocabulary, f"targets must lie in [0, {vocab_size})")
    if torch.is_grad_enabled() and logits_TV.requires_grad:
        assert not logits_TV.is_leaf, "backward would overwrite the values of a leaf; pass the output of an operation"
    rows = max(1, round(chunk_bytes / (4 * logits_TV.shape[1])))
    outputs: tuple[Tensor, Tensor | None] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's own
        logits_TV, targets_T, vocab_size, 1.0 / temperature, soft_cap, with_entropy, group, rows, skips_untrained
    )
    return outputs


def cache_sized_chunk_bytes(platform: Platform) -> int:
    """The ``chunk_bytes`` for which the passes over a chunk stay in the cache (benchmarks/logprobs.py --sweep).

    CPU: both buffers in the L2 of each thread's core; 10 MiB were 1.5 times slower, 37 MiB 3 times.  GPU: for what has
    no kernel of its own; both in an L2 of 50 MiB or nearly, with operations still longer than their launch.
    """
    return 32 * 2**20 if platform.is_accelerator else 512 * 2**10 * torch.get_num_threads()


class _TokenLogprobs(torch.autograd.Function):
    """Per-token values are [T, 1] inside, so that they broadcast along the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        vocab_size: int,
        inverse_temperature: float,
        soft_cap: float | None,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        rows: int,
        skips_untrained: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_columns = logits_TV.shape[1]
        rank = 0 if group is None else dist.get_rank(group)
        num_valid = num_local_columns(vocab_size, num_columns, rank)
        local_T1 = targets_T.unsqueeze(1) - rank * num_columns
        owned_T1 = (local_T1 >= 0) & (local_T1 < num_valid)
        local_T1 = local_T1.masked_fill(~owned_T1, 0)

        max_T1, sum_T1, weighted_T1 = _local_sums(
            logits_TV[:, :num_valid], inverse_temperature, soft_cap, with_entropy, rows
        )
        global_max_T1 = all_reduce(max_T1.clone(), dist.ReduceOp.MAX, group)
        target_T1 = logits_TV.gather(1, local_T1).float()
        if soft_cap is not None:
            _cap(target_T1, soft_cap, out=target_T1)
        target_z_T1 = torch.add(-global_max_T1, target_T1, alpha=inverse_temperature)
        target_z_T1 = target_z_T1.masked_fill(~owned_T1, 0.0)
        # exp(z - M) = exp(z - m) exp(m - M), and the z inside E moves by m - M too
        moved_T1 = (max_T1 - global_max_T1).clamp_(min=_UNDERFLOW)
        scale_T1 = moved_T1.exp()
        parts = [sum_T1 * scale_T1, target_z_T1]
        if with_entropy:
            parts.append((weighted_T1 + moved_T1 * sum_T1) * scale_T1)
        sums = all_reduce(torch.stack(parts), dist.ReduceOp.SUM, group)
        sum_T1 = sums[0]
        target_z_T1 = sums[1]
        mean_T1 = sums[2] / sum_T1 if with_entropy else None
        log_sum_T1 = sum_T1.log()

        ctx.set_materialize_grads(False)  # an output that the loss left out must arrive as None, not as zeros
        ctx.save_for_backward(logits_TV, local_T1, owned_T1, global_max_T1, sum_T1, mean_T1, target_z_T1)
        ctx.num_valid = num_valid
        ctx.inverse_temperature = inverse_temperature
        ctx.soft_cap = soft_cap
        ctx.rows = rows
        ctx.skips_untrained = skips_untrained
        ctx.overwritten = False
        entropy_T = None if mean_T1 is None else (log_sum_T1 - mean_T1).squeeze(1)
        return (target_z_T1 - log_sum_T1).squeeze(1), entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        assert not ctx.overwritten, (
            "second backward through token_logprobs: the first one overwrote the logits with their gradient; "
            "call token_logprobs again on fresh logits instead of retain_graph=True"
        )
        ctx.overwritten = True
        saved_TV, local_T1, owned_T1, max_T1, sum_T1, mean_T1, target_z_T1 = ctx.saved_tensors
        grad_TV = saved_TV.detach()  # shares storage and version counter; see the docstring of the module
        # dlogits = exp(z) (offset + slope z) + g_lp onehot, all of it already divided by the temperature
        chosen_T1 = _column(grad_logprobs_T, sum_T1) * ctx.inverse_temperature
        if grad_entropy_T is None:
            slope_T1 = None
            offset_T1 = -chosen_T1 / sum_T1
        else:
            slope_T1 = _column(grad_entropy_T, sum_T1) * (-ctx.inverse_temperature) / sum_T1
            offset_T1 = -chosen_T1 / sum_T1 - slope_T1 * mean_T1

        # The target's own column in closed form, for all tokens at once: adding it chunk by chunk costs many small
        # operations and would round twice in bfloat16.  A rank that does not own it leaves its value.
        finite_z_T1 = target_z_T1.clamp(min=_UNDERFLOW)
        target_grad_T1 = offset_T1 if slope_T1 is None else offset_T1 + slope_T1 * finite_z_T1
        target_grad_T1 = chosen_T1 + finite_z_T1.exp() * target_grad_T1
        if ctx.soft_cap is not None:
            target_grad_T1 *= _cap_slope(saved_TV.gather(1, local_T1).float(), ctx.soft_cap)
        is_trained_T = None
        if ctx.skips_untrained:  # one small transfer tells the host which tokens have a gradient at all
            is_trained_T1 = offset_T1 != 0 if slope_T1 is None else (offset_T1 != 0) | (slope_T1 != 0)
            is_trained_T = is_trained_T1.squeeze(1).tolist()
        _overwrite_with_gradient(
            grad_TV[:, : ctx.num_valid],
            max_T1,
            offset_T1,
            slope_T1,
            is_trained_T,
            ctx.inverse_temperature,
            ctx.soft_cap,
            ctx.rows,
        )
        grad_TV[:, ctx.num_valid :].zero_()
        # not scatter_: for bfloat16 on a CPU it works on a float32 copy of the whole tensor (torch 2.13)
        places = (torch.arange(grad_TV.shape[0], device=grad_TV.device).unsqueeze(1), local_T1)
        grad_TV[places] = torch.where(owned_T1, target_grad_T1.to(grad_TV.dtype), grad_TV[places])
        return grad_TV, None, None, None, None, None, None, None, None


def _local_sums(
    logits_TV: Tensor, inverse_temperature: float, soft_cap: float | None, with_entropy: bool, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, sum of exp(z - m), sum of (z - m) exp(z - m)) of this rank's valid columns, each [T, 1] float32.

    z = logits (capped, with a soft cap) / temperature and m is its maximum; the third is zeros without entropy.
    """
    if _has_kernels(logits_TV):
        from mcore_rl.training import logits_kernels  # Triton is only where accelerators are

        return logits_kernels.local_sums(logits_TV, inverse_temperature, soft_cap, with_entropy)
    num_tokens, num_columns = logits_TV.shape
    shift_T1 = logits_TV.new_full((num_tokens, 1), _FLOAT_MAX, dtype=torch.float32)  # -m; no columns: m = -max
    sum_T1 = torch.zeros_like(shift_T1)
    weighted_T1 = torch.zeros_like(shift_T1)
    if num_columns == 0:  # all of this rank's columns are padding
        return -shift_T1, sum_T1, weighted_T1
    scratch_CV = logits_TV.new_empty((2, min(rows, num_tokens), num_columns), dtype=torch.float32)
    for span in _spans(num_tokens, rows):
        chunk_CV = logits_TV[span]
        shift_C1 = shift_T1[span]
        z_CV, exp_CV = scratch_CV[:, : chunk_CV.shape[0]]
        source_CV = _as_float32(chunk_CV, z_CV) if soft_cap is None else _cap(chunk_CV, soft_cap, out=z_CV)
        torch.amax(source_CV, dim=1, keepdim=True, out=shift_C1)
        shift_C1.mul_(-inverse_temperature).clamp_(max=_FLOAT_MAX)  # a row of -inf alone must not give inf - inf
        torch.add(shift_C1, source_CV, alpha=inverse_temperature, out=z_CV)
        if not with_entropy:
            torch.sum(z_CV.exp_(), dim=1, keepdim=True, out=sum_T1[span])
            continue
        torch.exp(z_CV.clamp_(min=_UNDERFLOW), out=exp_CV)
        torch.sum(exp_CV, dim=1, keepdim=True, out=sum_T1[span])
        torch.sum(z_CV.mul_(exp_CV), dim=1, keepdim=True, out=weighted_T1[span])
    return -shift_T1, sum_T1, weighted_T1


def _overwrite_with_gradient(
    logits_TV: Tensor,
    max_T1: Tensor,
    offset_T1: Tensor,
    slope_T1: Tensor | None,
    is_trained_T: list[bool] | None,
    inverse_temperature: float,
    soft_cap: float | None,
    rows: int,
) -> None:
    """Replace logits by ``exp(z) (offset + slope z)``, z = logits / temperature - max; ``slope_T1`` None means zero.

    With a soft cap z is of capped logits, and the result is multiplied by the cap's slope.  is_trained_T: tokens whose
    offset or slope is not zero, None for all.
    """
    if _has_kernels(logits_TV):
        from mcore_rl.training import logits_kernels

        return logits_kernels.overwrite_with_gradient(
            logits_TV, max_T1, offset_T1, slope_T1, inverse_temperature, soft_cap
        )
    num_tokens, num_columns = logits_TV.shape
    if num_columns == 0:
        return
    num_buffers = 2 if soft_cap is None else 3
    scratch_CV = logits_TV.new_empty((num_buffers, min(rows, num_tokens), num_columns), dtype=torch.float32)
    shift_T1 = -max_T1
    for span in _spans(num_tokens, rows):
        chunk_CV = logits_TV[span]
        if is_trained_T is not None and not any(is_trained_T[span]):
            chunk_CV.zero_()
            continue
        z_CV, exp_CV, *cap_CV = scratch_CV[:, : chunk_CV.shape[0]]
        source_CV = _as_float32(chunk_CV, z_CV) if soft_cap is None else _cap(chunk_CV, soft_cap, out=cap_CV[0])
        torch.add(shift_T1[span], source_CV, alpha=inverse_temperature, out=z_CV)
        target_CV = chunk_CV if chunk_CV.dtype == torch.float32 else z_CV
        if slope_T1 is None:
            torch.mul(z_CV.exp_(), offset_T1[span], out=target_CV)
        else:
            torch.exp(z_CV.clamp_(min=_UNDERFLOW), out=exp_CV)
            torch.mul(z_CV.mul_(slope_T1[span]).add_(offset_T1[span]), exp_CV, out=target_CV)
        if soft_cap is not None:
            target_CV.mul_(cap_CV[0].div_(soft_cap).square_().neg_().add_(1.0))
        if target_CV is not chunk_CV:
            chunk_CV.copy_(target_CV)


def _has_kernels(logits_TV: Tensor) -> bool:
    """Whether ``logits_kernels`` can run: on real numbers of an accelerator, with Triton, which some builds lack."""
    return _HAVE_TRITON and is_accelerators(logits_TV)


def _spans(num_tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, num_tokens, rows))


def _as_float32(chunk_CV: Tensor, scratch_CV: Tensor) -> Tensor:
    """The chunk itself if it is float32, else its copy in ``scratch_CV``.

    Never leave the conversion to type promotion: on a CPU that allocates a temporary for every operation.
    """
    return chunk_CV if chunk_CV.dtype == torch.float32 else scratch_CV.copy_(chunk_CV)


def _cap(logits: Tensor, soft_cap: float, out: Tensor) -> Tensor:
    """``soft_cap * tanh(logits / soft_cap)`` into ``out``, which is float32 and may be ``logits`` itself."""
    return out.copy_(logits).div_(soft_cap).tanh_().mul_(soft_cap)


def _cap_slope(logits: Tensor, soft_cap: float) -> Tensor:
    """The derivative of ``_cap``."""
    return 1.0 - (logits / soft_cap).tanh_().square_()


def _column(grad_T: Tensor | None, like_T1: Tensor) -> Tensor:
    return torch.zeros_like(like_T1) if grad_T is None else grad_T.unsqueeze(1)


def num_local_columns(vocab_size: int, num_columns: int, rank: int) -> int:
    """How many of the ``num_columns`` columns of tensor rank ``rank`` are tokens; the rest is padding."""
    return min(max(vocab_size - rank * num_columns, 0), num_columns)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    """``tensor``, joined over the ranks of ``group`` in place; as it is without a group or without numbers."""
    if group is not None and tensor.numel() > 0:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor
