"""An MCP server whose tools a test calls: stdio, or http on the port that it is given."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def environment(name: str) -> str:
    """The value of a variable."""
    return os.environ.get(name, "(not set)")


@server.tool()
def fails() -> str:
    """Raises an error."""
    raise ValueError("no such day")


@server.tool()
async def sleeps(seconds: float) -> str:
    """Waits, and lets others be served."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def process() -> str:
    """The id of this process."""
    return str(os.getpid())


@server.tool()
async def blocks() -> str:
    """Never lets anybody be served again."""
    time.sleep(1000)
    return ""


@server.tool()
def dies() -> str:
    """Ends the process."""
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def floods(megabytes: int) -> str:
    """Prints to both outputs, where only messages belong."""
    for _ in range(megabytes):
        os.write(2, b"e" * (1 << 20))
        os.write(1, b"o" * (1 << 20))
    return "flooded"


@server.tool()
def large(megabytes: int) -> str:
    """A long answer."""
    return "x" * (megabytes << 20)


@server.tool()
def forks() -> str:
    """Starts a process that stays."""
    return str(subprocess.Popen(["sleep", "1000"]).pid)


@server.tool()
def daemon(file: str) -> str:
    """Starts a daemon: a process of a session of its own, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(3):
                os.close(number)
            with open(file, "w") as written:
                written.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    while not (os.path.exists(file) and os.path.getsize(file)):
        time.sleep(0.01)
    with open(file) as written:
        return written.read()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
