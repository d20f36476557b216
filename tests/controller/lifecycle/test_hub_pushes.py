"""Exports of a run are uploaded by the real client while they are replaced; an upload that fails is only said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.controller.lifecycle.hub_pushes import HubPushes
from mcore_rl.hub.push import target
from tests.support.hub_server import TOKEN, HubServer
from tests.tracking.recorded_run import record

NAME = "model.safetensors"


@pytest.fixture
def run(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run without exports."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    record(tmp_path / "run")
    return tmp_path / "run"


def export(run: Path, name: str, weights: bytes) -> None:
    """As a run replaces an export: the folder, and none of its files."""
    folder = run / "hf" / name
    if folder.exists():
        folder.rename(run / "hf" / f"old-{weights.hex()}")
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(weights)
    (folder / "config.json").write_text("{}")


def pushes(run: Path, name: str = "team/tuned") -> tuple[HubPushes, list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    repository = target(name, private=True, key="trainer.push_to_hub")
    return HubPushes(repository, run, note=notes.append, warn=warnings.append), notes, warnings


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not true():
            await asyncio.sleep(0.01)


def uploads(hub: HubServer) -> int:
    return len([path for path in hub.paths("POST") if "/preupload/" in path])


def test_the_best_goes_to_its_branch_and_the_last_to_the_main_one(hub: HubServer, run: Path) -> None:
    async def scenario() -> list[str]:
        pushing, notes, warnings = pushes(run)
        export(run, "best", b"of 2")
        hub.open.clear()
        await pushing.add({"best": 2})
        await until(lambda: uploads(hub) == 1)  # it is being uploaded, and the run goes on
        for step in (4, 6):
            export(run, "best", f"of {step}".encode())
            await pushing.add({"best": step})
        hub.open.set()
        await until(lambda: len(notes) == 2)
        assert "pushed: step 2, the best so far by validation: " in notes[0] and "step 6" in notes[1], "4 was overtaken"
        await pushing.add({"best": 6})
        export(run, "final", b"of 8")
        await pushing.add({"best": 6, "final": 8, "absent": 3})
        lines = await pushing.conclude()
        assert warnings == [] and len([each for each in notes if each.startswith("pushed: ")]) == 3
        return lines

    best, last = asyncio.run(scenario())
    repo = hub.repos["models/team/tuned"]
    assert repo.private and (repo.of("best")[NAME], repo.files[NAME]) == (b"of 6", b"of 8")
    seen = [files[NAME] for files in repo.commits.values() if NAME in files]
    assert seen == [b"of 2", b"of 6", b"of 8"], "what was replaced while it was uploaded is whole"
    assert best == f"pushed: step 6, the best: {hub.url}/team/tuned/commit/{repo.heads['best']}"
    assert last == f"pushed: step 8, the last: {hub.url}/team/tuned/commit/{repo.head}"
    assert b"# tuned" in repo.files["README.md"] and not (run / "hf" / "final" / "README.md").exists()
    assert sorted(path.name for path in (run / "hf").glob(".*")) == []


def test_what_failed_is_said_and_tried_once_more(hub: HubServer, run: Path) -> None:
    async def scenario(refused: int) -> tuple[list[str], list[str]]:
        pushing, _, warnings = pushes(run)
        hub.refused = refused
        await pushing.add({"final": 8})
        return await pushing.conclude(), warnings

    export(run, "final", b"of 8")
    lines, warnings = asyncio.run(scenario(refused=1))
    assert len(lines) == len(warnings) == 1 and lines[0].startswith("pushed: step 8, the last: ")
    assert f"step 8 is not pushed to team/tuned: {hub.url} does not let you write there (403)" in warnings[0]
    lines, warnings = asyncio.run(scenario(refused=2))
    by_hand = f"hf upload team/tuned {run / 'hf' / 'final'}"
    assert len(warnings) == 2 and lines == [f"not pushed: step 8, the last; upload it with: {by_hand}"]
    assert TOKEN not in "".join([*lines, *warnings])


def test_nothing_that_is_raised_reaches_the_run(hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("mcore_rl.controller.lifecycle.hub_pushes.model_card", raises)

    async def scenario() -> tuple[list[str], list[str]]:
        pushing, _, warnings = pushes(run)
        await pushing.add({"best": 2, "final": 0})
        return await pushing.conclude(), warnings

    export(run, "best", b"of 2")
    (run / "hf" / ".best-1.push").mkdir()  # of a run that was killed
    (line,), warnings = asyncio.run(scenario())
    assert line.endswith(f"hf upload team/tuned {run / 'hf' / 'best'} --revision best")
    assert warnings == ["step 2 is not pushed to team/tuned: ZeroDivisionError"] * 2
    assert not list((run / "hf").glob(".*"))
