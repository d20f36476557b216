"""The local core attention against a naive float64 one, unpacked, packed, and split over context-parallel processes.

Windows and soft caps are here where the layer or the context ranks matter; their arithmetic is in
test_attention_kernels.py and test_block_attention.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.parallel.context import padded_lengths, split
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.attention import PackedAttention
from mcore_rl.training.sequences import PackedSequences
from tests.support import engines
from tests.support.forked import run_ranks
from tests.support.naive_attention import HEAD_DIM, assert_close, random_qkv, real_rows, reference

CPU = torch.device("cpu")
LENGTHS = (1, 13, 40, 7, 16)


def core_attention(
    heads: int, groups: int, cp_group: dist.ProcessGroup, *, layer_number: int = 1, window: int | None = None,
    **options: object,
) -> PackedAttention:  # fmt: skip
    """window: of the second of two layers."""
    config = TransformerConfig(
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=None if window is None else [0, 1],
        num_layers=2,
        hidden_size=heads * HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=options.pop("attention_dropout", 0.0),
        context_parallel_size=cp_group.size(),
    )
    pg_collection = ProcessGroupCollection()
    pg_collection.tp, pg_collection.cp = dist.ProcessGroup(0, 1), cp_group
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **options}
    return PackedAttention(
        config, layer_number=layer_number, pg_collection=pg_collection, cp_comm_type="p2p", **arguments
    )


def alone(heads: int, groups: int, **options: object) -> PackedAttention:
    """Without context parallelism; its group of one never communicates."""
    return core_attention(heads, groups, dist.ProcessGroup(0, 1), **options)


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
    for of_unpacked, expected in zip(grads, packed_grads, strict=True):
        assert torch.equal(of_unpacked.transpose(0, 1).flatten(0, 1), expected)


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
    results = []
    for seed in (1, 2):
        qkv_and_grad = [x.detach().clone() for x in random_qkv(sum(LENGTHS), 4, 2, seed)]
        for mixed, own in zip(qkv_and_grad, random_qkv(sum(LENGTHS), 4, 2), strict=True):
            mixed[mine] = own[mine].detach()
        leaves = [x.requires_grad_() for x in qkv_and_grad[:3]]
        out = module(*leaves, None, packed_seq_params=packed)
        grads = torch.autograd.grad(out, leaves, qkv_and_grad[3])
        results.append([x[mine] for x in (out, *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_softmax_scale_is_honoured() -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = alone(4, 2, softmax_scale=0.7)(query, key, value, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out, *grads], reference((query, key, value), grad, LENGTHS, LENGTHS, scale=0.7))


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("layer_number", [1, 2])
def test_window_of_its_layer_and_soft_cap_are_honoured(layer_number: int, cap: float | None) -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    module = alone(4, 2, layer_number=layer_number, window=6, soft_cap=cap)
    out = module(query, key, value, None, packed_seq_params=packed)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    window = {1: None, 2: 6}[layer_number]
    expected = reference((query, key, value), grad, LENGTHS, LENGTHS, window=window, cap=cap)
    assert_close([out, *grads], expected)


def test_bfloat16_stays_near_float64() -> None:
    # bf16 rounds at 4e-3; outputs are averages of values, so 2e-2 of the largest entry leaves room for a few roundings.
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    halves = [x.detach().bfloat16() for x in (query, key, value)]
    out = alone(4, 2)(*halves, None, packed_seq_params=packed)
    expected = reference(halves, grad, LENGTHS, LENGTHS)[0]
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() < 2e-2 * expected.abs().max()


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


def _check_packed(
    group: dist.ProcessGroup, heads: int, groups: int, window: int | None = None, cap: float | None = None
) -> None:
    cp, cp_rank = group.size(), group.rank()
    padded = padded_lengths(LENGTHS, cp)
    real_T = real_rows(LENGTHS, padded)
    query_T, key_T, value_T, grad_T = random_qkv(sum(padded), heads, groups)
    grad_T = grad_T * real_T[:, None]
    whole = reference((query_T, key_T, value_T), grad_T, LENGTHS, padded, window=window, cap=cap)
    expected = [split(x, padded, cp, cp_rank) for x in whole]
    local = [split(x, padded, cp, cp_rank).detach().requires_grad_() for x in (query_T, key_T, value_T)]
    packed = PackedSequences.of(LENGTHS, padded, cp, cp_rank, CPU)
    module = core_attention(heads, groups, group, layer_number=2, window=window, soft_cap=cap)
    out = module(*local, None, packed_seq_params=packed)
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


def _context_parallel_worker(rank: Rank) -> None:
    with engines.world(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for group in (pairs[rank.rank // 2], dist.group.WORLD):
            for heads, groups in ((4, 4), (4, 2), (4, 1)):
                _check_packed(group, heads, groups)
            for cap in (None, 1.5):
                _check_packed(group, 4, 2, window=6, cap=cap)
            _check_unpacked(group)
            _check_bfloat16(group)
        dist.barrier()


def test_context_parallel_processes_equal_one(processes: None) -> None:
    """cp=2 and cp=4: outputs and gradients are those of the undivided sequences, packed and unpacked."""
    run_ranks(_context_parallel_worker, 4)
