"""Runs a user's program for each episode of the loop ``program``, with the gateway as its model.

The program is a process of its own, which begins anew for each episode, or a service that runs already.  It has the
environment without the run's secrets, the gateway's URL and a key of its own; the row is JSON on its standard input.
However it ends, what it started ends with it (``processes.guard``).

Invariant: a program that fails, hangs, forks or prints without end costs its own episode, and no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.agents import program_function
from mcore_rl.agents.conversations import Conversations
from mcore_rl.agents.function_process import absolute
from mcore_rl.agents.session import (
    ABORTED,
    ANSWERED,
    PROGRAM_FAILED,
    PROGRAM_NO_REWARD,
    PROGRAM_NO_TURNS,
    PROGRAM_TIMEOUT,
)
from mcore_rl.config.agent import ProgramConfig, ProgramReward
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.json_text import read_json
from mcore_rl.ground.secrets import redacted, without_secrets
from mcore_rl.processes.guarding import guarded
from mcore_rl.rewards.score import NotANumberError, Score, finite
from mcore_rl.rollout.episodes import Episode, FinishReason

if TYPE_CHECKING:
    from mcore_rl.agents.gateway import Access, Gateway

TAIL = 16 << 10  # bytes of what a program prints that are kept
MAX_RESULT = 1 << 20  # bytes of a service's answer
LOOK_S = 1.0  # between two looks at the time of a program, which stands still while the model draws
SERVICE_S = 31536000.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended by itself.  problem: what went wrong; "".  result: what it said last, JSON or text."""

    problem: str = ""
    result: Any = None


class Programs:
    """Runs the programs of one run, ``config.max_parallel`` at a time."""

    def __init__(self, config: ProgramConfig, gateway: Callable[[], Gateway]) -> None:
        self._config = config
        self._make_gateway = gateway
        self._room = asyncio.Semaphore(config.max_parallel)
        self._gateway: Gateway | None = None
        self._told = set[str]()
        self._running = set[_Process]()

    async def run(self, begin: Callable[[], Conversations]) -> list[Episode]:
        """The episodes of one run of the program, its main one first.  begin: makes its conversations.

        With a reward of the program's they have a score.  Raises what ended the engines.
        """
        async with self._room:
            if self._gateway is None:
                self._gateway = self._make_gateway()
            url = await self._gateway.start()
            conversations = begin()
            takes = self._config.reward is not ProgramReward.grader
            async with self._gateway.opened(conversations, takes_reward=takes) as access:
                ended = await self._limited(self._ended(conversations.row, access, url), conversations)
            if conversations.failure.done():
                conversations.failure.result()
            return self._episodes(conversations, access, ended)

    def close(self) -> None:
        """Ends every program, and the gateway."""
        if self._gateway is not None:
            self._gateway.stop()
        for process in list(self._running):
            process.end()

    async def _limited(self, running: Awaitable[ProgramEnd], conversations: Conversations) -> ProgramEnd | None:
        """How the program ended; None: it was ended, since its time is over or the engines failed."""
        task = asyncio.ensure_future(running)
        try:
            while not task.done() and not conversations.failure.done():
                left_s = self._config.timeout_s - conversations.seconds
                if left_s <= 0:
                    return None
                both: list[asyncio.Future[Any]] = [task, conversations.failure]
                await asyncio.wait(both, timeout=min(left_s, LOOK_S), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _episodes(self, conversations: Conversations, access: Access, ended: ProgramEnd | None) -> list[Episode]:
        limit = conversations.limit
        problem = ""
        reason = ANSWERED
        end = FinishReason.stop
        if limit == ABORTED:
            reason = ABORTED
            end = FinishReason.abort
        elif conversations.problem:
            reason = PROGRAM_FAILED
            end = FinishReason.abort
            problem = conversations.problem
        elif ended is None:
            reason = PROGRAM_TIMEOUT
            end = FinishReason.length
            problem = f"it ran longer than {self._config.timeout_s:g} s (rollout.agent.program.timeout_s)"
        elif ended.problem and limit:
            reason = limit
            end = FinishReason.length
        elif ended.problem:
            reason = PROGRAM_FAILED
            end = FinishReason.abort
            problem = ended.problem
        if not conversations.turns and end is not FinishReason.abort:
            reason = PROGRAM_NO_TURNS
            end = FinishReason.abort
            problem = problem or "it ended without a turn of the model. Use OPENAI_BASE_URL and OPENAI_API_KEY"
        score = None
        if self._config.reward is not ProgramReward.grader and end is not FinishReason.abort:
            reward = access.reward if access.reward is not None else reward_in(None if ended is None else ended.result)
            if reward is None and end is FinishReason.stop:
                reason = PROGRAM_NO_REWARD
                end = FinishReason.abort
                problem = "it ended without a reward. Print {reward: 0.5} last, or POST it to /v1/episode/reward"
            score = Score(reward or 0.0, parts={"program": reward or 0.0})
        if problem:
            self._tell(reason, conversations.row, problem)
        episodes = conversations.episodes(reason, end)
        return episodes if score is None or end is FinishReason.abort else [each.with_score(score) for each in episodes]

    async def _ended(self, row: PromptRow, access: Access, url: str) -> ProgramEnd:
        told = json.dumps(row_told(row, access.conversations), default=str).encode()
        if self._config.url is not None:
            return await self._served(self._config.url, told, access, url)
        try:
            async with self._started(access, url) as process:
                return await process.talk(told)
        except OSError as error:  # as without descriptors or processes
            return ProgramEnd(problem=f"it cannot be started: {error}")

    async def _served(self, service: str, told: bytes, access: Access, url: str) -> ProgramEnd:
        """What a service answers that is sent ``{row, base_url, api_key}``."""
        import aiohttp

        body = json.dumps({"row": json.loads(told), "base_url": url, "api_key": access.key})
        headers = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=SERVICE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.post(service, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                text = (await answer.content.read(MAX_RESULT)).decode(errors="replace")
                if answer.status >= 300:
                    return ProgramEnd(problem=f"{service} answered {answer.status}: {text[-500:]}")
                return ProgramEnd(result=_json(text))
        except (aiohttp.ClientError, OSError) as error:
            return ProgramEnd(problem=f"{service}: {type(error).__name__}: {error}")

    @asynccontextmanager
    async def _started(self, access: Access, url: str) -> AsyncIterator[_Process]:
        """The program; it and all that it started are gone afterwards."""
        config = self._config
        command = list(config.command)
        if config.function is not None:
            command = [sys.executable, "-P", program_function.__file__, absolute(config.function)]
        process = _Process(await _start(command, environment(config, url, access.key)))
        self._running.add(process)
        try:
            yield process
        finally:
            process.end()
            self._running.discard(process)
            await asyncio.shield(process.gone())

    def _tell(self, reason: str, row: PromptRow, problem: str) -> None:
        """Warns of the first failure of its kind; the metric counts them all."""
        if reason not in self._told:
            self._told.add(reason)
            said = redacted(problem)
            logger.warning("%s: %s: %s. Others are not told (agent/end/%s)", row.id, reason, said, reason)


class _Process:
    """A program that runs below its guard.  started: the guard, and the end of the pipe that keeps the program."""

    def __init__(self, started: tuple[asyncio.subprocess.Process, int]) -> None:
        self._guard, self._alive = started
        self._ended = False

    async def talk(self, told: bytes) -> ProgramEnd:
        """Gives it ``told``, and waits for its end."""
        guard = self._guard
        assert guard.stdin is not None and guard.stdout is not None and guard.stderr is not None
        said, complained, _, code = await asyncio.gather(
            _tail(guard.stdout), _tail(guard.stderr), _give(guard.stdin, told), guard.wait()
        )
        if code != 0:
            tail = complained.decode(errors="replace").strip()[-500:]
            return ProgramEnd(problem=f"its exit code is {code}: {tail}")
        lines = said.decode(errors="replace").strip().splitlines()
        return ProgramEnd(result=_json(lines[-1]) if lines else None)

    def end(self) -> None:
        """Has the guard kill it."""
        if not self._ended:
            self._ended = True
            os.close(self._alive)

    async def gone(self) -> None:
        """Waits until it has ended."""
        for stream in (self._guard.stdout, self._guard.stderr):
            if stream is not None:
                with suppress(OSError):
                    await _tail(stream)
        await self._guard.wait()


def environment(config: ProgramConfig, url: str, key: str) -> dict[str, str]:
    """What a program finds in its environment: no secrets but those of ``config.env``, and its own."""
    host = url.removeprefix("http://").partition("/")[0].rpartition(":")[0]
    made = without_secrets(config.env) | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "PYTHONUNBUFFERED": "1"}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the environment's does not lead to this machine
        made[name] = ",".join(filter(None, (made.get(name), host.strip("[]"))))
    return made


def row_told(row: PromptRow, conversations: Conversations) -> dict[str, Any]:
    """What a program is told of a row: ``prompt`` is its messages."""
    return {
        "id": row.id,
        "sample": conversations.index,
        "prompt": row.messages,
        "data_source": row.data_source,
        "ground_truth": row.ground_truth,
        "extra_info": row.extra_info,
        **{name: value for name, value in row.columns.items() if name not in ("id", "sample", "prompt")},
    }


def reward_in(result: Any) -> float | None:
    """The reward in what a program said last: a number, or ``{"reward": ...}``; None: there is none."""
    value = result.get("reward") if isinstance(result, Mapping) else result
    if value is None or isinstance(value, (str, list, dict)):
        return None
    try:
        return finite(value, "reward")
    except NotANumberError:
        return None


async def _start(command: list[str], variables: dict[str, str]) -> tuple[asyncio.subprocess.Process, int]:
    """(the guard of ``command``, the end of the pipe that keeps it)."""
    reading, writing = os.pipe()
    try:
        pipe = asyncio.subprocess.PIPE
        guard = await asyncio.create_subprocess_exec(
            *guarded(command, reading),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[reading],
            env=variables,
            start_new_session=True,
            limit=TAIL,
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return guard, writing


async def _give(stream: asyncio.StreamWriter, told: bytes) -> None:
    with suppress(ConnectionError):  # it does not read
        stream.write(told)
        await stream.drain()
    stream.close()
    with suppress(ConnectionError):
        await stream.wait_closed()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The last ``TAIL`` bytes of all that comes; the rest is read and dropped."""
    kept = b""
    while piece := await stream.read(1 << 16):
        kept = (kept + piece)[-TAIL:]
    return kept


def _json(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
