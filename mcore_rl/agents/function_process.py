"""Runs a user's tool functions in processes of their own, which are killed when a call takes too long.

A function may raise, hang, fork, exit or print without end: the call fails, the model is told, and the next call gets a
fresh process.  The controller never imports the file.  The processes have no secrets of the environment, and what they
started ends with them.

Protocol: JSON lines over a socket; the function's own output goes nowhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.agents.tools import EpisodeTool, ToolResult, ToolSchema
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.json_text import read_json
from mcore_rl.ground.secrets import redacted, without_secrets
from mcore_rl.processes.guarding import GuardedProgram

START_S = 60.0  # to start and to import the file
MAX_ANSWER = 1 << 20  # characters of a result


class FunctionTool(EpisodeTool):
    """A function as a tool.  source: ``FILE.py:FUNCTION``.  Its time begins when a process is free."""

    limits_itself = True

    def __init__(self, source: str, schema: dict[str, Any], processes: FunctionProcesses) -> None:
        super().__init__({}, ToolSchema(schema))
        self._source = source
        self._processes = processes

    def place(self, instance_id: str) -> AbstractAsyncContextManager[Any]:
        """See ``EpisodeTool.place``."""
        return self._processes.room

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        return await self._processes.call(self._source, parameters)


class FunctionProcesses:
    """At most ``count`` processes, started as they are needed.

    room: whoever calls holds a place in it.  timeout_s: of one call.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self.room = asyncio.Semaphore(count)
        self._timeout_s = timeout_s
        self._idle: list[_FunctionProcess] = []
        self._all: set[_FunctionProcess] = set()

    async def call(self, place: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of the function at ``place``; a failure is one, too."""
        process = self._idle.pop() if self._idle else _FunctionProcess()
        self._all.add(process)
        try:
            await process.ready(place)
            answer = await asyncio.wait_for(process.ask({"place": place, "arguments": arguments}), self._timeout_s)
            self._idle.append(process)
        except TimeoutError:
            self._forget(process)
            return ToolResult(text=f"Error: the tool took longer than {self._timeout_s:g} s", failed=True)
        except (OSError, EOFError, ValueError) as error:
            code = self._forget(process)
            return ToolResult(text=f"Error: the tool ended its process (exit code {code}, {error})", failed=True)
        except BaseException:
            self._forget(process)  # it may still answer this call
            raise
        if "error" in answer:
            return ToolResult(text=f"Error: {redacted(str(answer['error']))}", failed=True)
        return ToolResult(text=str(answer["text"]))

    def close(self) -> None:
        """Kills every process."""
        for process in list(self._all):
            self._forget(process)

    def _forget(self, process: _FunctionProcess) -> int:
        self._all.discard(process)
        return process.end()


class _FunctionProcess:
    """A process that calls functions, one at a time."""

    def __init__(self) -> None:
        self._process = GuardedProgram(__name__, without_secrets())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._imported = set[str]()

    async def ready(self, place: str) -> None:
        """Opens the socket and imports the file of ``place``, once each; a call says what that raised.  As ``ask``."""
        if self._streams is None:
            self._streams = await self._process.streams()
        if place not in self._imported:
            try:
                await asyncio.wait_for(self.ask({"place": place, "imports": True}), START_S)
            except TimeoutError as error:
                raise OSError(f"importing its file took longer than {START_S:g} s") from error
            self._imported.add(place)

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``request``.  OSError, EOFError, ValueError: the process ended, or wrote none."""
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(json.dumps(request).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("no answer")
        answer = json.loads(line)
        if not isinstance(answer, dict) or not answer.keys() & {"text", "error"}:
            raise ValueError("no answer")
        return answer

    def end(self) -> int:
        """Kills the process and those that it started; returns its exit code."""
        if self._streams is not None:
            with suppress(RuntimeError):  # the event loop has ended before
                self._streams[1].close()
        return self._process.end()


def describe(place: str, key: str) -> dict[str, Any]:
    """The schema of the function at ``place``, made in a process of its own.

    key: that names it.  ConfigError: there is no such file or function, or it has no type hints or docstring.
    """
    process = GuardedProgram(__name__, without_secrets())
    try:
        line = process.first_answer({"place": place}, START_S)
        answer: dict[str, Any] = read_json(line) if line else {"error": "importing the file ended its process"}
    except (OSError, ValueError) as error:
        answer = {"error": f"importing the file took longer than {START_S:g} s ({error})"}
    finally:
        process.end()
    if "schema" not in answer:
        remedy = (
            "Write FILE.py:FUNCTION, a function with type hints and a docstring that describes each argument (Args:)"
        )
        raise ConfigError([Violation(key, place, redacted(str(answer["error"])), remedy)])
    return dict(answer["schema"])


def main(descriptor: int) -> None:
    """Answers each line on the socket ``descriptor`` until it is closed.

    {place} is answered with {schema}, {place, arguments} with {text}, {place, imports} with an empty one; each with
    {error}.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.getpid()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as file:
        os.set_inheritable(descriptor, False)
        for line in file:
            answer = _answer(json.loads(line))
            if os.getpid() != own:  # a child that the function forked returned from it
                os._exit(0)
            file.write(json.dumps(answer).encode() + b"\n")
            file.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = imported(request["place"])
        if "imports" in request:
            return {"text": ""}
        if "arguments" not in request:
            from transformers.utils.chat_template_utils import get_json_schema

            return {"schema": get_json_schema(function)}
        value = function(**request["arguments"])
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except BaseException as error:  # noqa: BLE001  whatever the user's file does, sys.exit too
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ANSWER]}
    return {"text": text[:MAX_ANSWER]}


async def _awaited(value: Any) -> Any:
    return await value


def absolute(place: str) -> str:
    """``FILE.py:NAME`` with the whole path of the file."""
    path, _, name = place.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}"


@cache
def imported(place: str) -> Callable[..., Any]:
    """The function or class at ``FILE.py:NAME``.  ValueError: there is none."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"mcore_rl_tool_{os.path.basename(path)[:-3]}", path)
    if not os.path.isfile(path) or spec is None or spec.loader is None:
        raise ValueError(f"there is no Python file {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(vars(module).get(name)):
        raise ValueError(f"{path} defines no {name!r}")
    function: Callable[..., Any] = vars(module)[name]
    return function
