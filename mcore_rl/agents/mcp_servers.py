"""Tools of MCP servers (modelcontextprotocol.io), over stdio or http; ``rollout.agent.mcp_config_path`` names them.

Each server has a client in a process of its own (``mcp_process``).  One server serves all episodes of a run.  A server
that dies or does not answer ends its calls with an observation; it is killed, and the next call starts it again.

Invariant: a server is given no secret of the environment, and nothing that it does ends the run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, SchemaError

from mcore_rl.agents.tools import EpisodeTool, ToolResult, ToolSchema
from mcore_rl.ground.errors import ConfigError, Violation, pip_line
from mcore_rl.ground.json_text import read_json
from mcore_rl.ground.secrets import redacted, without_secrets
from mcore_rl.processes.guarding import GuardedProgram

KEY = "rollout.agent.mcp_config_path"
FORM = "Write mcpServers: {NAME: {command, args, env, cwd} or {url, headers}, ...}"
FIELDS = {"command", "args", "env", "cwd", "url", "headers", "tools", "type"}
START_S = 60.0  # to start and to list the tools
CHECK_S = 5.0  # in which a server answers that lets a call run into its limit
AGAIN_S = 10.0  # between two attempts to start a server
MAX_ERROR = 500  # characters
_VARIABLE = re.compile(r"\$\{(\w+)\}")
logger = logging.getLogger(__name__)


class GoneError(Exception):
    """The server, or its client's process, is gone.  The message says why."""


class McpTool(EpisodeTool):
    """A tool of a server.  limit_s: of a call."""

    limits_itself = True

    def __init__(self, server: McpServer, schema: dict[str, Any], limit_s: float) -> None:
        super().__init__({}, ToolSchema(schema))
        self._server = server
        self._limit_s = limit_s

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        return await self._server.call(self.name, parameters, self._limit_s)


class McpServer:
    """One server.  given: its fields of the file.  Started by ``tools``, and again by a call when it is gone."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.name = name
        self._given = dict(given)
        self._process: GuardedProgram | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._opening = asyncio.Lock()
        self._failed_at = 0.0
        self._failure = ""

    def tools(self) -> list[dict[str, Any]]:
        """Starts the server; the schemas of its tools.  GoneError: it cannot be started."""
        self.close()
        self._process = GuardedProgram("mcore_rl.agents.mcp_process", without_secrets())
        try:
            line = self._process.first_answer({"server": self._given}, START_S)
            answer: dict[str, Any] = read_json(line) if line else {"error": "its client's process ended"}
        except TimeoutError:
            answer = {"error": f"it took longer than {START_S:g} s"}
        except (OSError, ValueError) as error:
            answer = {"error": f"it gave no answer ({error})"}
        if "tools" not in answer:
            self.close()
            raise GoneError(f"cannot be started: {redacted(str(answer['error']))[:MAX_ERROR]}")
        return list(answer["tools"])

    async def call(self, tool: str, arguments: dict[str, Any], limit_s: float) -> ToolResult:
        """The result of a call; a failure is one, too."""
        try:
            await self._ensure_open()
            answer = await self._ask({"tool": tool, "arguments": arguments}, limit_s)
        except TimeoutError:
            await self._end_if_silent()
            return ToolResult(text=f"Error: the tool took longer than {limit_s:g} s", failed=True)
        except (GoneError, OSError) as error:
            return ToolResult(text=f"Error: the MCP server {self.name} {error}", failed=True)
        return ToolResult(text=str(answer["text"]), failed=bool(answer["failed"]))

    def close(self) -> None:
        """Kills the server and its client's process, and ends the calls that wait for them."""
        self._end("was ended")

    async def _ensure_open(self) -> None:
        """Starts the server again if it is gone.  GoneError: it cannot be."""
        async with self._opening:
            if self._process is None:
                if time.monotonic() - self._failed_at < AGAIN_S and self._failure:
                    raise GoneError(self._failure)
                try:
                    await asyncio.to_thread(self.tools)
                except GoneError as error:
                    self._failed_at = time.monotonic()
                    self._failure = str(error)
                    raise
                self._failure = ""
            if self._writer is None:
                assert self._process is not None
                reader, self._writer = await self._process.streams()
                self._reading = asyncio.create_task(self._read(reader))

    async def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer to ``request``.  GoneError; TimeoutError: it took longer than ``limit_s``."""
        number = next(self._numbers)
        writer = self._writer
        if writer is None:
            raise GoneError("was ended")
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
            async with asyncio.timeout(limit_s):
                await writer.drain()
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            if not writer.is_closing():
                writer.write(json.dumps({"cancel": number}).encode() + b"\n")
            raise
        finally:
            self._waiting.pop(number, None)

    async def _end_if_silent(self) -> None:
        """Kills a server that does not answer anything any more."""
        try:
            await self._ask({"check": True}, CHECK_S)
        except TimeoutError:
            self._warn_and_end("did not answer")
        except (GoneError, OSError):
            pass  # the reader has seen it

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands each answer to who waits for it, until the process is gone."""
        problem = "ended"
        try:
            while line := await reader.readline():
                answer = read_json(line)
                if "gone" in answer:
                    problem = f"ended: {redacted(str(answer['gone']))[:MAX_ERROR]}"
                    break
                if (waits := self._waiting.get(answer["id"])) is not None and not waits.done():
                    waits.set_result(answer)
        except (OSError, ValueError, LookupError) as error:
            problem = f"gave no answer ({error})"
        self._warn_and_end(problem)

    def _warn_and_end(self, problem: str) -> None:
        if self._process is not None and not self._failure:
            logger.warning("the MCP server %s %s; the next call starts it again", self.name, problem)
        self._end(problem)

    def _end(self, problem: str) -> None:
        process = self._process
        self._process = None
        writer = self._writer
        self._writer = None
        reading = self._reading
        self._reading = None
        for waits in self._waiting.values():
            if not waits.done() and not waits.get_loop().is_closed():
                waits.set_exception(GoneError(problem))
        if writer is not None and not writer.transport.is_closing():
            with suppress(RuntimeError):  # the event loop has ended before
                writer.close()
        if reading is not None and reading is not _current_task() and not reading.get_loop().is_closed():
            reading.cancel()
        if process is not None:
            process.end()


def mcp_tools(path: str | None, servers: list[McpServer], limit_s: float) -> Iterator[tuple[str, str, Any]]:
    """(key, name, what makes it) of each tool of the servers that the file at ``path`` names.

    servers: grows by those that are started, for the caller to close.  limit_s: of a call.
    ConfigError: with every server that cannot be used.
    """
    if path is None:
        return
    given = _read(path)
    if importlib.util.find_spec("mcp") is None:
        remedy = pip_line("mcp")
        raise ConfigError([Violation(KEY, path, "the package mcp is not installed", remedy)])
    violations = list[Violation]()
    made = list[tuple[str, str, Any]]()
    for name, fields in given.items():
        try:
            server = McpServer(name, _resolved(name, fields))
            servers.append(server)
            schemas = {str(each["function"]["name"]): each for each in server.tools()}
            for tool in fields.get("tools") or schemas:
                if tool not in schemas:
                    problem = f"server {name} has no tool {tool}; it has {', '.join(schemas) or 'none'}"
                    raise ConfigError([Violation(KEY, path, problem, "Name its tools, or leave tools out")])
                Draft202012Validator.check_schema(schemas[tool]["function"]["parameters"])
                make = lambda server=server, schema=schemas[tool]: McpTool(server, schema, limit_s)  # noqa: E731
                made.append((KEY, f"{name}: {tool}", make))
        except ConfigError as error:
            violations += error.violations
        except GoneError as error:
            violations.append(Violation(KEY, path, f"server {name} {error}", "Correct it, or leave it out"))
        except (SchemaError, RecursionError) as error:
            problem = f"server {name}: the schema of a tool is none: {str(error).splitlines()[0]}"
            violations.append(Violation(KEY, path, problem, "Correct the server, or name its other tools"))
    if violations:
        raise ConfigError(violations)
    yield from made


def _read(path: str) -> dict[str, dict[str, Any]]:
    """The servers of the file: yaml, of which JSON is a part.  ConfigError: with everything that is wrong."""
    try:
        given = yaml.safe_load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))["mcpServers"]
        entries = {str(name): dict(fields) for name, fields in given.items()}
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError, AttributeError) as error:
        problem = f"names no MCP servers ({type(error).__name__}: {error})"
        raise ConfigError([Violation(KEY, path, problem, FORM)]) from error
    violations = list[Violation]()
    for name, fields in entries.items():
        if ("command" in fields) == ("url" in fields):
            violations.append(Violation(KEY, path, f"server {name} has no command or url, or both", FORM))
        if unknown := sorted(fields.keys() - FIELDS):
            violations.append(Violation(KEY, path, f"server {name} has {', '.join(map(str, unknown))}", FORM))
        kinds = {
            "command": str,
            "url": str,
            "cwd": str,
            "type": str,
            "args": list,
            "tools": list,
            "env": dict,
            "headers": dict,
        }
        wrong = [
            key for key, kind in kinds.items() if fields.get(key) is not None and not isinstance(fields[key], kind)
        ]
        if wrong:
            violations.append(Violation(KEY, path, f"server {name}: {', '.join(wrong)} of another type", FORM))
    if violations:
        raise ConfigError(violations)
    return entries


def _resolved(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the client needs.  ``${VARIABLE}`` in env, headers and args is the environment's: only so it is given."""

    def value(text: Any) -> str:
        asked = _VARIABLE.findall(str(text))
        environ = without_secrets(asked)  # the secrets that are asked for are there
        for variable in asked:
            if variable not in environ:
                problem = f"server {name} asks for ${{{variable}}}, which is not set"
                raise ConfigError([Violation(KEY, variable, problem, "Set it in the environment of the run")])
        return _VARIABLE.sub(lambda match: environ[match[1]], str(text))

    given = {key: str(fields[key]) for key in ("command", "url", "cwd") if fields.get(key) is not None}
    mapped = {
        key: {str(each): value(text) for each, text in fields[key].items()}
        for key in ("env", "headers")
        if fields.get(key)
    }
    arguments = {"args": [value(each) for each in fields["args"]]} if fields.get("args") else {}
    return {**given, **mapped, **arguments}


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
