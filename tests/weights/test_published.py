"""What is published of a weight with adapters: the sum of now, for one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.weights.published import PublishedTensors, ScaledAdapters


class Adds:
    """Adapters that add ``value``; counts how often the change is formed."""

    def __init__(self, value: float) -> None:
        self.value, self.formed = value, 0

    def change(self) -> Tensor:
        self.formed += 1
        return torch.full((2, 3), self.value)


def _published(*adapters: Adds | None) -> tuple[PublishedTensors, list[Tensor], list[tuple[int, str]]]:
    tensors = [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in adapters]
    for tensor, adapter in zip(tensors, adapters, strict=True):
        if adapter is not None:
            tensor.adapter = adapter  # type: ignore[attr-defined]
    keys = [(0, str(number)) for number in range(len(adapters))]
    return PublishedTensors(dict(zip(keys, tensors, strict=True))), tensors, keys


def test_a_sum_is_float32_and_the_stored_weight_stays() -> None:
    # 1 + 2**-10 is no bfloat16: the sum is rounded once, where it is sent.
    published, (plain, adapted), (first, second) = _published(None, Adds(2**-10))
    assert published[first].data_ptr() == plain.data_ptr() and not published[first].requires_grad
    assert published[second].dtype == torch.float32 and bool((published[second] == 1 + 2**-10).all())
    assert bool((adapted == 1).all())


def test_one_sum_is_kept_until_another_is_asked_for_or_weights_may_change() -> None:
    one, other = Adds(1.0), Adds(2.0)
    published, _, (first, second) = _published(one, other)
    assert published[first].data_ptr() == published[first].data_ptr() and one.formed == 1
    assert bool((published[second] == 3).all()) and other.formed == 1
    assert bool((published[first] == 2).all()) and one.formed == 2
    one.value = 5.0
    published.forget()
    assert bool((published[first] == 6).all()), "the sum of another update"


def _lost(steps: int) -> tuple[float, float]:
    """How far the change of a layer's output is off, merged in bfloat16 and with adapters in bfloat16.

    Of random weights, and of an adapter each of whose B's elements moved by Adam's rate of 3e-5 in every step.
    """
    random = torch.Generator().manual_seed(0)
    size, rank = 512, 32
    base = (0.02 * torch.randn(size, size, generator=random)).bfloat16()
    a = (2 * torch.rand(rank, size, generator=random) - 1) * size**-0.5
    b = 3e-5 * steps * torch.randn(size, rank, generator=random).sign()
    x = torch.randn(64, size, generator=random)
    stored: dict[tuple[int, str], Tensor] = {(0, "linear.lora_A.0"): a, (0, "linear.lora_B.0"): b}
    held_a, held_b = (ScaledAdapters(stored, 1.0)[key].bfloat16().float() for key in stored)
    right, merged = x @ (b @ a).T, x @ ((base.float() + b @ a).bfloat16().float() - base.float()).T
    return tuple(float((got - right).norm() / right.norm()) for got in (merged, x @ (held_b @ held_a).T))  # type: ignore[return-value]


def test_merged_weights_of_bfloat16_lose_small_updates_and_adapters_do_not() -> None:
    merged = []
    for steps in (1, 20, 100):
        lost, applied = _lost(steps)
        merged.append(lost)
        assert applied < 0.005
    assert merged[0] > 0.9 and merged[1] > 0.3 and merged[2] < 0.2


def test_adapters_are_published_with_their_scale() -> None:
    a, b = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, 2))
    stored: dict[tuple[int, str], Tensor] = {(0, "x.lora_A.0"): a, (0, "x.lora_B.0"): b}
    published = ScaledAdapters(stored, 0.5)
    assert bool((published[0, "x.lora_A.0"] == 1).all()) and bool((published[0, "x.lora_B.0"] == 0.5).all())
    assert bool((b == 1).all()) and not published[0, "x.lora_B.0"].requires_grad
