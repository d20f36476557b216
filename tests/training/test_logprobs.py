"""token_logprobs against float64 log_softmax under autograd: values, gradients, memory, tensor parallelism.

Tolerances.  A float32 log-prob is a difference of numbers of the size of z = logits/temperature - max, here up to about
30: half a unit in the last place of 30 is 1e-6, and three such roundings meet, hence 5e-6 absolute.  The entropy has
fewer and smaller ones and stays under 2e-6.  Gradients: 1e-6 of the largest one, for float32 arithmetic, and where they
are rounded once to the logits' dtype the unit roundoff of that, 2**-8 of each element for bfloat16, 2**-11 for float16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.parallel.launch import Rank
from mcore_rl.training.logprobs import token_logprobs
from tests.support import engines
from tests.support.forked import run_ranks

UNIT_ROUNDOFF = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass(frozen=True)
class Case:
    """Logits [T, padded_size] with an upstream gradient for each of the two outputs."""

    logits_TV: Tensor
    targets_T: Tensor
    grad_logprobs_T: Tensor
    grad_entropy_T: Tensor
    vocab_size: int
    temperature: float = 1.0
    soft_cap: float | None = None


def make_case(
    num_tokens: int = 23,
    vocab_size: int = 101,
    padded_size: int = 128,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits_TV = (torch.randn(num_tokens, padded_size, generator=generator) * 3).to(dtype)
    logits_TV[:, vocab_size:] = 50.0  # would dominate the softmax if it were let in
    targets_T = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets_T[:1], targets_T[1:2] = 0, vocab_size - 1
    grad_logprobs_T = torch.randn(num_tokens, generator=generator)
    grad_entropy_T = torch.randn(num_tokens, generator=generator)
    return Case(logits_TV, targets_T, grad_logprobs_T, grad_entropy_T, vocab_size, temperature, soft_cap)


def run(
    case: Case, *, with_entropy: bool = True, chunk_tokens: int = 5, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log-probs, entropies, gradient of the logits); ``case.logits_TV`` is left as it is."""
    leaf_TV = case.logits_TV.detach().clone().requires_grad_()
    logprobs_T, entropy_T = token_logprobs(
        leaf_TV * 1,
        case.targets_T,
        vocab_size=case.vocab_size,
        chunk_bytes=chunk_tokens * 4 * leaf_TV.shape[1],
        temperature=case.temperature,
        soft_cap=case.soft_cap,
        with_entropy=with_entropy,
        group=group,
    )
    loss = (logprobs_T * case.grad_logprobs_T).sum()
    if entropy_T is not None:
        loss = loss + (entropy_T * case.grad_entropy_T).sum()
    loss.backward()
    assert leaf_TV.grad is not None
    return logprobs_T.detach(), None if entropy_T is None else entropy_T.detach(), leaf_TV.grad


def reference(case: Case, *, with_entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64 by log_softmax and autograd."""
    leaf_TV = case.logits_TV.detach().double().requires_grad_()
    capped_TV = leaf_TV if case.soft_cap is None else case.soft_cap * torch.tanh(leaf_TV / case.soft_cap)
    log_p_TV = torch.log_softmax(capped_TV[:, : case.vocab_size] / case.temperature, dim=-1)
    logprobs_T = log_p_TV.gather(1, case.targets_T.unsqueeze(1)).squeeze(1)
    entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    loss = (logprobs_T * case.grad_logprobs_T).sum()
    if with_entropy:
        loss = loss + (entropy_T * case.grad_entropy_T).sum()
    loss.backward()
    assert leaf_TV.grad is not None
    return logprobs_T.detach(), entropy_T.detach(), leaf_TV.grad


def assert_near(actual: Tensor, expected: Tensor, absolute: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=absolute, rtol=0)


def assert_gradient_near(actual_TV: Tensor, expected_TV: Tensor) -> None:
    absolute = 1e-6 * expected_TV.abs().max().item()
    relative = UNIT_ROUNDOFF[actual_TV.dtype]
    torch.testing.assert_close(actual_TV.double(), expected_TV.double(), atol=absolute, rtol=relative)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("soft_cap", [None, 4.0, 30.0])  # of logits up to about 10
def test_values_and_gradients_equal_log_softmax(dtype: torch.dtype, temperature: float, soft_cap: float | None) -> None:
    case = make_case(dtype=dtype, temperature=temperature, soft_cap=soft_cap)
    logprobs_T, entropy_T, grad_TV = run(case)
    expected_logprobs_T, expected_entropy_T, expected_grad_TV = reference(case)
    assert entropy_T is not None
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    assert grad_TV.dtype == dtype
    assert_near(logprobs_T, expected_logprobs_T, 5e-6)
    assert_near(entropy_T, expected_entropy_T, 2e-6)
    assert_gradient_near(grad_TV, expected_grad_TV)
    assert not grad_TV[:, case.vocab_size :].any(), "padding columns have no gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_without_entropy(dtype: torch.dtype, soft_cap: float | None) -> None:
    case = make_case(dtype=dtype, temperature=0.7, soft_cap=soft_cap)
    logprobs_T, entropy_T, grad_TV = run(case, with_entropy=False)
    expected_logprobs_T, _, expected_grad_TV = reference(case, with_entropy=False)
    assert entropy_T is None
    assert_near(logprobs_T, expected_logprobs_T, 5e-6)
    assert_gradient_near(grad_TV, expected_grad_TV)


@pytest.mark.parametrize("kept", ["logprobs", "entropy"])
def test_a_loss_of_one_output_alone(kept: str) -> None:
    case = make_case()
    leaf_TV = case.logits_TV.clone().requires_grad_()
    outputs = token_logprobs(leaf_TV * 1, case.targets_T, vocab_size=case.vocab_size, chunk_bytes=2048)
    if kept == "logprobs":
        (outputs[0] * case.grad_logprobs_T).sum().backward()
        expected = reference(replace(case, grad_entropy_T=torch.zeros_like(case.grad_entropy_T)))
    else:
        assert outputs[1] is not None
        (outputs[1] * case.grad_entropy_T).sum().backward()
        expected = reference(replace(case, grad_logprobs_T=torch.zeros_like(case.grad_logprobs_T)))
    assert leaf_TV.grad is not None
    assert_gradient_near(leaf_TV.grad, expected[2])


def test_the_chunk_size_changes_nothing() -> None:
    case = make_case(num_tokens=23)
    whole = run(case, chunk_tokens=23)
    for chunk_tokens in (1, 4, 22, 1000):
        for actual, expected in zip(run(case, chunk_tokens=chunk_tokens), whole, strict=True):
            torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untrained_tokens_have_exactly_zero_gradient_and_leave_the_others_alone(dtype: torch.dtype) -> None:
    case = make_case(num_tokens=24, dtype=dtype)
    trained_T = torch.zeros(24, dtype=torch.bool)
    trained_T[[0, 9, 10, 11, 23]] = True  # with chunks of 4: some wholly trained, some partly, some not at all
    masked = replace(
        case,
        grad_logprobs_T=case.grad_logprobs_T * trained_T,
        grad_entropy_T=case.grad_entropy_T * trained_T,
    )
    _, _, grad_TV = run(masked, chunk_tokens=4)
    _, _, full_grad_TV = run(case, chunk_tokens=4)
    torch.testing.assert_close(grad_TV[trained_T], full_grad_TV[trained_T], atol=0, rtol=0)
    assert full_grad_TV[~trained_T].any()
    assert not grad_TV[~trained_T].any()


def test_extreme_logits() -> None:
    case = make_case(num_tokens=4, vocab_size=100, padded_size=100)
    logits_TV = case.logits_TV
    logits_TV[0, 7], logits_TV[0, 8] = 1e4, 1e4 - 0.5  # a near tie at the top, the rest is nothing
    logits_TV[1] += 1e4
    logits_TV[2, 30] = -1e4
    logits_TV[3] = -1e4
    case.targets_T.copy_(torch.tensor([8, 50, 30, 3]))
    logprobs_T, entropy_T, grad_TV = run(case)
    expected_logprobs_T, expected_entropy_T, expected_grad_TV = reference(case)
    assert entropy_T is not None
    # one rounding of a log-prob of 1e4 is 5e-4; the others are as small as anywhere
    assert_near(logprobs_T[[0, 1, 3]], expected_logprobs_T[[0, 1, 3]], 5e-6)
    assert_near(logprobs_T[2], expected_logprobs_T[2], 1e-3)
    assert_near(entropy_T, expected_entropy_T, 2e-6)
    assert_gradient_near(grad_TV, expected_grad_TV)


def test_a_logit_of_minus_infinity_is_an_excluded_token() -> None:
    case = make_case(num_tokens=6, vocab_size=100, padded_size=100, temperature=0.5)
    case.targets_T.clamp_(max=98)
    without = replace(case, logits_TV=case.logits_TV[:, :99].clone(), vocab_size=99)
    case.logits_TV[:, 99] = -torch.inf
    logprobs_T, entropy_T, grad_TV = run(case)
    expected_logprobs_T, expected_entropy_T, expected_grad_TV = reference(without)
    assert entropy_T is not None
    assert_near(logprobs_T, expected_logprobs_T, 5e-6)
    assert_near(entropy_T, expected_entropy_T, 2e-6)
    assert_gradient_near(grad_TV[:, :99], expected_grad_TV)
    assert not grad_TV[:, 99].any()

    case.targets_T[2] = 99  # a target that cannot be is -inf, and the gradient pulls it up with its whole weight
    logprobs_T, _, grad_TV = run(case)
    assert logprobs_T[2] == -torch.inf
    assert grad_TV[2, 99] == case.grad_logprobs_T[2] / case.temperature
    assert grad_TV.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_stay_visible(bad: float) -> None:
    case = make_case(num_tokens=6)
    case.logits_TV[3, 40] = bad
    logprobs_T, entropy_T, grad_TV = run(case)
    assert entropy_T is not None
    others_T = torch.arange(6) != 3
    assert not logprobs_T[3].isfinite()
    assert not entropy_T[3].isfinite()
    assert not grad_TV[3].isfinite().all()
    for tensor in (logprobs_T, entropy_T, grad_TV):
        assert tensor[others_T].isfinite().all()


def test_gradients_of_a_linear_projection() -> None:
    """The case it is made for: the producer of the logits needs its input and its weight, not its output."""
    case = make_case(num_tokens=12)
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(12, 16, generator=generator).requires_grad_()
    weight_VH = torch.randn(128, 16, generator=generator).requires_grad_()
    logprobs_T, entropy_T = token_logprobs(
        torch.nn.functional.linear(hidden_TH, weight_VH), case.targets_T, vocab_size=101, chunk_bytes=1024
    )
    assert entropy_T is not None
    (logprobs_T * case.grad_logprobs_T + entropy_T * case.grad_entropy_T).sum().backward()
    projected = replace(case, logits_TV=hidden_TH.detach().double() @ weight_VH.detach().double().T)
    grad_TV = reference(projected)[2]
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    for actual, expected in (
        (hidden_TH.grad, grad_TV @ weight_VH.detach().double()),
        (weight_VH.grad, grad_TV.T @ hidden_TH.detach().double()),
    ):
        assert_near(actual, expected, 2e-6 * expected.abs().max().item())  # a dot product more than elsewhere


def test_the_gradient_lies_where_the_logits_were() -> None:
    case = make_case(dtype=torch.bfloat16)
    logits_TV = case.logits_TV.clone().requires_grad_() * 1
    address = logits_TV.data_ptr()
    seen: list[int] = []
    logits_TV.register_hook(lambda grad_TV: seen.append(grad_TV.data_ptr()))
    logprobs_T, _ = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=1024)
    logprobs_T.sum().backward()
    assert seen == [address]


def test_second_backward_is_refused() -> None:
    case = make_case()
    logits_TV = case.logits_TV.clone().requires_grad_() * 1
    logprobs_T, _ = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=1024)
    logprobs_T.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="second backward through token_logprobs"):
        logprobs_T.sum().backward()


@pytest.mark.parametrize("other", ["keeps its output", "second loss", "token_logprobs again"])
def test_whoever_still_needs_the_logits_is_stopped_by_autograd(other: str) -> None:
    """The guard that the in-place gradient relies on: never wrong numbers, always an error."""
    case = make_case()
    leaf_TV = case.logits_TV.clone().requires_grad_()
    logits_TV = torch.tanh(leaf_TV) if other == "keeps its output" else leaf_TV * 1
    squares = logits_TV.square().sum()
    again_T, _ = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=1024)
    logprobs_T, _ = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=1024)
    loss = logprobs_T.sum()
    if other != "keeps its output":
        loss.backward(retain_graph=True)
    if other == "second loss":
        loss = squares
    if other == "token_logprobs again":
        loss = again_T.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("why", ["grad disabled", "logits do not require it"])
def test_nothing_is_saved_or_overwritten_without_gradients(why: str) -> None:
    case = make_case()
    logits_TV = case.logits_TV.clone().requires_grad_(why == "grad disabled")
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.set_grad_enabled(why != "grad disabled"):
            logprobs_T, entropy_T = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=1024)
        assert not packed
        token_logprobs(logits_TV.detach().requires_grad_() * 1, case.targets_T, vocab_size=101, chunk_bytes=1024)
        assert packed, "the probe of this test sees nothing"
    expected_logprobs_T, expected_entropy_T, _ = reference(case)
    assert entropy_T is not None
    assert not logprobs_T.requires_grad
    assert not entropy_T.requires_grad
    assert torch.equal(logits_TV, case.logits_TV)
    assert_near(logprobs_T, expected_logprobs_T, 5e-6)
    assert_near(entropy_T, expected_entropy_T, 2e-6)


def test_no_tokens_give_connected_zeros() -> None:
    leaf_TV = torch.zeros(0, 128, requires_grad=True)
    logprobs_T, entropy_T = token_logprobs(
        leaf_TV * 1, torch.zeros(0, dtype=torch.int64), vocab_size=101, chunk_bytes=1024
    )
    assert entropy_T is not None
    assert logprobs_T.shape == entropy_T.shape == (0,)
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert leaf_TV.grad is not None
    assert leaf_TV.grad.shape == (0, 128)


@pytest.mark.parametrize("target", [-1, 101])
def test_targets_outside_the_vocabulary_are_a_bug(target: int) -> None:
    case = make_case()
    case.targets_T[5] = target
    with pytest.raises(RuntimeError, match=r"targets must lie in \[0, 101\)"):
        run(case)


def test_a_leaf_is_not_overwritten() -> None:
    case = make_case()
    with pytest.raises(AssertionError, match="overwrite the values of a leaf"):
        token_logprobs(case.logits_TV.clone().requires_grad_(), case.targets_T, vocab_size=101, chunk_bytes=1024)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that ``run`` held at one time; the profiler sees temporaries inside operations too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_no_copy_of_the_logits_ever_exists(dtype: torch.dtype, with_entropy: bool, soft_cap: float | None) -> None:
    """Not in float32, and not in the logits' dtype either: two chunks in float32 and some vectors are all there is.

    With a soft cap, three.
    """
    case = make_case(num_tokens=256, vocab_size=1000, padded_size=1024, dtype=dtype, temperature=0.7)
    chunk_bytes = 4 * 4 * 1024  # four tokens
    vectors_bytes = 40 * 256 * 8  # 8 % of the float32 logits
    logits_TV = case.logits_TV.clone().requires_grad_() * 1
    shared: dict[str, Any] = {"vocab_size": 1000, "chunk_bytes": chunk_bytes, "temperature": case.temperature}
    shared["soft_cap"] = soft_cap

    def fused() -> None:
        outputs = token_logprobs(logits_TV, case.targets_T, with_entropy=with_entropy, **shared)
        torch.autograd.grad(sum(output.sum() for output in outputs if output is not None), logits_TV)

    assert peak_bytes(fused) <= (2 if soft_cap is None else 3) * chunk_bytes + vectors_bytes
    assert peak_bytes(lambda: case.logits_TV.float() + 1) >= case.logits_TV.numel() * 4, "the probe sees nothing"


class ChunkOperations(TorchDispatchMode):
    """How many operations returned a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] > 1
        return result


def test_backward_skips_what_no_gradient_needs() -> None:
    case = make_case(num_tokens=24)

    def count(grad_logprobs_T: Tensor, grad_entropy_T: Tensor | None) -> int:
        logits_TV = case.logits_TV.clone().requires_grad_() * 1
        logprobs_T, entropy_T = token_logprobs(logits_TV, case.targets_T, vocab_size=101, chunk_bytes=2048)
        assert entropy_T is not None
        loss = (logprobs_T * grad_logprobs_T).sum()
        if grad_entropy_T is not None:
            loss = loss + (entropy_T * grad_entropy_T).sum()
        with ChunkOperations() as operations:
            torch.autograd.grad(loss, logits_TV)
        return operations.count

    half_T = case.grad_logprobs_T * (torch.arange(24) < 12)
    both = count(case.grad_logprobs_T, case.grad_entropy_T)
    logprobs_alone = count(case.grad_logprobs_T, None)
    assert count(half_T, None) < logprobs_alone < both
    assert count(half_T, case.grad_entropy_T * 0) < both


# Tensor parallelism: four processes started once run every case over the world (tp=4) and over pairs (tp=2).

WORLD_SIZE = 4


def parallel_cases() -> dict[str, Case]:
    cases = {
        "some padding": make_case(),  # 101 of 128 columns: the last of 4 ranks holds 5 true ones
        "ranks of padding only": make_case(vocab_size=60),  # of 4 ranks the last two, of 2 ranks none
        "no padding": make_case(vocab_size=128, temperature=0.6),
        "bfloat16": make_case(dtype=torch.bfloat16, temperature=0.6),
        "soft cap": make_case(temperature=0.6, soft_cap=4.0),
        "far apart": make_case(num_tokens=6, vocab_size=128),
        "no tokens": make_case(num_tokens=0),
    }
    far_TV = cases["far apart"].logits_TV
    far_TV[0, :32] += 300.0  # the sums of the other ranks underflow
    far_TV[1, 96:] -= 50.0
    far_TV[2, 32:64] = -torch.inf  # one rank's share is excluded altogether
    far_TV[3, 32:64] = torch.finfo(torch.float32).min  # the other way people write that
    cases["far apart"].targets_T.copy_(torch.tensor([100, 100, 0, 31, 32, 127]))
    return cases


def run_rank(rank: Rank) -> dict[tuple[str, int], Any]:
    torch.set_num_threads(1)
    rank.init_process_group(engines.CPU)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world = dist.group.WORLD
    assert world is not None
    num_calls = 0
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    results = {}
    for name, case in parallel_cases().items():
        for group in (world, pairs[rank.rank // 2]):
            tp = dist.get_world_size(group)
            shard = case.logits_TV.chunk(tp, dim=1)[dist.get_rank(group)].contiguous()
            num_calls = 0
            result = run(replace(case, logits_TV=shard), chunk_tokens=3, group=group)
            results[name, tp] = (*result, num_calls)
    return results


@pytest.fixture(scope="module")
def parallel_results(processes: None) -> list[dict[tuple[str, int], Any]]:
    return run_ranks(run_rank, WORLD_SIZE)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", list(parallel_cases()))
def test_tensor_parallel_equals_one_process(
    name: str, tp: int, parallel_results: list[dict[tuple[str, int], Any]]
) -> None:
    """Sums in another order: a rounding of each of the tp partial sums more, far inside the tolerances above."""
    case = parallel_cases()[name]
    logprobs_T, entropy_T, grad_TV = run(case)
    assert entropy_T is not None
    for first in range(0, WORLD_SIZE, tp):
        ranks = [parallel_results[rank][name, tp] for rank in range(first, first + tp)]
        for parallel_logprobs_T, parallel_entropy_T, _, _ in ranks:
            assert torch.equal(parallel_logprobs_T, ranks[0][0]), "ranks agree to the last bit"
            assert torch.equal(parallel_entropy_T, ranks[0][1])
        assert_near(ranks[0][0], logprobs_T, 5e-6 if name != "far apart" else 4e-5)  # log-probs of -300 there
        assert_near(ranks[0][1], entropy_T, 2e-6)
        if name != "no tokens":
            assert_gradient_near(torch.cat([grad_slice for _, _, grad_slice, _ in ranks], dim=1), grad_TV)


@pytest.mark.parametrize("tp", [2, 4])
def test_two_all_reduces_whatever_the_number_of_chunks(
    tp: int, parallel_results: list[dict[tuple[str, int], Any]]
) -> None:
    assert [results["some padding", tp][3] for results in parallel_results] == [2] * WORLD_SIZE
