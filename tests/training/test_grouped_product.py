"""Products of groups of rows against one product a group, bit for bit; what is kept for backward, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.parallel import device
from mcore_rl.training import grouped_product
from mcore_rl.training.grouped_product import Groups, grouped_linear, of_each_row, one_kernel

CPU = torch.device("cpu")
COUNTS = {
    "some empty": [13, 0, 60, 1, 0],
    "one token": [0, 0, 1, 0, 0],
    "all on one": [0, 0, 0, 0, 40],
    "none": [0, 0, 0, 0, 0],
    "one group": [9],
}
WIDTHS = {"one kernel": (16, 24), "strides that it refuses": (10, 7)}


class OnDevice(Groups):
    """Numbers of rows that the host does not know."""

    @property
    def on_host(self) -> bool:
        return False

    @property
    def counts(self) -> list[int]:  # type: ignore[override]
        raise AssertionError("the host waits for the device")


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=list(WIDTHS))
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_products_and_gradients_are_those_of_the_loop(
    counts: list[int], widths: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs, outputs = widths
    rows = drawn(sum(counts), inputs, dtype=dtype)
    matrices = [drawn(outputs, inputs, dtype=dtype) for _ in counts]
    grad = torch.randn(sum(counts), outputs).to(dtype)

    looped = torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(counts), matrices, strict=True)])
    expected = [looped, *torch.autograd.grad(looped, [rows, *matrices], grad)]

    out = grouped_linear(rows, Groups(torch.tensor(counts), CPU), matrices)
    assert_same([out, *torch.autograd.grad(out, [rows, *matrices], grad)], expected)


def test_where_the_kernel_serves_the_host_learns_nothing() -> None:
    rows, matrices = drawn(14, 16, dtype=torch.bfloat16), [drawn(8, 16, dtype=torch.bfloat16) for _ in range(3)]
    biases = [drawn(8, dtype=torch.bfloat16) for _ in range(3)]
    groups = OnDevice(torch.tensor([9, 0, 5]), CPU)
    out = grouped_linear(rows, groups, matrices) + of_each_row(groups, 14, biases)
    out.sum().backward()
    assert [int(bias.grad[0]) for bias in biases] == [9, 0, 5]  # type: ignore[index]
    with pytest.raises(AssertionError, match="waits"):
        grouped_linear(drawn(14, 15, dtype=torch.bfloat16), groups, [drawn(8, 15, dtype=torch.bfloat16)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_a_bias_of_each_group(counts: list[int], dtype: torch.dtype) -> None:
    """Weighed, as that of the output; the loop's bits."""
    vectors, weights = [drawn(6, dtype=dtype) for _ in counts], drawn(sum(counts), 1, dtype=dtype)
    grad = torch.randn(sum(counts), 6).to(dtype)
    parts = zip(vectors, weights.split(counts), strict=True)
    looped = torch.cat([vector.unsqueeze(0) * weight for vector, weight in parts])
    expected = [looped, *torch.autograd.grad(looped, [weights, *vectors], grad)]
    out = of_each_row(Groups(torch.tensor(counts), CPU), sum(counts), vectors, weights)
    assert_same([out, *torch.autograd.grad(out, [weights, *vectors], grad)], expected)


def test_sums_that_the_device_makes_are_rounded_once() -> None:
    """A product with ones, whose sum is float32's: within one rounding of the exact sum, over 500 rows."""
    vectors, counts = [drawn(16, dtype=torch.bfloat16) for _ in range(3)], [300, 0, 200]
    grad = torch.randn(500, 16).bfloat16()
    out = of_each_row(OnDevice(torch.tensor(counts), CPU), 500, vectors)
    sums = torch.autograd.grad(out, vectors, grad)
    for total, part in zip(sums, grad.double().split(counts), strict=True):
        torch.testing.assert_close(total.double(), part.sum(0), rtol=2**-8, atol=1e-5)


def test_gradients_arrive_one_parameter_at_a_time_and_add_up() -> None:
    """As Megatron's data parallelism takes them: a hook a parameter adds ``grad`` to ``main_grad`` and drops it."""
    experts = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(3)]
    arrived: list[int] = []

    def add_to(index: int) -> object:
        def hook(parameter: Tensor) -> None:
            arrived.append(index)
            assert parameter.grad is not None and parameter.grad.is_contiguous()
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

        return hook

    for index, expert in enumerate(experts):
        expert.main_grad = torch.zeros_like(expert)  # type: ignore[attr-defined]
        expert.register_post_accumulate_grad_hook(add_to(index))  # type: ignore[arg-type]
    expected = [torch.zeros_like(expert) for expert in experts]
    for counts in ([4, 0, 3], [0, 2, 5]):
        rows = torch.randn(7, 16)
        grouped_linear(rows, Groups(torch.tensor(counts), CPU), experts).square().sum().backward()
        for total, part, expert in zip(expected, rows.split(counts), experts, strict=True):
            total += (2 * part @ expert.T).T @ part
    assert sorted(arrived) == [0, 0, 1, 1, 2, 2], "also of an expert without rows"
    for expert, total in zip(experts, expected, strict=True):
        torch.testing.assert_close(expert.main_grad, total)  # type: ignore[attr-defined]


def test_no_stack_lives_until_backward() -> None:
    rows, matrices = drawn(14, 16, dtype=torch.float32), [drawn(8, 16, dtype=torch.float32) for _ in range(3)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        grouped_linear(rows, Groups(torch.tensor([9, 0, 5]), CPU), matrices)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in (rows, *matrices)}


def test_what_a_kernel_leaves_of_empty_groups_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's leaves what was in memory (pytorch issue 172439): here not a number."""
    real = torch._grouped_mm

    def leaving(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = real(left, right, offs=offs)
        if out.dim() == 3:
            ends = [0, *offs.tolist()]
            for group, (begin, end) in enumerate(pairwise(ends)):
                if begin == end:
                    out[group] = float("nan")
        return out

    monkeypatch.setattr(torch, "_grouped_mm", leaving)
    experts = [drawn(8, 16, dtype=torch.float32) for _ in range(3)]
    out = grouped_linear(torch.randn(7, 16), Groups(torch.tensor([4, 0, 3]), CPU), experts)
    of_first, of_empty, _ = torch.autograd.grad(out.sum(), experts)
    assert not of_empty.any() and of_first.any()


def test_frozen_matrices_and_rows_get_no_gradient() -> None:
    rows, frozen = drawn(7, 16, dtype=torch.float32), [torch.randn(8, 16) for _ in range(2)]
    grouped_linear(rows, Groups(torch.tensor([3, 4]), CPU), frozen).sum().backward()
    torch.testing.assert_close(rows.grad, torch.stack([frozen[0].sum(0)] * 3 + [frozen[1].sum(0)] * 4))


@pytest.fixture
def asked_afresh() -> Iterator[None]:
    device.multiplies_groups.cache_clear()
    yield
    device.multiplies_groups.cache_clear()


@pytest.mark.usefixtures("asked_afresh")
@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "serves"),
    [
        ((9, 0), None, torch.bfloat16, True),
        ((10, 0), None, torch.bfloat16, True),
        ((10, 3), None, torch.bfloat16, True),
        ((8, 0), None, torch.bfloat16, False),
        ((12, 0), None, torch.bfloat16, False),  # Blackwell for desktops
        ((9, 0), None, torch.float32, False),
        ((9, 4), "7.1", torch.bfloat16, False),
    ],
)
def test_where_torch_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, dtype: torch.dtype, serves: bool
) -> None:
    """As ``_grouped_mm_cuda`` chooses (aten/src/ATen/native/cuda/GroupedBlas.cpp); all else it does one by one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert device.multiplies_groups(torch.device("cuda", 0), dtype) is serves


def test_shapes_that_the_kernel_takes() -> None:
    rows = torch.empty(5, 16, dtype=torch.bfloat16)
    assert one_kernel(rows, 8, (16, 24))
    assert not one_kernel(rows, 8, (16, 20)), "20 numbers are 40 bytes, and strides must be multiples of 16"
    assert one_kernel(rows.float(), 8, (16, 20))
    assert not one_kernel(rows, 1, (16, 24)) and not one_kernel(rows, 1024, (16, 24))
    assert not one_kernel(rows[:0], 8, (16, 24))


def test_torch_refuses_what_the_rule_refuses() -> None:
    """The rule of strides is torch's own, on the CPU as on a GPU."""
    ends = torch.tensor([2, 5], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch._grouped_mm(
            torch.ones(5, 10, dtype=torch.bfloat16), torch.ones(2, 10, 8, dtype=torch.bfloat16), offs=ends
        )
    fake = SimpleNamespace(element_size=lambda: 2, shape=(5, 10), device=CPU, dtype=torch.bfloat16)
    assert not grouped_product.one_kernel(fake, 2, (10, 8))  # type: ignore[arg-type]
