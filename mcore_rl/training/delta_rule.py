"""The gated delta rule over packed sequences, and the causal convolution before it, in PyTorch and float32.

For each head, from a state ``S_0 = 0`` at the beginning of a sequence (arXiv:2412.06464, equation 10):

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        o_t = S_t^T q_t

It is computed in chunks of tokens (section 3.3): inside them by matrix products, for all chunks at once; from chunk to
chunk a state is handed on, for all sequences at once.  Megatron's module has the kernels of ``fla`` for it, and a
function for batches of one length (megatron-core 0.16.1, ssm/gated_delta_net.py); neither is used.

Invariant: a token's output depends on the tokens before it in its own sequence and on nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.training.sequences import cached_on_device

CHUNK = 64  # tokens, C in the suffixes of shapes; as in ``fla`` and transformers


def causal_convolution(x_TD: Tensor, weight_DK: Tensor, positions_T: Tensor) -> Tensor:
    """For each channel, K weighted tokens of one sequence: the last weight is the token's own.

    x_TD: [T, channels], sequences end to end.  positions_T: of each token in its own sequence.  Returns float32 [T, D].
    """
    x_TD, weight_DK, taps = x_TD.float(), weight_DK.float(), weight_DK.shape[1]
    out_TD = x_TD * weight_DK[:, -1]
    for back in range(1, min(taps, len(x_TD))):
        before_TD = F.pad(x_TD[:-back], (0, 0, back, 0))
        before_TD = before_TD.masked_fill((positions_T < back)[:, None], 0.0)
        out_TD = out_TD + before_TD * weight_DK[:, taps - 1 - back]
    return out_TD


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, as ``l2norm`` of transformers and ``fla``."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The outputs o of all tokens, [T, heads, width of values].

    query, key: [T, heads, width of keys], of unit length; queries are divided here by the root of their width.
    value: [T, heads, width].  decay: g, 0 or less, [T, heads].  beta: [T, heads].  All of them float32.
    lengths: tokens of the sequences, which lie end to end.
    """
    rows_NC, places_T, counts = _chunks(lengths, query.device)
    query, key, value, decay, beta = (_in_chunks(x, rows_NC) for x in (query, key, value, decay, beta))
    query = query * query.shape[-1] ** -0.5
    total = decay.cumsum(-1)  # from the chunk's beginning
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    # What a token writes depends on what those before it wrote: a triangular system (section 3.2).
    weighted = key * beta[..., None]
    system = (weighted @ key.transpose(-1, -2)) * between
    alone = torch.linalg.solve_triangular(system, value * beta[..., None], upper=False, unitriangular=True)
    known = torch.linalg.solve_triangular(system, weighted * total.exp()[..., None], upper=False, unitriangular=True)
    parts = (
        alone,
        known,
        query * total.exp()[..., None],
        (query @ key.transpose(-1, -2)) * between,
        (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2),
        total[..., -1].exp()[..., None, None],
    )
    state = query.new_zeros(counts[0], query.shape[1], key.shape[-1], value.shape[-1])
    outs = []
    for alone, known, reading, within, writing, kept in zip(*(x.split(counts) for x in parts), strict=True):
        state = state[: len(alone)]
        new = alone - known @ state
        outs.append(reading @ state + within @ new)
        state = state * kept + writing @ new
    return torch.cat(outs).transpose(1, 2).flatten(0, 1)[places_T]


def _in_chunks(x: Tensor, rows_NC: Tensor) -> Tensor:
    """[T, heads, ...] to [N, heads, C, ...]; rows beyond a sequence are zero."""
    with_zeros = torch.cat([x, torch.zeros_like(x[:1])])
    return with_zeros[rows_NC].transpose(1, 2)


@cached_on_device
def _chunks(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """(rows of each chunk [N, C], T beyond a sequence; place of each row among them [T]; sequences in each turn).

    First the first chunks of all sequences, then their second ones, ...: longer sequences stand before shorter ones,
    so the state of those that go on is always the beginning.
    """
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    rows: list[Tensor] = []
    counts: list[int] = []
    places = torch.empty(sum(lengths), dtype=torch.int64)
    for turn in range(-(-max(lengths) // CHUNK)):
        going_on = [number for number in longest_first if lengths[number] > turn * CHUNK]
        counts.append(len(going_on))
        for number in going_on:
            first = starts[number] + turn * CHUNK
            end = starts[number] + min(lengths[number], (turn + 1) * CHUNK)
            held = torch.arange(first, end)
            places[held] = len(rows) * CHUNK + torch.arange(len(held))
            rows.append(F.pad(held, (0, CHUNK - len(held)), value=sum(lengths)))
    return torch.stack(rows).to(device), places.to(device), counts
