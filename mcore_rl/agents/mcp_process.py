"""The client of one MCP server, in a process of its own that ``mcp_servers`` starts and kills.

The ``mcp`` package is imported here alone.  What a server sends or prints is read here: however much it is, the
controller reads answers of limited length.

Protocol: JSON lines over a socket.  {server} is answered with {tools} or {error}; then {id, tool, arguments} with
{id, text, failed}, {id, check} with {id} once the server answers at all, and {cancel: id} with nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TextIO

from mcore_rl.processes.guarding import LINE

MAX_TEXT = 1 << 20  # characters of a result
MAX_TAIL = 2000  # bytes of what a server said last
LAST_WORDS_S = 2.0  # for what a server that is gone said last to arrive
MAX_MEMORY = 4 << 30  # bytes of this process, once the server has been started, so that it is not the server's limit


class Tail:
    """What a server writes to its standard error, ``errors``: the last of it is kept."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.errors = os.fdopen(writing, "w")
        self._last = b""
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def last_line(self) -> str:
        """The last line that says something, of a server that has gone or is given up.

        Waits at most ``LAST_WORDS_S`` for what is still in the pipe: a daemon of the server may hold it open.
        """
        self.errors.close()
        self._reader.join(LAST_WORDS_S)
        lines = [line for line in self._last.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def _read(self, descriptor: int) -> None:
        while part := os.read(descriptor, 1 << 16):
            self._last = (self._last + part)[-MAX_TAIL:]


def main(descriptor: int) -> None:
    """Serves the socket ``descriptor`` until it is closed or the server is gone; the guard above ends what is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)  # type: ignore[union-attr]
    given = json.loads(await reader.readline())["server"]
    tail = Tail()

    def say(answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")

    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(_client(given, tail.errors, stack))
            tools = await _tools(client)
        except BaseException as error:  # noqa: BLE001  whatever the server does
            say({"error": f"{_said(error)}. {tail.last_line()}".strip()})
            await writer.drain()
            return
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        say({"tools": tools})
        running = dict[int, asyncio.Task[None]]()
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" in asked:
                if (task := running.get(asked["cancel"])) is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(_answer(client, asked, say, tail))
            running[asked["id"]] = task
            task.add_done_callback(lambda _, number=asked["id"]: running.pop(number, None))  # type: ignore[misc]


def _client(given: dict[str, Any], errors: TextIO, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
    """The client of a server of ``mcpServers``: {url, headers} or {command, args, env, cwd}."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if "url" in given:
        http = create_mcp_http_client(headers=given.get("headers") or {})
        stack.push_async_callback(http.aclose)
        return Client(streamable_http_client(given["url"], http_client=http))
    # Its environment is that of ``env`` and a few harmless variables of ours (HOME, PATH, USER ...).
    return Client(stdio_client(StdioServerParameters(**given), errlog=errors))


async def _tools(client: Any) -> list[dict[str, Any]]:
    """The schemas of all tools, in OpenAI's form."""
    schemas = list[dict[str, Any]]()
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schemas.append({"type": "function", "function": function})
        if not page.next_cursor or page.next_cursor == cursor:
            return schemas
        cursor = page.next_cursor


async def _answer(client: Any, asked: dict[str, Any], say: Any, tail: Tail) -> None:
    number = asked["id"]
    try:
        if "check" in asked:
            await client.session.list_tools()
            say({"id": number})
            return
        result = await client.call_tool(asked["tool"], asked["arguments"])
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        say({"id": number, "text": "\n".join(parts)[:MAX_TEXT], "failed": bool(result.is_error)})
        return
    except Exception as error:  # noqa: BLE001  whatever the server does
        problem = _said(error)
    try:  # an error of the call, or has the server gone?
        await asyncio.wait_for(client.session.list_tools(), 5)
    except Exception:  # noqa: BLE001
        problem = f"the server is gone ({problem}). {tail.last_line()}".strip()
        say({"gone": problem[:MAX_TEXT]})
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        say({"id": number, "text": f"Error: {problem}"[:MAX_TEXT], "failed": True})


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
