"""Object collectives bring numbers and text, and what else another rank sends is refused and does nothing."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import (
    CheckpointError,
    ConfigError,
    McoreRLError,
    SyncError,
    Violation,
    WorkerError,
    error_named,
)
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.plain_objects import PlainUnpickler, refuse_foreign_objects
from tests.support.forked import run_ranks

PLAIN = [None, True, 1, 2.5, float("inf"), "text", b"bytes", (1, [2, {"three": {4}}])]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def outcomes(rank: Rank, mark: Path) -> list[object]:
    rank.init_process_group(detect(Device.cpu), 60.0)
    results: list[object] = []
    for sent in (PLAIN, Evil(mark) if rank.rank == 1 else 0, OrderedDict(a=1)):
        got: list[object] = [None, None]
        try:
            dist.all_gather_object(got, sent)
            results.append(got)
        except WorkerError as error:
            results.append(str(error))
    return results


def test_a_rank_that_sends_code_is_refused_by_all(tmp_path: Path, processes: None) -> None:
    for plain, evil, foreign in run_ranks(outcomes, 2, (tmp_path / "evil",)):
        assert plain == [PLAIN, PLAIN]
        assert isinstance(evil, str) and "sent an object that names posix.system" in evil
        assert isinstance(foreign, str) and "collections.OrderedDict" in foreign
    assert not (tmp_path / "evil").exists()


def test_torch_unpickles_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", distributed_c10d._unpickler)
    refuse_foreign_objects()
    refuse_foreign_objects()
    assert distributed_c10d._unpickler is PlainUnpickler


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([Violation("a.b", 3, "is odd", "Write 4"), Violation("c", None, "is not there", "Write it")]),
        CheckpointError("here", ["one", "two"]),
        SyncError("lost"),
        McoreRLError("any"),
    ],
)
def test_an_error_is_the_same_after_its_words(error: McoreRLError) -> None:
    again = error_named(type(error).__name__, error.plain())
    assert (type(again), str(again)) == (type(error), str(error))


def test_an_error_of_no_known_type_keeps_its_words() -> None:
    assert str(error_named("KeyboardInterrupt", ["of", "nobody"])) == "of nobody"
