"""Saves behind a run: what a step waits for, what becomes of failures, what is left when a run is left.

The workers are scripted, their files and everything of the controller are real; two of the tests have a disk that is
really full.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checkpoints.manifest import damage, sum_of
from mcore_rl.checkpoints.state_writer import Written
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller.lifecycle.run_checkpoints import Progress, complete_checkpoints, read_progress, to_resume
from mcore_rl.controller.lifecycle.saving import Saver
from mcore_rl.ground.errors import CheckpointError, WorkerError
from tests.support.skips import KERNEL

SIZE = 100_000


class Group:
    """Workers of a role, as ``TrainGroup``.  hold: their files arrive when it is set.  problem: of their files."""

    def __init__(self, role: str = "actor", num_ranks: int = 2) -> None:
        self.role, self.num_ranks, self.hosts = role, num_ranks, ["node"] * num_ranks
        self.hold = asyncio.Event()
        self.hold.set()
        self.problem: str | None = None
        self.error: Exception | None = None
        self.calls: list[str] = []
        self._names: list[Path] = []
        self._failed: dict[Path, str] = {}

    def title(self, rank: int) -> str:
        return f"{self.role} rank {rank}"

    async def _call(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    async def num_state_bytes(self) -> int:
        await self._call("num_state_bytes")
        return SIZE * self.num_ranks

    async def save_state(self, directory: Path, *, behind: bool) -> None:
        await self._call("save_state")
        self._names = [directory / f"rank_{rank:05d}.safetensors" for rank in range(self.num_ranks)]
        for path in self._names:
            try:
                path.write_bytes(os.urandom(SIZE))
            except OSError as error:
                self._failed[path] = f"{path} cannot be written: {error.strerror}"

    async def saved(self) -> list[Written | None]:
        await self._call("saved")
        if not self.hold.is_set():
            return [None] * self.num_ranks
        outcomes: list[Written | None] = [
            Written(path.name, None, problem, 0.1)
            if (problem := self._failed.get(path) or (self.problem if rank == self.num_ranks - 1 else None))
            else Written(path.name, sum_of(path), None, 0.1)
            for rank, path in enumerate(self._names)
        ]
        self._failed.clear()
        return outcomes


def saver_of(run_dir: Path, *groups: Group, **settings: Any) -> tuple[Saver, list[str]]:
    told: list[str] = []

    def keep(path: Path) -> None:
        (path / "run.json").write_text("{}")

    trainer = TrainerConfig(default_local_dir=str(run_dir), **settings)
    return Saver(run_dir, groups, trainer, 0, keep=keep, warn=told.append), told  # type: ignore[arg-type]


def names(run_dir: Path) -> list[str]:
    checkpoints = complete_checkpoints(run_dir)
    assert [damage(path) for path in checkpoints] == [[] for _ in checkpoints]
    return [path.name for path in checkpoints]


def test_a_save_returns_before_it_is_written_and_the_next_one_waits(tmp_path: Path) -> None:
    async def run() -> None:
        group = Group()
        saver, told = saver_of(tmp_path, group)
        group.hold.clear()
        progress = Progress(step=2, sampler={"position": 16})
        await saver.save(progress)
        progress.step, progress.sampler = 3, {"position": 24}  # the run goes on
        assert names(tmp_path) == [] and saver.saved_step == 0 and saver.metrics() == {}
        second = asyncio.create_task(saver.save(progress))
        for _ in range(20):
            await asyncio.sleep(0)
        assert group.calls.count("save_state") == 1, "the second waits"
        group.hold.set()
        await second
        await saver.settle()
        assert names(tmp_path) == ["step_2", "step_3"] and saver.saved_step == 3 and told == []
        assert read_progress(complete_checkpoints(tmp_path)[0]).sampler == {"position": 16}
        metrics = saver.metrics()
        assert metrics.keys() == {"perf/checkpoint_s", "perf/checkpoint_gib"}
        assert metrics["perf/checkpoint_gib"] == 2 * SIZE / 2**30
        assert saver.metrics() == {}

    asyncio.run(run())


def test_a_save_at_once_has_its_name_when_it_returns(tmp_path: Path) -> None:
    async def run() -> None:
        actor, critic = Group(), Group("critic", 1)
        saver, _ = saver_of(tmp_path, actor, critic, async_save=False)
        await saver.save(Progress(step=2))
        assert names(tmp_path) == ["step_2"]
        checkpoint = complete_checkpoints(tmp_path)[0]
        assert sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()) == [
            "actor/rank_00000.safetensors", "actor/rank_00001.safetensors", "controller.json",
            "critic/rank_00000.safetensors", "manifest.json", "run.json",
        ]  # fmt: skip

    asyncio.run(run())


def test_a_failure_is_said_counted_and_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        group = Group()
        saver, told = saver_of(tmp_path, group)
        await saver.save(Progress(step=2))
        await saver.settle()
        saver.metrics()
        group.problem = "/run/rank_00001.safetensors cannot be written: Input/output error"
        await saver.save(Progress(step=4))
        await saver.settle()
        assert saver.failed and saver.saved_step == 2 and names(tmp_path) == ["step_2"]
        assert saver.metrics() == {"perf/failed_saves": 1}
        (said,) = told
        assert said.startswith(
            f"no checkpoint of step 4 was written: actor rank 1 on node: {group.problem}\nThe last good one is step_2"
        )
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"], "its space is given back"
        group.problem = None
        await saver.save(Progress(step=5))
        await saver.settle()
        assert not saver.failed and names(tmp_path) == ["step_2", "step_5"]
        assert "perf/failed_saves" not in saver.metrics()

    asyncio.run(run())


def test_old_ones_go_when_a_new_one_is_there(tmp_path: Path) -> None:
    async def run() -> None:
        group = Group()
        saver, _ = saver_of(tmp_path, group, max_to_keep=1, keep_every=4)
        for step in range(1, 7):
            await saver.save(Progress(step=step, best=0.5, best_step=2))
        await saver.settle()
        group.problem = "broken"
        await saver.save(Progress(step=7, best=0.5, best_step=2))
        await saver.settle()
        assert names(tmp_path) == ["step_2", "step_4", "step_6"]

    asyncio.run(run())


def test_the_end_has_its_checkpoint_or_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        group = Group()
        saver, _ = saver_of(tmp_path, group)
        await saver.save(Progress(step=2))
        await saver.conclude(Progress(step=2))
        assert group.calls.count("save_state") == 1, "it is there already"
        await saver.conclude(Progress(step=3))
        assert names(tmp_path) == ["step_2", "step_3"]
        group.problem = "no space"
        with pytest.raises(
            CheckpointError, match=r"(?s)no checkpoint of step 4 was written: .*no space.*step_3 is compl"
        ):
            await saver.conclude(Progress(step=4))

    asyncio.run(run())


def test_leaving_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    async def run() -> None:
        group = Group()
        saver, told = saver_of(tmp_path, group)
        group.hold.clear()
        await saver.save(Progress(step=2))
        leaving = asyncio.create_task(saver.close())
        await asyncio.sleep(0)
        group.hold.set()
        await leaving
        assert names(tmp_path) == ["step_2"] and told == []
        group.hold.clear()
        await saver.save(Progress(step=3))
        group.error = WorkerError("actor rank 1 died")
        await saver.close()
        assert names(tmp_path) == ["step_2"] and "is lost: actor rank 1 died" in told[0]

    asyncio.run(run())


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        group = Group()
        saver, told = saver_of(tmp_path, group)
        await saver.save(Progress(step=2))
        assert saver.failed and "save_state" not in group.calls
        assert "bytes are needed and 12,345 are free on the disk of" in told[0]
        assert not (tmp_path / "checkpoints").exists()

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 12_345))
    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{KERNEL}no file system may be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_leaves_the_last_good_one(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.controller.lifecycle.saving.MARGIN_BYTES", 0)

    async def run() -> None:
        group = Group()
        saver, told = saver_of(small_disk, group)
        await saver.save(Progress(step=1))
        await saver.settle()
        (small_disk / "others").write_bytes(bytes(700_000))  # room for one rank's file, and not for two
        await saver.save(Progress(step=2))
        await saver.settle()
        assert "bytes are needed and" in told[0], "this was foreseen"
        monkeypatch.setattr(
            "mcore_rl.controller.lifecycle.run_checkpoints.lack_of_space", lambda run_dir, num_bytes: None
        )
        await saver.save(Progress(step=3))
        await saver.settle()
        assert "actor rank 1 on node: " in told[1] and "cannot be written: No space left on device" in told[1]
        assert names(small_disk) == ["step_1"]
        assert to_resume(TrainerConfig(default_local_dir=str(small_disk)), told.append) == (
            small_disk / "checkpoints" / "step_1"
        )
        assert len(told) == 2 and saver.metrics()["perf/failed_saves"] == 2
        (small_disk / "others").unlink()
        await saver.save(Progress(step=4))
        await saver.settle()
        assert names(small_disk) == ["step_1", "step_4"]

    asyncio.run(run())


def test_no_room_for_the_manifest_is_a_failure_like_any(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.controller.lifecycle.saving.MARGIN_BYTES", 0)

    async def run() -> None:
        group = Group()
        saver, told = saver_of(small_disk, group)
        group.hold.clear()
        await saver.save(Progress(step=1))
        with suppress(OSError):
            (small_disk / "others").write_bytes(bytes(2**20))
        group.hold.set()
        await saver.settle()
        assert (
            saver.failed
            and "step_1.incomplete cannot be finished: [Errno 28] No space left" in told[0]
            and names(small_disk) == []
        )

    asyncio.run(run())


def test_more_files_are_written_behind_the_run_and_are_in_the_manifest(tmp_path: Path) -> None:
    async def play() -> None:
        saver, told = saver_of(tmp_path, group := Group())
        begun = threading.Event()

        def more(directory: Path) -> int:
            begun.wait(10)
            (directory / "drawn.parquet").write_bytes(b"x" * 1000)
            return 1000

        await saver.save(Progress(step=1), more)
        assert not names(tmp_path), "the run went on while it is written"
        begun.set()
        await saver.settle()
        assert names(tmp_path) == ["step_1"] and not told and group.calls
        checkpoint = tmp_path / "checkpoints" / "step_1"
        assert damage(checkpoint) == []
        (checkpoint / "drawn.parquet").write_bytes(b"x" * 999 + b"y")
        assert "drawn.parquet has other bytes" in damage(checkpoint)[0]
        (checkpoint / "drawn.parquet").write_bytes(b"x" * 1000)
        assert saver.metrics()["perf/checkpoint_gib"] == (1000 + 2 * SIZE) / 2**30

        def full(directory: Path) -> int:
            raise OSError(28, "No space left on device")

        await saver.save(Progress(step=2), full)
        await saver.settle()
        assert saver.failed and names(tmp_path) == ["step_1"] and "rollouts cannot be written into" in told[0]

    asyncio.run(play())
