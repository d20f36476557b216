"""What a section of ``benchmarks/gpu.py`` is: a process of its own that yields facts, each written down at once."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import Platform, detect, set_device, synchronize
from mcore_rl.parallel.launch import FRESH, ProcessContext, Rank

GIB = 2**30
MIB = 2**20
GB = 1e9
FAILED = "FAILED"  # the value of a fact that could not be had


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One row of the table.

    what: is measured.  value: in ``unit``; a word is a fact too.  beside: what to judge it by.  ok: False where it
    shows that something does not work.
    """

    what: str
    value: float | str
    unit: str = ""
    beside: str = ""
    ok: bool = True


class Skipped(Exception):  # no error: this machine lacks what the section needs
    """Why a section, or the rest of it, was left out."""


@dataclass(frozen=True)
class Bench:
    """Where and how a section runs.

    rank: the only one.  tiny: sizes for a test on the CPU.  deadline: by the monotonic clock, which all processes
    share.  folder: for files that it leaves, or finds there from sections before it.
    """

    rank: Rank
    platform: Platform
    device: torch.device
    tiny: bool
    deadline: float
    folder: Path

    @property
    def limit_s(self) -> float:
        """The seconds that it may still take."""
        return self.deadline - time.monotonic()

    @property
    def context(self) -> ProcessContext:
        """How a section starts a process of its own: as it was started itself."""
        return multiprocessing.get_context("forkserver") if self.tiny else FRESH

    def seconds(self, run: Callable[[], object], repetitions: int = 5) -> float:
        """The median time of ``run`` after one run that warms up; all its work is done by then."""
        run()
        times = []
        for _ in range(1 if self.tiny else repetitions):
            synchronize(self.platform)
            start = time.perf_counter()
            run()
            synchronize(self.platform)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


Facts = Iterator[Fact]


def guarded(what: str, facts: Facts) -> Facts:
    """``facts``, and if one of them fails, a row that says so: what comes after it is still measured."""
    try:
        yield from facts
    except Exception as error:  # noqa: BLE001  # whatever it is, the next case is still worth a look
        traceback.print_exc()
        yield Fact(what=what, value=FAILED, beside=f"{type(error).__name__}: {error}"[:500], ok=False)


def enter(rank: Rank, function: str, device: str, tiny: bool, deadline: float, path: str) -> None:
    """The process of one section.  function: ``module:name`` of ``(Bench) -> Facts``.

    Each fact is a line of the file ``path`` before the next one is measured, so that a process that dies leaves them.
    """
    platform = detect(Device(device))
    bench = Bench(rank, platform, set_device(platform, 0), tiny, deadline, Path(path).parent)
    module, _, name = function.partition(":")
    with Path(path).open("a", encoding="utf-8") as lines:
        try:
            facts: Facts = vars(importlib.import_module(module))[name](bench)
            for fact in facts:
                lines.write(json.dumps(asdict(fact)) + "\n")
                lines.flush()
        except Skipped as why:
            lines.write(json.dumps({"skipped": str(why)}) + "\n")
