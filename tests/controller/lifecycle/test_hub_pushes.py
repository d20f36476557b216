"""Exports of a run are uploaded by the real client while they are replaced; an upload that fails is only said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.controller.lifecycle.hub_pushes import HubPushes
from mcore_rl.controller.lifecycle.run_checkpoints import publish_export
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


def export(run: Path, name: str, step: int, weights: bytes | None = None) -> None:
    """As a run replaces an export: the folder, and none of its files."""
    fresh = run / "hf" / f"{name}.new"
    fresh.mkdir(parents=True)
    (fresh / NAME).write_bytes(b"of %d" % step if weights is None else weights)
    (fresh / "config.json").write_text("{}")
    publish_export(fresh, run / "hf" / name, step)


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


async def concluded(pushing: HubPushes) -> list[str]:
    await pushing.conclude()
    pushing.close()
    return pushing.outcomes()


def going_on() -> list[threading.Thread]:
    """The threads that upload."""
    return [each for each in threading.enumerate() if each.name == "pushes to the Hub"]


def test_the_best_goes_to_its_branch_and_the_last_to_the_main_one(hub: HubServer, run: Path) -> None:
    async def scenario() -> list[str]:
        pushing, notes, warnings = pushes(run)
        export(run, "best", 2)
        hub.open.clear()
        await pushing.add("best")
        await until(lambda: uploads(hub) == 1)  # it is being uploaded, and the run goes on
        for step in (4, 6):
            export(run, "best", step)
            await pushing.add("best")
        hub.open.set()
        await until(lambda: len(notes) == 2)
        assert "pushed: step 2, the best so far by validation: " in notes[0] and "step 6" in notes[1], "4 was overtaken"
        await pushing.add("best")
        export(run, "final", 8)
        await pushing.add("best", "final", "absent")
        lines = await concluded(pushing)
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
    assert {*repo.files} == {NAME, "config.json", "README.md"} and not going_on()
    assert sorted(path.name for path in (run / "hf").glob(".*")) == []


def test_an_export_goes_under_its_own_step_and_another_one_of_that_step_too(hub: HubServer, run: Path) -> None:
    """A run that died after its best goes on before it; what it trains there anew need not be the same."""

    async def scenario() -> list[str]:
        export(run, "best", 140)
        (run / "hf" / "final").mkdir()  # nobody knows of which step
        pushing, notes, warnings = pushes(run)
        await pushing.add("best", "final")
        await until(lambda: len(notes) == 1)
        export(run, "best", 140, b"again")
        await pushing.add("best")
        await until(lambda: len(notes) == 2)
        export(run, "best", 120)
        await pushing.add("best")
        lines = await concluded(pushing)
        shown = [(note.split(",")[0], note.rpartition("/")[2]) for note in notes if note.startswith("pushed")]
        files = [hub.repos["models/team/tuned"].commits[commit][NAME] for _, commit in shown]
        assert [step for step, _ in shown] == ["pushed: step 140", "pushed: step 140", "pushed: step 120"]
        assert files == [b"of 140", b"again", b"of 120"] and warnings == []
        return lines

    (line,) = asyncio.run(scenario())
    assert line.startswith("pushed: step 120, the best: ")


def test_a_run_that_is_stopped_uploads_no_more(hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.controller.lifecycle.hub_pushes.CLOSE_S", 0.05)
    said: list[str] = []

    async def scenario() -> None:
        pushing, notes, warnings = pushes(run)
        export(run, "best", 2)
        hub.open.clear()
        await pushing.add("best")
        await until(lambda: uploads(hub) == 1)
        export(run, "final", 4)
        await pushing.add("final")
        pushing.close()
        assert not list((run / "hf").glob(".*")), "what is under way has no files any more"
        hub.open.set()
        await until(lambda: not going_on())
        said.extend(notes + warnings)

    asyncio.run(scenario())
    assert said == [] and not any(NAME in files for files in hub.repos["models/team/tuned"].commits.values())


def test_what_failed_is_said_and_tried_once_more(hub: HubServer, run: Path) -> None:
    async def scenario(refused: int) -> tuple[list[str], list[str]]:
        pushing, _, warnings = pushes(run)
        hub.refused = refused
        await pushing.add("final")
        return await concluded(pushing), warnings

    export(run, "final", 8)
    lines, warnings = asyncio.run(scenario(refused=1))
    told = f"step 8 is not pushed to team/tuned: {hub.url} does not let you write there (403); "
    assert len(lines) == 1 and lines[0].startswith("pushed: step 8, the last: ")
    assert warnings == [f"{told}the newest is tried again at the end"]
    lines, warnings = asyncio.run(scenario(refused=2))
    by_hand = f"hf upload team/tuned {run / 'hf' / 'final'} --private"
    assert warnings == [f"{told}the newest is tried again at the end", f"{told}it is not tried again"]
    assert lines == [f"not pushed: step 8, the last; upload it with: {by_hand}"]
    assert TOKEN not in "".join([*lines, *warnings])


def test_nothing_that_is_raised_reaches_the_run(hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("mcore_rl.controller.lifecycle.hub_pushes.model_card", raises)

    async def scenario() -> tuple[list[str], list[str]]:
        pushing, _, warnings = pushes(run)
        await pushing.add("best", "final")
        return await concluded(pushing), warnings

    export(run, "best", 2)
    (run / "hf" / ".best-1.push").mkdir()  # of a run that was killed
    (line,), warnings = asyncio.run(scenario())
    assert line.endswith(f"hf upload team/tuned {run / 'hf' / 'best'} --revision best --private")
    assert [each.partition(";")[0] for each in warnings] == [
        "step 2 is not pushed to team/tuned: ZeroDivisionError"
    ] * 2
    assert not list((run / "hf").glob(".*"))
