"""What is published of a weight with adapters: the sum of now, for one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.weights.published import PublishedTensors


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
