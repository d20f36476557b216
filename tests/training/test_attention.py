"""The local core attention against a naive float64 one, unpacked, packed, and split over context-parallel processes.

Tolerance: 1e-5 relative to the largest entry.  Float32 rounds at 6e-8; attention over 40 keys accumulates a few tens of
such errors, and measures 5e-7 here.
"""

from __future__ import annotations

from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.parallel.context import padded_lengths, split
from mcore_rl.training import attention
from mcore_rl.training.attention import PackedAttention, PackedSequences

TOLERANCE = 1e-5
CPU = torch.device("cpu")
HEAD_DIM = 16
LENGTHS = (1, 13, 40, 7, 16)


def core_attention(heads: int, groups: int, cp_group: dist.ProcessGroup, **options: object) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=options.pop("attention_dropout", 0.0),
        context_parallel_size=cp_group.size(),
    )
    pg_collection = ProcessGroupCollection()
    pg_collection.tp, pg_collection.cp = dist.ProcessGroup(0, 1), cp_group
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **options}
    return PackedAttention(config, layer_number=1, pg_collection=pg_collection, cp_comm_type="p2p", **arguments)


def alone(heads: int, groups: int, **options: object) -> PackedAttention:
    """Without context parallelism; its group of one never communicates."""
    return core_attention(heads, groups, dist.ProcessGroup(0, 1), **options)


def random_qkv(rows: int, heads: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, all leaves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, n, HEAD_DIM) for n in (heads, groups, groups)] + [(rows, heads * HEAD_DIM)]
    query, key, value, grad = (torch.randn(*shape, generator=generator) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad


def naive(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], padded: tuple[int, ...], scale: float):
    """softmax(q k^T * scale) v with a causal mask, one sequence and one head at a time; rows of padding are zero."""
    group_size = query.shape[1] // key.shape[1]
    out = query.new_zeros(query.shape)
    start = 0
    for length, width in zip(lengths, padded, strict=True):
        rows = slice(start, start + length)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for head in range(query.shape[1]):
            scores = query[rows, head] @ key[rows, head // group_size].T * scale
            out[rows, head] = scores.masked_fill(future, -torch.inf).softmax(-1) @ value[rows, head // group_size]
        start += width
    return out.flatten(1)


def reference(qkv, grad, lengths, padded, scale=HEAD_DIM**-0.5) -> list[Tensor]:
    """Output and gradients of q, k and v, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    out = naive(*leaves, lengths, padded, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("output", "query grad", "key grad", "value grad"), found, expected, strict=True):
        assert a.shape == b.shape, name
        error = (a.double() - b.double()).abs().max() / b.abs().max()
        assert error < TOLERANCE, f"{name} differs by {error:.1e}"


def real_rows(lengths: tuple[int, ...], padded: tuple[int, ...]) -> Tensor:
    """Which rows are tokens and not padding."""
    return torch.cat([torch.arange(width) < length for length, width in zip(lengths, padded, strict=True)])


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_packed_equals_naive_attention_of_each_sequence(heads: int, groups: int) -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), heads, groups)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = alone(heads, groups)(query, key, value, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out, *grads], reference((query, key, value), grad, LENGTHS, LENGTHS))


def test_padding_changes_no_token_and_takes_no_gradient() -> None:
    padded = padded_lengths(LENGTHS, 2)
    real_T = real_rows(LENGTHS, padded)
    query, key, value, grad = random_qkv(sum(padded), 4, 2)
    grad = grad * real_T[:, None]
    packed = PackedSequences.of(LENGTHS, padded, 1, 0, CPU)
    out = alone(4, 2)(query, key, value, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out * real_T[:, None], *grads], reference((query, key, value), grad, LENGTHS, padded))
    assert all(not x[~real_T].any() for x in grads)


def test_unpacked_equals_packed() -> None:
    s, b = 12, 3
    query, key, value, grad = random_qkv(s * b, 4, 2)
    module = alone(4, 2)
    packed = PackedSequences.of((s,) * b, (s,) * b, 1, 0, CPU)
    packed_out = module(query, key, value, None, packed_seq_params=packed)
    packed_grads = torch.autograd.grad(packed_out, (query, key, value), grad)

    unpacked = [x.detach().view(b, s, -1, HEAD_DIM).transpose(0, 1).requires_grad_() for x in (query, key, value)]
    out = module(*unpacked, None, attn_mask_type=AttnMaskType.causal)
    grads = torch.autograd.grad(out, unpacked, grad.view(b, s, -1).transpose(0, 1))
    assert out.shape == (s, b, 4 * HEAD_DIM)
    assert out.is_contiguous()
    assert torch.equal(out.transpose(0, 1).flatten(0, 1), packed_out)
    for found, expected in zip(grads, packed_grads, strict=True):
        assert torch.equal(found.transpose(0, 1).flatten(0, 1), expected)


def test_megatrons_own_record_gives_the_same() -> None:
    query, key, value, _ = random_qkv(sum(LENGTHS), 4, 2)
    module = alone(4, 2)
    ours = module(query, key, value, None, packed_seq_params=PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU))
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    wrong = torch.tensor([0, sum(LENGTHS)]).int()  # must be ignored where padded boundaries are given
    for params in (
        PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries),
        PackedSeqParams(qkv_format="thd", cu_seqlens_q=wrong, cu_seqlens_q_padded=boundaries),
    ):
        assert torch.equal(module(query, key, value, None, packed_seq_params=params), ours)


def test_another_sequence_changes_nothing_bit_for_bit() -> None:
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    module = alone(4, 2)
    mine = slice(LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3]))
    found = []
    for seed in (1, 2):
        qkv_and_grad = [x.detach().clone() for x in random_qkv(sum(LENGTHS), 4, 2, seed)]
        for mixed, own in zip(qkv_and_grad, random_qkv(sum(LENGTHS), 4, 2), strict=True):
            mixed[mine] = own[mine].detach()
        leaves = [x.requires_grad_() for x in qkv_and_grad[:3]]
        out = module(*leaves, None, packed_seq_params=packed)
        grads = torch.autograd.grad(out, leaves, qkv_and_grad[3])
        found.append([x[mine] for x in (out, *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_softmax_scale_is_honoured() -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = alone(4, 2, softmax_scale=0.7)(query, key, value, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out, *grads], reference((query, key, value), grad, LENGTHS, LENGTHS, scale=0.7))


def test_bfloat16_stays_near_float64() -> None:
    # bf16 rounds at 4e-3; outputs are averages of values, so 2e-2 of the largest entry leaves room for a few roundings.
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    halves = [x.detach().bfloat16() for x in (query, key, value)]
    out = alone(4, 2)(*halves, None, packed_seq_params=packed)
    expected = reference(halves, grad, LENGTHS, LENGTHS)[0]
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() < 2e-2 * expected.abs().max()


def test_record_is_what_transformer_engine_and_the_rotary_embedding_read() -> None:
    packed = PackedSequences.of((3, 5), (4, 8), 2, 1, CPU)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == [0, 4, 12]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv
    assert packed.cu_seqlens_q is packed.cu_seqlens_q_padded
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv_padded
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (8, 8)


def varlen_in_float32(query, key, value, query_boundaries, key_boundaries, max_q, max_k, *, scale, **options):
    """What ``varlen_attn`` promises, written with Python slices, so that the CPU can check what we feed it."""
    assert options == {"window_size": (-1, 0), "enable_gqa": query.shape[1] != key.shape[1]}
    q, k = query_boundaries.tolist(), key_boundaries.tolist()
    assert (max_q, max_k) == (max(torch.tensor(q).diff()), max(torch.tensor(k).diff()))
    assert (q[-1], k[-1]) == (query.shape[0], key.shape[0])
    return torch.cat(
        [
            attention._causal(query[a:b], key[c:d], value[c:d], scale)
            for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)
        ]
    )


@pytest.mark.parametrize(("cp", "cp_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_varlen_kernel_is_fed_the_same_segments(monkeypatch: pytest.MonkeyPatch, cp: int, cp_rank: int) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen_in_float32)
    padded = padded_lengths(LENGTHS, cp)
    packed = PackedSequences.of(LENGTHS, padded, cp, cp_rank, CPU)
    query_T, key_T, value_T, _ = random_qkv(sum(padded), 4, 2)
    local_T = split(query_T, padded, cp, cp_rank)
    one_by_one = attention._attend_one_by_one(local_T, key_T, value_T, packed, 0.25)
    assert torch.equal(attention._attend_varlen(local_T, key_T, value_T, packed, 0.25), one_by_one)
    assert attention._aligns_last_query.__wrapped__(CPU, torch.float32)


def test_a_kernel_that_aligns_the_first_query_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_aligned(query, key, value, *_: object, **__: object) -> Tensor:
        heads_first = [x.transpose(0, 1) for x in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", first_aligned)
    assert not attention._aligns_last_query.__wrapped__(CPU, torch.float32)


@pytest.mark.parametrize(
    "options",
    [{"attention_dropout": 0.1}, {"attn_mask_type": AttnMaskType.padding}, {"attention_type": "cross"}],
)
def test_what_is_not_supported_is_refused_when_built(options: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match=r"dropout|causal attention only|self-attention only"):
        alone(4, 2, **options)


def test_what_does_not_fit_is_refused_when_called() -> None:
    query, key, value, _ = random_qkv(8, 4, 2)
    module = alone(4, 2)
    with pytest.raises(AssertionError, match="8 rows"):
        module(query, key, value, None, packed_seq_params=PackedSequences.of((7,), (7,), 1, 0, CPU))
    with pytest.raises(AssertionError, match="rank 1 of 2"):
        module(query, key, value, None, packed_seq_params=PackedSequences.of((16,), (16,), 2, 1, CPU))
    packed = PackedSequences.of((8,), (8,), 1, 0, CPU)
    with pytest.raises(AssertionError, match="causal attention only"):
        module(query, key, value, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=packed)
    with pytest.raises(AssertionError, match="always causal"):
        module(query, key, value, torch.ones(8, 8, dtype=torch.bool), packed_seq_params=packed)


def _check_packed(group: dist.ProcessGroup, heads: int, groups: int) -> None:
    cp, cp_rank = group.size(), group.rank()
    padded = padded_lengths(LENGTHS, cp)
    real_T = real_rows(LENGTHS, padded)
    query_T, key_T, value_T, grad_T = random_qkv(sum(padded), heads, groups)
    grad_T = grad_T * real_T[:, None]
    expected = [split(x, padded, cp, cp_rank) for x in reference((query_T, key_T, value_T), grad_T, LENGTHS, padded)]
    local = [split(x, padded, cp, cp_rank).detach().requires_grad_() for x in (query_T, key_T, value_T)]
    packed = PackedSequences.of(LENGTHS, padded, cp, cp_rank, CPU)
    out = core_attention(heads, groups, group)(*local, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, local, split(grad_T, padded, cp, cp_rank))
    assert_close([out * split(real_T, padded, cp, cp_rank)[:, None], *grads], expected)


def _check_unpacked(group: dist.ProcessGroup) -> None:
    cp, cp_rank = group.size(), group.rank()
    s, b = 24, 2
    lengths = (s,) * b
    query_T, key_T, value_T, grad_T = random_qkv(s * b, 4, 2)
    expected = [split(x, lengths, cp, cp_rank) for x in reference((query_T, key_T, value_T), grad_T, lengths, lengths)]

    def to_sbhd(x_T: Tensor) -> Tensor:
        return split(x_T, lengths, cp, cp_rank).unflatten(0, (b, s // cp)).transpose(0, 1).detach()

    local = [to_sbhd(x).requires_grad_() for x in (query_T, key_T, value_T)]
    out = core_attention(4, 2, group)(*local, None)
    grads = torch.autograd.grad(out, local, to_sbhd(grad_T))
    assert_close([x.transpose(0, 1).flatten(0, 1) for x in (out, *grads)], expected)


def _check_bfloat16(group: dist.ProcessGroup) -> None:
    # The one test that sends bf16 over gloo.  4e-2: the gradient of a key is a sum over ranks of rounded parts.
    cp, cp_rank = group.size(), group.rank()
    lengths = (16, 48)
    *qkv, grad_T = random_qkv(sum(lengths), 4, 2)
    local = [split(x, lengths, cp, cp_rank).detach().bfloat16().requires_grad_() for x in qkv]
    packed = PackedSequences.of(lengths, lengths, cp, cp_rank, CPU)
    out = core_attention(4, 2, group)(*local, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, local, split(grad_T, lengths, cp, cp_rank).bfloat16())
    halves = [x.detach().bfloat16() for x in qkv]
    expected = reference(halves, grad_T.bfloat16(), lengths, lengths)
    for a, b in zip((out, *grads), expected, strict=True):
        assert (a.double() - split(b, lengths, cp, cp_rank)).abs().max() < 4e-2 * b.abs().max()


def _context_parallel_worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (pairs[rank // 2], dist.group.WORLD):
        for heads, groups in ((4, 4), (4, 2), (4, 1)):
            _check_packed(group, heads, groups)
        _check_unpacked(group)
        _check_bfloat16(group)
    dist.barrier()
    dist.destroy_process_group()


def test_context_parallel_processes_equal_one(tmp_path: Path) -> None:
    """cp=2 and cp=4: outputs and gradients are those of the undivided sequences, packed and unpacked."""
    set_forkserver_preload([attention.__name__])  # import Megatron once, not once a process
    mp.start_processes(_context_parallel_worker, args=(str(tmp_path / "store"),), nprocs=4, start_method="forkserver")
