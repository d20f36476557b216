"""What fails on one rank is raised on all, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mcore_rl.ground.errors import CheckpointError, WorkerError
from mcore_rl.parallel.agreement import together
from mcore_rl.parallel.launch import Rank
from tests.support import engines
from tests.support.forked import run_ranks

CPU = torch.device("cpu")


def test_without_a_process_group_it_is_the_step_itself() -> None:
    assert together(lambda: 3, None, CPU) == 3
    with pytest.raises(KeyError):
        together(lambda: {}["x"], None, CPU)


def _outcome(rank: Rank, bad: tuple[int, ...], error: Exception, group: dist.ProcessGroup | None) -> str:
    def step() -> int:
        if rank.rank in bad:
            raise error
        return rank.rank * 10

    try:
        return f"returned {together(step, group, CPU)}"
    except Exception as raised:  # noqa: BLE001  # what it was is what is tested
        return f"{type(raised).__name__}: {raised} {getattr(raised, '__notes__', [])}"


def _outcomes(rank: Rank) -> list[str]:
    with engines.world(rank):
        pair = dist.new_group([1, 2])
        broken = CheckpointError("here", ["gone"])
        outcomes = [
            _outcome(rank, (), broken, None),
            _outcome(rank, (1,), broken, None),
            _outcome(rank, (1, 2), ValueError(f"of {rank.rank}"), None),
        ]
        if rank.rank in (1, 2):
            outcomes.append(_outcome(rank, (2,), broken, pair))
        dist.barrier()
        return outcomes


def test_every_rank_raises_what_one_raised(processes: None) -> None:
    zero, one, two = run_ranks(_outcomes, 3)
    assert [outcomes[0] for outcomes in (zero, one, two)] == ["returned 0", "returned 10", "returned 20"]
    said = "CheckpointError: here: 1 problem:\n  - gone"
    assert one[1] == f"{said} []"
    assert zero[1] == two[1] == f"{said} ['Raised on rank 1']"
    assert one[2] == "ValueError: of 1 []"
    assert two[2] == "ValueError: of 2 []"
    assert zero[2] == f"{WorkerError.__name__}: rank 1: ValueError: of 1 ['Raised on rank 1']"
    assert two[3] == f"{said} []"
    assert one[3].startswith(said)
