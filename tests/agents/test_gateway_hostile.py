"""What strangers and hostile programs send to the gateway: it costs them an answer, or their own episode."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import aiohttp
import openai
import pytest

from mcore_rl.agents import connections, gateway
from mcore_rl.agents.connections import MAX_STRANGERS
from mcore_rl.agents.openai_requests import read_message
from mcore_rl.ground.errors import RolloutError
from tests.agents.test_gateway import ASK, TOOLS, post, served
from tests.support.awaited import awaited
from tests.support.chat_styles import style


def deep(depth: int) -> Any:
    """An object with ``depth`` objects within each other."""
    return json.loads('{"a":' * depth + "1" + "}" * depth)


@awaited
async def test_a_request_that_fails_ends_the_run_of_its_program_and_nothing_else() -> None:
    def fail(turn: int) -> str:
        raise RolloutError("engine 0 failed while generating 1 samples: UnicodeEncodeError: surrogates not allowed")

    async with served(fail) as one:
        with pytest.raises(openai.InternalServerError, match="UnicodeEncodeError"):
            await one.say(ASK)
        conversations = one.access.conversations
        assert conversations.failure.result() is None  # no error of the run's
        assert "UnicodeEncodeError" in conversations.problem and not conversations.turns


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": ASK, "stop": ["\ud800"]}, "stop"),
        ("chat/completions", {"messages": ASK, "stop": "a\udfff"}, "stop"),
        ("chat/completions", {"messages": ASK, "stop": ["x" * 1_000_000]}, "stop"),
        ("completions", {"prompt": "a", "stop": "\ud800"}, "stop"),
        ("completions", {"prompt": "a \ud800 b"}, "prompt"),
        ("completions", {"prompt": [10**400]}, "prompt"),
        ("chat/completions", {"messages": ASK, "tools": [{**TOOLS[0], "more": deep(900)}]}, None),
        ("chat/completions", {"messages": ASK, "metadata": deep(900)}, None),
        ("chat/completions", {"messages": ASK, "max_tokens": 10**400}, "max_tokens"),
        ("episode/reward", {"reward": 10**400}, "reward"),
        ("episode/reward", {"reward": -(10**400)}, "reward"),
    ],
)
@awaited
async def test_a_hostile_request_is_refused(path: str, body: Any, param: str | None) -> None:
    async with served(["a"]) as one:
        status, said = await post(one.url, one.access.key, path, json.dumps(body).encode())
        assert (status, said["error"]["param"]) == (400, param), said
        assert not one.access.conversations.turns and not one.access.conversations.failure.done()


@pytest.mark.parametrize("deep_text", ['{"a":' * 900 + "1" + "}" * 900, "[" * 950 + "]" * 950])
@awaited
async def test_arguments_that_nest_too_deep_are_the_text_that_they_are(deep_text: str) -> None:
    """A model may have written them, and the program sends them back."""
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": deep_text}}
    said = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "no"}]
    async with served(["a"], prompt=20_000) as one:
        assert (await one.say(said, tools=TOOLS)).choices[0].message.content == "a"
        (episode,) = one.episodes()
        assert deep_text in style("qwen2.5").decode(episode.segments[0].tokens).replace(" ", "")


def test_json_that_nests_deep_is_told_from_what_does_not() -> None:
    for depth, is_text in ((63, False), (64, False), (65, True), (900, True)):
        function = {"name": "a", "arguments": "[" * depth + "]" * depth}
        message = read_message({"role": "assistant", "tool_calls": [{"function": function}]})
        assert isinstance(message["tool_calls"][0]["function"]["arguments"], str) is is_text, depth


@pytest.mark.parametrize(
    ("packing", "packed"),
    [
        ("gzip", b"no gzip at all"),
        ("gzip", gzip.compress(b'{"messages": []}', mtime=0)[:-9]),
        ("deflate", b"\xff" * 64),
    ],
)
@awaited
async def test_a_body_that_is_packed_wrongly_is_refused(packing: str, packed: bytes) -> None:
    async with served(["a"]) as one, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {one.access.key}", "Content-Encoding": packing}
        async with session.post(f"{one.url}/chat/completions", data=packed, headers=headers) as answer:
            assert answer.status == 400


@awaited
async def test_a_packed_body_is_as_large_as_what_is_in_it() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    async with served(["a"]) as one, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {one.access.key}", "Content-Encoding": "gzip"}
        async with session.post(f"{one.url}/chat/completions", data=bomb, headers=headers) as answer:
            assert answer.status == 413


async def half_requests(url: str, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = int(url.rpartition(":")[2].partition("/")[0])
    opened = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        opened.append((reader, writer))
    return opened


@awaited
async def test_half_requests_of_strangers_are_few_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 3600.0)
    async with served(["a", "b"]) as one:
        opened = await half_requests(one.url, MAX_STRANGERS + 200)
        while one.gateway.connections.count < MAX_STRANGERS:
            await asyncio.sleep(0.05)
        assert (await one.say(ASK)).choices[0].message.content == "a"
        assert one.gateway.connections.count <= MAX_STRANGERS + 1
        for _, writer in opened:
            writer.close()
        monkeypatch.setattr(connections, "STRANGER_S", 0.5)
        opened = await half_requests(one.url, 20)
        begun = time.monotonic()
        while one.gateway.connections.count > 1:  # that of the program
            assert time.monotonic() < begun + 20
            await asyncio.sleep(0.05)
        assert (await one.say([*ASK, {"role": "assistant", "content": "a"}, *ASK])).choices[0].message.content == "b"
        for _, writer in opened:
            writer.close()


@awaited
async def test_a_connection_is_a_strangers_again_when_its_episode_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.2)
    async with (
        served(["a"]) as one,
        one.gateway.opened(one.access.conversations, takes_reward=True) as other,
        openai.AsyncOpenAI(base_url=one.url, api_key=other.key) as client,
    ):
        assert [each.id async for each in client.models.list()] == ["policy"]
        await asyncio.sleep(0.5)
        assert one.gateway.connections.count == 1
        one.gateway.connections.forget(other)
        await asyncio.sleep(0.5)
        assert one.gateway.connections.count == 0


@awaited
async def test_one_key_has_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_OF_ONE", 2)
    async with served(["a"]) as one:
        sessions = [aiohttp.ClientSession(headers={"Authorization": f"Bearer {one.access.key}"}) for _ in range(3)]
        try:
            statuses = []
            for session in sessions:
                async with session.get(f"{one.url}/models") as answer:
                    statuses.append(answer.status)
        finally:
            for session in sessions:
                await session.close()
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize("word", ["hello ", "a", " ", "\n", "é", "𝄞"])
@awaited
async def test_a_long_text_is_refused_before_all_of_it_is_tokenized(word: str) -> None:
    tokenizer, asked = style("qwen2.5"), 0
    encode = tokenizer._encode_plus

    def counted(text: str, *args: Any, **more: Any) -> Any:
        nonlocal asked
        asked += len(text)
        return encode(text, *args, **more)

    text = word * (1_500_000 // len(json.dumps(word)))
    async with served(["a"]) as one:
        conversations = one.access.conversations
        tokenizer._encode_plus = counted
        try:
            for path, body in (
                ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("chat/completions", {"messages": [{"role": "assistant", "content": text}, *ASK]}),
                ("completions", {"prompt": text}),
            ):
                status, said = await post(one.url, one.access.key, path, json.dumps(body).encode())
                assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        finally:
            del tokenizer._encode_plus
        assert not conversations._prompts
    assert asked < 1_000_000


@awaited
async def test_refused_conversations_leave_nothing() -> None:
    async with served(["a"] * 3, prompt=60, max_turns=2) as one:
        conversations = one.access.conversations
        for number in range(20):
            with pytest.raises(openai.BadRequestError):
                await one.say([{"role": "user", "content": f"{number} " * 100}])
        assert len(conversations._prompts) == 0
        for number in range(2):
            await one.say([{"role": "user", "content": f"{number}"}])
        for number in range(20):
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                await one.say([{"role": "user", "content": f"more {number}"}])
        assert len(conversations._prompts) == 2


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer mcore-rl-PUBLIC-\xff\xfe\r\n\r\n", b"401"),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n", b"401"),
        (b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\n", b"400"),
        (b"\x00\x16\x03\x01 nonsense\r\n\r\n", b"400"),
    ],
)
@awaited
async def test_strangers_write_nothing_into_the_log(
    sent: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(["a"]) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rpartition(":")[2].partition("/")[0]))
        writer.write(sent.replace(b"PUBLIC", one.access.key.split("-")[2].encode()))
        assert (await reader.read(100)).split()[1] == status
        writer.close()
    assert not [each for each in caplog.records if each.name != "asyncio"]


@awaited
async def test_our_failures_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway, "chat_request", fail)
    async with served(["a"]) as one:
        for _ in range(5):
            assert (await post(one.url, one.access.key, "chat/completions", b"{}"))[0] == 500
    assert len([each for each in caplog.records if "ZeroDivisionError" in each.getMessage()]) == 1
