"""What is believed of what lies in ``RUN/engines``, and what one side writes for the other."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from mcore_rl.ground.errors import ConfigError, RunDirectoryError
from mcore_rl.tracking import engine_requests
from mcore_rl.tracking.engine_requests import EngineAnswer, EngineMailbox, EngineRequest, EngineRow, ask
from mcore_rl.tracking.run_owner import OWNER, RunOwner, read_owner

ROW = EngineRow(name="engine 0", state="idle", version=3, requests=0, tokens=0, nodes=("n1",))


@pytest.fixture
def run_dir(tmp_path: Path) -> object:
    with RunOwner(tmp_path / "run", say=print):
        yield tmp_path / "run"


def token(run_dir: Path) -> str:
    owner = read_owner(run_dir / OWNER)
    assert owner is not None
    return owner.token


def write(run_dir: Path, data: bytes, name: str = "ask-1.json") -> Path:
    (run_dir / "engines").mkdir(exist_ok=True)
    path = run_dir / "engines" / name
    path.write_bytes(data)
    return path


def test_a_request_is_answered_until_it_is_done_and_leaves_nothing(run_dir: Path) -> None:
    mailbox = EngineMailbox(run_dir)
    asked: list[EngineRequest] = []

    def serve() -> None:
        while not asked:
            for name, request in mailbox.requests():
                assert isinstance(request, EngineRequest)
                asked.append(request)
                mailbox.answer(name, EngineAnswer(state="working", lines=("one",)))
                time.sleep(1.2)
                mailbox.answer(name, EngineAnswer(state="done", lines=("one", "two"), engines=(ROW,)))
            time.sleep(0.05)

    server = threading.Thread(target=serve)
    server.start()
    answers = list(ask(run_dir, 2, ("engine-1",), 1))
    server.join()
    assert asked == [EngineRequest(owner=token(run_dir), add=2, remove=("engine-1",), remove_last=1)]
    assert [each.lines for each in answers] == [("one",), ("one", "two")] and answers[-1].engines == (ROW,)
    assert list((run_dir / "engines").iterdir()) == []


def test_what_was_asked_of_an_earlier_run_is_not_done(run_dir: Path) -> None:
    stale = write(run_dir, b"{}", "answer-1.json")
    write(run_dir, msgspec.json.encode(EngineRequest(owner="0123456789abcdef", add=1)))
    mailbox = EngineMailbox(run_dir)
    ((_, why),) = mailbox.requests()
    assert not stale.exists()
    assert isinstance(why, str) and "has ended" in why
    assert list(mailbox.requests()) == [], "it is told once"
    write(run_dir, msgspec.json.encode(EngineRequest(owner=token(run_dir), add=1)), "ask-2.json")
    ((name, request),) = EngineMailbox(run_dir).requests()
    assert (name, request) == ("2.json", EngineRequest(owner=token(run_dir), add=1)), "asked while the run began again"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "truncated"),
        (b'{"owner": 7}', "Expected `str`"),
        (b'{"owner": "x", "run": "rm"}', "unknown field"),
        (b'{"owner": "x", "add": "2"}', "Expected `int`"),
        (b"[" * 70000, "more than 65536 bytes"),
        (b"\x80\x04N.", "malformed"),
    ],
)
def test_other_contents_are_refused_with_the_file(run_dir: Path, data: bytes, problem: str) -> None:
    mailbox = EngineMailbox(run_dir)
    path = write(run_dir, data)
    ((_, why),) = mailbox.requests()
    assert isinstance(why, str) and str(path) in why and problem in why
    assert not path.exists()


def test_links_pipes_and_files_of_others_are_not_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = EngineMailbox(run_dir)
    good = write(run_dir, msgspec.json.encode(EngineRequest(owner=token(run_dir))), "good")
    (run_dir / "engines" / "ask-link.json").symlink_to(good)
    os.mkfifo(run_dir / "engines" / "ask-pipe.json")
    got = dict(mailbox.requests())
    assert "is not read" in str(got["link.json"]) and "regular file" in str(got["pipe.json"])
    write(run_dir, good.read_bytes(), "ask-other.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    ((_, why),) = mailbox.requests()
    assert "this user's" in str(why)


def test_only_a_run_of_this_user_that_goes_on_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no run goes on there"):
        next(ask(tmp_path))
    with RunOwner(tmp_path / "run", say=print):
        monkeypatch.setattr(engine_requests, "SILENT_S", 0.2)
        with pytest.raises(RunDirectoryError, match="has not answered"):
            next(ask(tmp_path / "run"))
        assert list((tmp_path / "run" / "engines").iterdir()) == []
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="is another user's"):
            next(ask(tmp_path / "run"))


def test_a_run_that_ends_meanwhile_is_no_silent_one(tmp_path: Path) -> None:
    owner = RunOwner(tmp_path / "run", say=print)
    owner.__enter__()
    leaving = threading.Timer(0.7, owner.__exit__, (None, None, None))
    leaving.start()
    with pytest.raises(RunDirectoryError, match="the run ended before"):
        list(ask(tmp_path / "run", 1))
    leaving.join()
