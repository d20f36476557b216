"""What the tests of this folder share: training ranks, and engines, which take longer to start than to be tested."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.rollout.protocol import Sample
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from tests.support import sync_cases
from tests.support.live_trainers import LiveTrainers
from tests.support.sync_cases import MODELS, greedy

Case = tuple[str, str, str]  # family, layout of the rollout, weights that it starts with: a or b


@dataclass
class Running:
    """An engine that was started with a checkpoint that training ranks had exported, and what it said when fresh.

    a, b: checkpoints that transformers wrote; the exported one is of one of them.
    """

    engine: EngineProcess
    fresh: list[Sample]
    a: Path
    b: Path


class Engines:
    """One engine at a time; while it is tested, the next one starts."""

    def __init__(self, cases: Sequence[Case], trainers: LiveTrainers, folder: Path) -> None:
        self._cases, self._trainers, self._folder = list(dict.fromkeys(cases)), trainers, folder
        self._started: dict[Case, EngineProcess] = {}
        self._current: tuple[Case, Running] | None = None

    def take(self, case: Case) -> Running:
        """The engine of ``case``; others that were taken are closed."""
        if self._current is None or self._current[0] != case:
            if self._current is not None:
                self._started.pop(self._current[0]).close()
                self._cases.remove(self._current[0])
            for each in (case, *(other for other in self._cases if other != case))[:2]:
                self._start(each)
            engine = self._started[case]
            engine.wait_until_ready()
            root = self._folder / case[0]
            running = Running(engine, asyncio.run(greedy(engine)), root / "a", root / "b")
            self._current = case, running
        return self._current[1]

    def _start(self, case: Case) -> None:
        name, rollout, weights = case
        root = self._folder / name
        exported = root / f"exported-{weights}"
        if not root.exists():
            sync_cases.write(name, root)
        if not exported.exists():
            asyncio.run(self._export(name, root / weights, exported))
        if case not in self._started:
            self._started[case] = sync_cases.engine(exported, rollout, dtype=sync_cases.precision_of(name), wait=False)

    async def _export(self, name: str, weights: Path, exported: Path) -> None:
        await self._trainers.build(name, MODELS[name], "tp=2", weights, "tp=1")
        await self._trainers.order("export", exported, weights)

    def close(self) -> None:
        """All that were started."""
        for engine in self._started.values():
            engine.close()


@pytest.fixture(scope="package")
def trainers(processes: None) -> Iterator[LiveTrainers]:
    with LiveTrainers() as live:
        yield live


@pytest.fixture(scope="package")
def engines(
    request: pytest.FixtureRequest, trainers: LiveTrainers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    specs = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and "engines" in item.fixturenames and hasattr(item, "callspec")
    ]
    cases = [spec.params["running"] for spec in specs]
    made = Engines(cases, trainers, tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture
def running(request: pytest.FixtureRequest, engines: Engines) -> Running:
    """Of the case that the test is parametrised with (``indirect``)."""
    return engines.take(request.param)
