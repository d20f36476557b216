"""A user's function may do what it likes in its process; the next call has another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.agents.function_process import FunctionProcesses, describe
from mcore_rl.ground.errors import ConfigError
from tests.support.awaited import awaited
from tests.support.daemons import DAEMON

SOURCE = '''
import asyncio, os, sys, time

def weather(city: str, days: int = 1) -> str:
    """Says the weather.

    Args:
        city: Where.
        days: How many days ahead.
    """
    if city == "hang":
        time.sleep(100)
    if city == "fork":
        return "child" if os.fork() == 0 else "parent"
    if city == "daemon":
        return str(daemon())
    if city == "flood":
        for _ in range(300):
            print("x" * 10**6)
    if city == "exit":
        os._exit(3)
    if city == "raise":
        raise KeyError("no")
    if city == "secret":
        return os.environ.get("SERVICE_API_KEY", "hidden")
    return f"{city} {days}"

async def later(seconds: float) -> dict:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}

def untyped(x):
    return x
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(SOURCE + DAEMON)
    return path


@pytest.fixture
def processes() -> Iterator[FunctionProcesses]:
    made = FunctionProcesses(2, timeout_s=5.0)
    yield made
    made.close()


def test_the_schema_is_the_signature(file: Path) -> None:
    function = describe(f"{file}:weather", "rollout.agent.tools")["function"]
    assert (function["name"], function["description"]) == ("weather", "Says the weather.")
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["days"] == {"type": "integer", "description": "How many days ahead."}


@pytest.mark.parametrize(
    ("place", "said"), [("untyped", "docstring"), ("absent", "defines no 'absent'"), ("", "defines no ''")]
)
def test_what_is_no_tool_is_refused(file: Path, place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.tools=") as caught:
        describe(f"{file}:{place}", "rollout.agent.tools")
    assert said in str(caught.value) and "type hints and a docstring" in str(caught.value)


def test_a_file_that_ends_its_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(ConfigError, match="importing the file ended its process"):
        describe(f"{tmp_path}/bad.py:f", "rollout.agent.tools")


@awaited
async def test_results_and_failures(file: Path, processes: FunctionProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "0123456789")
    said = {}
    for city in ("Bonn", "raise", "fork", "Ulm", "flood", "exit", "Jena", "secret"):
        result = await processes.call(f"{file}:weather", {"city": city})
        said[city] = (result.text, result.failed)
    assert said == {
        "Bonn": ("Bonn 1", False),
        "raise": ("Error: KeyError: 'no'", True),
        "fork": ("parent", False),
        "Ulm": ("Ulm 1", False),
        "flood": ("flood 1", False),
        "exit": ("Error: the tool ended its process (exit code 3, no answer)", True),
        "Jena": ("Jena 1", False),
        "secret": ("hidden", False),
    }


@awaited
async def test_a_function_that_hangs_is_killed(file: Path) -> None:
    processes = FunctionProcesses(1, timeout_s=1.0)
    await processes.call(f"{file}:weather", {"city": "Bonn"})
    start = time.monotonic()
    hung = await processes.call(f"{file}:weather", {"city": "hang"})
    assert hung.failed and "took longer than 1 s" in hung.text and time.monotonic() - start < 5
    processes.close()


@awaited
async def test_a_daemon_of_a_function_ends_with_its_process(file: Path) -> None:
    processes = FunctionProcesses(1, timeout_s=5.0)
    daemon = psutil.Process(int((await processes.call(f"{file}:weather", {"city": "daemon"})).text))
    assert daemon.is_running()
    processes.close()
    daemon.wait(60)


@awaited
async def test_the_time_of_a_call_is_without_that_of_the_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2)\ndef f():\n    return 'done'\n")
    processes = FunctionProcesses(1, timeout_s=1.0)
    assert (await processes.call(f"{tmp_path}/slow.py:f", {})).text == "done"
    processes.close()


@awaited
async def test_coroutines_are_awaited(file: Path, processes: FunctionProcesses) -> None:
    assert (await processes.call(f"{file}:later", {"seconds": 0.01})).text == '{"waited": 0.01}'
