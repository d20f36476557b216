"""Every tensor with a NaN is named, and no other."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.checkpoints.not_a_number import NanCheck


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 1, 70_000, 99_999])
def test_one_nan_is_found_wherever_it_is(dtype: torch.dtype, place: int) -> None:
    check = NanCheck()
    whole = torch.randn(100_000).to(dtype)
    whole[3], whole[4] = math.inf, -math.inf
    check.see("sound", whole)
    broken = whole.clone()
    broken[place] = math.nan
    for name, values in (("broken", broken), ("sound too", whole)):
        for piece in values.view(100, 1000).split(30):
            check.see(name, piece.T[::1])
    assert [problem.split()[1] for problem in check.problems()] == ["broken"]


def test_nothing_and_empty_pieces_are_sound() -> None:
    check = NanCheck()
    assert check.problems() == []
    check.see("empty", torch.empty(0, 4))
    assert check.problems() == []


def test_the_look_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for the next piece by spinning: loading took five times the processor time."""
    threads, seen, isnan = torch.get_num_threads(), list[int](), math.isnan

    def asked(number: float) -> bool:
        seen.append(torch.get_num_threads())
        return isnan(number)

    monkeypatch.setattr(math, "isnan", asked)
    torch.set_num_threads(2)
    try:
        NanCheck().see("a", torch.zeros(8))
    finally:
        torch.set_num_threads(threads)
    assert seen == [1]


def test_the_look_keeps_nothing_of_what_is_sound_and_the_threads_as_they_were() -> None:
    """A number kept for each window pins the heap above the windows: a conversion then grows with its model."""
    check, threads = NanCheck(), torch.get_num_threads()
    for index in range(100):
        check.see(f"tensor {index}", torch.zeros(100_000))
    assert torch.get_num_threads() == threads
    assert not any(vars(check).values())
