"""Tools of a real MCP server over stdio and http: what it does, and what it does to us when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from mcore_rl.agents import mcp_servers
from mcore_rl.agents.episode_calls import EpisodeCalls
from mcore_rl.agents.function_process import FunctionProcesses
from mcore_rl.agents.mcp_servers import McpServer
from mcore_rl.agents.tool_loading import load_tools
from mcore_rl.agents.tools import ToolCall, ToolResult, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError
from tests.support import mcp_server as source
from tests.support.awaited import awaited

pytestmark = [pytest.mark.tier("ci")]  # each test starts two processes
STDIO = {"command": sys.executable, "args": [source.__file__]}
SERVERS: list[McpServer] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    below = [
        each
        for server in SERVERS
        if server._process
        for each in psutil.Process(server._process._guard.pid).children(recursive=True)
    ]
    while SERVERS:
        SERVERS.pop().close()
    assert not psutil.wait_procs(below, timeout=5)[1]


def tools_of(tmp_path: Path, limit_s: float = 20.0, **servers: dict[str, Any]) -> ToolSet:
    path = tmp_path / "mcp.yaml"
    path.write_text(yaml.safe_dump({"mcpServers": servers}))
    config = AgentConfig(mcp_config_path=str(path), tool_timeout_s=limit_s)
    return load_tools(config, CodeConfig(), FunctionProcesses(1, 5.0), SERVERS)


def refusal(tmp_path: Path, **servers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tools_of(tmp_path, **servers)
    return str(caught.value)


async def called(tools: ToolSet, tool: str, **arguments: Any) -> ToolResult:
    calls = EpisodeCalls(tools, AgentConfig(max_tool_response_length=1000), "e", {})
    (result,) = await calls.run([ToolCall(name=tool, arguments=json.dumps(arguments))])
    return result


@pytest.mark.tier("test")
@awaited
async def test_the_servers_tools_are_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    monkeypatch.setenv("FOR_THE_SERVER", "given")
    own = {"env": {"ASKED": "${FOR_THE_SERVER}"}, "tools": ["add", "environment", "fails", "large"]}
    tools = tools_of(tmp_path, tests=STDIO | own)
    assert list(tools.tools) == ["add", "environment", "fails", "large"]
    function = tools.schemas[0]["function"]
    assert function["description"] == "Adds two numbers." and function["parameters"]["required"] == ["a", "b"]
    assert await called(tools, "add", a=2, b=3) == ToolResult(text="5")
    wrong = await called(tools, "add", a="two", b=3)
    assert wrong.failed and 'a is "two", not of type integer' in wrong.text
    assert (await called(tools, "environment", name="ASKED")).text == "given"
    for hidden in ("WANDB_API_KEY", "FOR_THE_SERVER"):
        assert (await called(tools, "environment", name=hidden)).text == "(not set)"
    failed = await called(tools, "fails")
    assert failed.failed and "fails" in failed.text
    long = await called(tools, "large", megabytes=3)
    assert len(long.text) < 1100 and not long.failed


@awaited
async def test_a_server_that_dies_ends_its_calls_and_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = tools_of(tmp_path, tests=STDIO)
    before = (await called(tools, "process")).text
    calls = EpisodeCalls(tools, AgentConfig(), "e", {})
    slow, dead = await calls.run([ToolCall(name="sleeps", arguments='{"seconds": 1000}'), ToolCall(name="dies")])
    for result in (slow, dead):
        assert result.failed and "the MCP server tests ended" in result.text and "out of luck" in result.text
    after = await called(tools, "process")
    assert not after.failed and after.text != before and not psutil.pid_exists(int(before))
    os.kill(int(after.text), signal.SIGKILL)
    assert "the MCP server tests ended" in (await called(tools, "sleeps", seconds=1000)).text
    assert (await called(tools, "add", a=1, b=1)).text == "2"
    assert len(caplog.records) == 2 and "the next call starts it again" in caplog.text


@awaited
async def test_a_daemon_of_a_server_ends_with_it(tmp_path: Path) -> None:
    tools = tools_of(tmp_path, tests=STDIO)
    daemons = [int((await called(tools, "daemon", file=str(tmp_path / f"{number}"))).text) for number in range(2)]
    assert all(psutil.pid_exists(each) for each in daemons)
    await called(tools, "dies")
    begun = time.monotonic()
    while any(psutil.pid_exists(each) for each in daemons):
        assert time.monotonic() < begun + 20
        await asyncio.sleep(0.05)


@pytest.mark.tier("full")
@awaited
async def test_a_slow_call_ends_alone_and_a_server_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "CHECK_S", 1.0)
    tools = tools_of(tmp_path, limit_s=1.0, tests=STDIO)
    before = (await called(tools, "process")).text
    slow = await called(tools, "sleeps", seconds=1000)
    assert slow.failed and slow.text == "Error: the tool took longer than 1 s"
    assert (await called(tools, "process")).text == before
    forked = (await called(tools, "forks")).text
    assert (await called(tools, "blocks")).text == "Error: the tool took longer than 1 s"
    assert (await called(tools, "add", a=1, b=1)).text == "2"
    assert not psutil.pid_exists(int(before)) and not psutil.pid_exists(int(forked))


@pytest.mark.tier("full")
@awaited
async def test_what_a_server_prints_reaches_neither_us_nor_the_log(tmp_path: Path) -> None:
    tools = tools_of(tmp_path, limit_s=5.0, tests=STDIO)
    before = psutil.Process().memory_info().rss
    flooded = await called(tools, "floods", megabytes=200)
    assert flooded.failed or flooded.text == "flooded"
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert (await called(tools, "add", a=1, b=1)).text == "2"


@pytest.mark.tier("full")
@awaited
async def test_a_server_that_cannot_start_again_is_named_and_not_tried_at_every_call(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(Path(source.__file__).read_text())
    tools = tools_of(tmp_path, tests=STDIO | {"args": [str(program)]})
    program.write_text("import sys; sys.exit('broken today')")
    assert "ended" in (await called(tools, "dies")).text
    begun = time.monotonic()
    texts = [(await called(tools, "add", a=1, b=1)).text for _ in range(5)]
    assert time.monotonic() - begun < 30
    assert all("the MCP server tests cannot be started" in text and "broken today" in text for text in texts)


@pytest.mark.tier("full")
@awaited
async def test_over_http(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, source.__file__, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        tools = tools_of(tmp_path, tests={"url": f"http://127.0.0.1:{port}/mcp", "tools": ["add", "sleeps"]})
        assert (await called(tools, "add", a=40, b=2)).text == "42"
        process.kill()
        process.wait()
        gone = await called(tools, "add", a=1, b=1)
        assert gone.failed and "the MCP server tests" in gone.text
    finally:
        process.kill()
        process.wait()


def test_everything_wrong_with_the_servers_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, one={}, two={"command": "x", "url": "http://y"}, three={"command": "x", "args": "a"},
                   four={"command": "x", "unheard": 1})  # fmt: skip
    assert "4 problems" in said and "server one has no command or url" in said and "server four has unheard" in said
    said = refusal(
        tmp_path, missing={"command": "/no/such/program"}, wrong=STDIO | {"tools": ["nonesuch"]},
        asks=STDIO | {"env": {"KEY": "${NOT_SET_ANYWHERE}"}}, says={"command": "sh", "args": ["-c", "echo no >&2"]},
    )  # fmt: skip
    assert "4 problems" in said and "server missing cannot be started" in said
    assert "has no tool nonesuch; it has add, environment" in said and "asks for ${NOT_SET_ANYWHERE}" in said
    assert "server says cannot be started" in said and ". no. " in said
    path = tmp_path / "none.yaml"
    path.write_text("servers: []")
    with pytest.raises(ConfigError, match="names no MCP servers"):
        load_tools(AgentConfig(mcp_config_path=str(path)), CodeConfig(), FunctionProcesses(1, 5.0), [])


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers.importlib.util, "find_spec", lambda name: None)
    assert "the package mcp is not installed. pip install 'mcp<3,>=2.3'" in refusal(tmp_path, tests=STDIO)


@pytest.mark.tier("full")
def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    assert "there is another tool add" in refusal(
        tmp_path, one=STDIO | {"tools": ["add"]}, two=STDIO | {"tools": ["add"]}
    )
