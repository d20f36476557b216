"""SDPA and varlen attention: which keys they are given, windows against a naive attention in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mcore_rl.parallel.context import padded_lengths, split
from mcore_rl.training import attention_kernels
from mcore_rl.training.attention_kernels import (
    aligns_last_query,
    attend_causal,
    attend_one_by_one,
    attend_varlen,
    blocks,
    honours_window,
    take_flash_attention_3,
    takes_groups,
    visible,
)
from mcore_rl.training.block_attention import attend_in_blocks
from mcore_rl.training.sequences import PackedSequences
from tests.support.naive_attention import HEAD_DIM, assert_close, random_qkv, reference

CPU = torch.device("cpu")
SCALE = HEAD_DIM**-0.5
LENGTHS = (1, 13, 40, 7, 16)
LONG = (300, 3, 131)  # longer than one block of queries


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (7, 7), (5, 9), (20, 50)])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_blocks_and_masks_show_each_query_just_its_keys(
    num_queries: int, num_keys: int, window: int | None, rows: int
) -> None:
    expected = visible(num_queries, num_keys, None, CPU)
    for query in range(num_queries):
        last = num_keys - num_queries + query
        assert expected[query].nonzero().flatten().tolist() == list(range(last + 1))
        if window is not None:
            expected[query, : max(0, last - window + 1)] = False
    shown = torch.zeros_like(expected)
    for queries, keys in blocks(num_queries, num_keys, window, rows):
        width = queries.stop - queries.start
        assert width <= rows
        assert keys.stop - keys.start <= (width + window - 1 if window is not None else num_keys), "hidden keys"
        shown[queries, keys] = visible(width, keys.stop - keys.start, window, CPU)
    assert torch.equal(shown, expected)


@pytest.mark.parametrize("window", [1, 5, 100, 129, 200, 300, 1000])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
def test_window_equals_naive_attention(window: int, heads: int, groups: int) -> None:
    query, key, value, grad = random_qkv(sum(LONG), heads, groups)
    packed = PackedSequences.of(LONG, LONG, 1, 0, CPU)
    out = attend_one_by_one(query, key, value, packed, SCALE, window).flatten(1)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out, *grads], reference((query, key, value), grad, LONG, LONG, window=window))


def test_keys_outside_the_window_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def count(query: Tensor, key: Tensor, *_: object) -> Tensor:
        asked.append((query.shape[0], key.shape[0]))
        return query

    monkeypatch.setattr(attention_kernels, "attend_causal", count)
    query, key, value, _ = random_qkv(600, 2, 2)
    attend_one_by_one(query, key, value, PackedSequences.of((600,), (600,), 1, 0, CPU), SCALE, 50)
    assert asked == [(128, 128), (128, 177), (128, 177), (128, 177), (88, 137)]


def varlen_in_float32(
    query: Tensor, key: Tensor, value: Tensor, query_boundaries: Tensor, key_boundaries: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What ``varlen_attn`` promises, written with Python slices, so that the CPU can check what we feed it."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    q, k = query_boundaries.tolist(), key_boundaries.tolist()
    assert (max_q, max_k) == (max(torch.tensor(q).diff()), max(torch.tensor(k).diff()))
    assert (q[-1], k[-1]) == (query.shape[0], key.shape[0])
    window = None if window_size[0] == -1 else window_size[0] + 1
    return torch.cat(
        [
            attend_causal(query[a:b], key[c:d], value[c:d], scale, window)
            for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)
        ]
    )


def varlen_without_groups(
    query: Tensor, key: Tensor, value: Tensor, query_boundaries: Tensor, key_boundaries: Tensor, max_q: int, max_k: int,
    *, return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """The signature of torch 2.11's ``varlen_attn``."""
    assert return_aux is None and scale is not None
    assert query.shape[1] == key.shape[1] == value.shape[1], "torch 2.11 documents H heads for all three"
    limits = query_boundaries, key_boundaries, max_q, max_k
    return varlen_in_float32(query, key, value, *limits, scale=scale, window_size=window_size, enable_gqa=False)


KERNELS = [varlen_in_float32, varlen_without_groups]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_varlen_shares_heads_alike_whether_the_kernel_takes_groups_or_not(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor], heads: int, groups: int
) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", kernel)
    query, key, value, grad = random_qkv(sum(LENGTHS), heads, groups)
    out = attend_varlen(query, key, value, PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU), SCALE).flatten(1)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    assert_close([out, *grads], reference((query, key, value), grad, LENGTHS, LENGTHS))


def test_whether_the_kernel_takes_groups_is_what_its_signature_says() -> None:
    assert takes_groups(varlen_in_float32)
    assert not takes_groups(varlen_without_groups)
    assert not torch.__version__.startswith("2.13") or takes_groups(varlen_attn), "2.13 brought it"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize(("cp", "cp_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_varlen_kernel_is_fed_the_same_segments(
    monkeypatch: pytest.MonkeyPatch, cp: int, cp_rank: int, window: int | None, kernel: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", kernel)
    padded = padded_lengths(LENGTHS, cp)
    packed = PackedSequences.of(LENGTHS, padded, cp, cp_rank, CPU)
    query_T, key_T, value_T, _ = random_qkv(sum(padded), 4, 2)
    local_T = split(query_T, padded, cp, cp_rank)
    one_by_one = attend_one_by_one(local_T, key_T, value_T, packed, 0.25, window)
    varlen = attend_varlen(local_T, key_T, value_T, packed, 0.25, window)
    if window is None:
        assert torch.equal(varlen, one_by_one)
    torch.testing.assert_close(varlen, one_by_one, rtol=0, atol=1e-6)  # sums over hidden keys too: other tiles
    assert aligns_last_query.__wrapped__(CPU, torch.float32)
    assert honours_window.__wrapped__(CPU, torch.float32)


def test_kernels_that_align_the_first_query_or_know_no_window_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_aligned(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        heads_first = [x.transpose(0, 1) for x in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)

    monkeypatch.setattr(attention_kernels, "varlen_attn", first_aligned)
    assert not aligns_last_query.__wrapped__(CPU, torch.float32)
    assert not honours_window.__wrapped__(CPU, torch.float32)


# ---- FlashAttention 3, by torch's switch ----

# Of ``_flash_attn_forward`` in hopper/flash_attn_interface.py of Dao-AILab/flash-attention, in order.
FLASH_3_FORWARD = (
    "q", "k", "v", "k_new", "v_new", "qv", "out_", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "causal", "window_size_left",
    "window_size_right", "attention_chunk", "softcap", "rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin",
)  # fmt: skip


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The implementations that were switched to, on a device that FlashAttention 3 is installed for."""
    names: list[str] = []
    monkeypatch.setattr(attention_kernels, "have_flash_attention_3", lambda device: device.type == "cuda")
    monkeypatch.setattr(attention_kernels, "activate_flash_attention_impl", names.append)
    take_flash_attention_3.cache_clear()
    yield names
    take_flash_attention_3.cache_clear()


def test_flash_attention_3_is_taken_once_where_it_is_installed(switched: list[str]) -> None:
    assert not take_flash_attention_3(CPU) and switched == []
    for _ in range(3):
        assert take_flash_attention_3(torch.device("cuda", 0))
    assert switched == ["FA3"]


def test_a_build_that_cannot_be_loaded_changes_nothing(switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(attention_kernels, "activate_flash_attention_impl", refused)
    with pytest.warns(UserWarning, match="cannot be used: undefined symbol"):
        assert not take_flash_attention_3(torch.device("cuda", 0))


def test_torch_gives_flash_attention_3_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments by place, against the package's own signature: a causal window of 5 over two sequences."""
    from torch.nn.attention import _fa3

    given: list[tuple[object, ...]] = []

    def kernel(*arguments: object) -> tuple[Tensor, Tensor, None, None]:
        given.append(arguments)
        return torch.empty(7, 2, 8), torch.empty(2, 7), None, None

    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", kernel)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
    query, limits = torch.empty(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    _fa3._fa3_run_forward(query, query, query, limits, limits, 4, 4, 0.5, True, 4, 0, None)
    named = dict(zip(FLASH_3_FORWARD, given[0], strict=True))
    assert named["q"] is named["k"] is named["v"] is query
    assert named["cu_seqlens_q"] is named["cu_seqlens_k"] is limits
    assert (named["max_seqlen_q"], named["max_seqlen_k"], named["softmax_scale"]) == (4, 4, 0.5)
    assert (named["causal"], named["window_size_left"], named["window_size_right"]) == (True, 4, 0)
    assert named["softcap"] == named["attention_chunk"] == named["sm_margin"] == 0


TRUNK, BRANCHES = 9, (4, 1, 12)


def shared_and_apart(*tensors: Tensor) -> tuple[PackedSequences, PackedSequences, list[Tensor]]:
    """A trunk with its branches, the same as whole sequences, and ``tensors`` with a trunk for each of these."""
    lengths = (TRUNK, *BRANCHES)
    shared = PackedSequences.of(lengths, lengths, 1, 0, CPU, trunks=(None, 0, 0, 0))
    whole = tuple(TRUNK + length for length in BRANCHES)
    repeated = []
    for x in tensors:
        trunk, *branches = torch.split(x.detach(), list(lengths))
        repeated.append(torch.cat([part for branch in branches for part in (trunk, branch)]))
    return shared, PackedSequences.of(whole, whole, 1, 0, CPU), repeated


@pytest.mark.parametrize("window", [None, 1, 5, 11])
@pytest.mark.parametrize("kernel", ["one_by_one", "varlen", "blocks", "sinks"])
def test_branches_of_a_trunk_are_whole_sequences(
    kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of whole sequences, and a trunk's gradients the sums of theirs."""
    monkeypatch.setattr(attention_kernels, "varlen_attn", varlen_in_float32)
    query, key, value, grad = random_qkv(TRUNK + sum(BRANCHES), 4, 2)
    sinks = torch.linspace(-1.0, 1.0, 4)

    def attend(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        if kernel == "varlen":
            return attend_varlen(query, key, value, packed, SCALE, window).flatten(1)
        if kernel == "one_by_one":
            return attend_one_by_one(query, key, value, packed, SCALE, window).flatten(1)
        own = sinks if kernel == "sinks" else None
        return attend_in_blocks(query, key, value, packed, SCALE, 1.5, window, sinks=own, block_bytes=600).flatten(1)

    shared, apart, (q, k, v, g) = shared_and_apart(query, key, value, grad)
    starts = [0, TRUNK + BRANCHES[0], 2 * TRUNK + BRANCHES[0] + BRANCHES[1]]
    for start in starts[1:]:
        g[start : start + TRUNK] = 0
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = attend(whole[0], whole[1], whole[2], apart)
    expected_grads = torch.autograd.grad(expected, whole, g)
    out = attend(query, key, value, shared)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    for number, (got, wanted) in enumerate(zip([out, *grads], [expected, *expected_grads], strict=True)):
        trunks, branches = list[Tensor](), list[Tensor]()
        for start, length in zip(starts, BRANCHES, strict=True):
            trunks.append(wanted[start : start + TRUNK])
            branches.append(wanted[start + TRUNK : start + TRUNK + length])
        trunk = trunks[0] if number == 0 else torch.stack(trunks).sum(0)
        assert torch.allclose(got, torch.cat([trunk, *branches]), atol=2e-6), number
