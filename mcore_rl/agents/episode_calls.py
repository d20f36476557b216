"""The calls of one episode: checked, run side by side, limited in time, and ended with the episode.

Invariant: whatever a call is and whatever its tool does, it has a result; only ``CancelledError`` passes through.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

from mcore_rl.agents.limited import limited
from mcore_rl.agents.tools import EpisodeTool, ToolCall, ToolResult, ToolSet, result_of
from mcore_rl.config.agent import AgentConfig, CutSide
from mcore_rl.ground.secrets import redacted
from mcore_rl.rewards.score import finite

CUT = "...(truncated)..."
MAX_ERROR = 500  # characters


class EpisodeCalls:
    """Runs the calls of one episode.

    name: of the episode, which its tools know it by.  kwargs: ``tools_kwargs`` of its row, by the tool's name.
    num_calls, num_failed: so far.
    """

    def __init__(self, tools: ToolSet, config: AgentConfig, name: str, kwargs: Mapping[str, Any]) -> None:
        self._tools = tools
        self._config = config
        self._name = name
        self._kwargs = kwargs
        self._begun = dict[str, None]()  # tools whose create was called, by name: it may have failed half-way
        self._created: list[str] = []
        self._creating = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._room = asyncio.Semaphore(config.max_parallel_calls)
        self._num_running = 0
        self._running_since = 0.0
        self._seconds_before = 0.0
        self.num_calls = self.num_failed = 0

    @property
    def seconds(self) -> float:
        """In which at least one call ran; not those in which calls waited for a process."""
        return self._seconds_before + (time.monotonic() - self._running_since if self._num_running else 0.0)

    @property
    def is_out_of_time(self) -> bool:
        """Whether the calls have taken ``max_tool_s``."""
        return self.seconds >= self._config.max_tool_s

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The result of each call, in order, its text cut to ``max_tool_response_length``."""
        results = await asyncio.gather(*map(self._run_one, calls))
        self.num_calls += len(results)
        self.num_failed += sum(result.failed for result in results)
        return results

    async def final_reward(self) -> float:
        """The sum of what the tools that were called say of the whole episode; 0 of one that fails."""
        total = 0.0
        for name in self._created:
            reward = await self._guarded(self._final_reward_of(name))
            total += 0.0 if isinstance(reward, ToolResult) else reward
        return total

    async def release(self) -> None:
        """Ends the tools' parts of the episode."""
        for name in self._begun:
            await self._guarded(self._told(name, "release"))
        self._begun.clear()
        self._created.clear()

    async def _run_one(self, call: ToolCall) -> ToolResult:
        try:
            problem = self._tools.problem_of(call)
        except Exception as error:  # noqa: BLE001  JSON that is too deep, a schema that refers to nothing
            problem = f"The arguments of {call.name} cannot be checked: {type(error).__name__}: {error}"
        if problem:
            return ToolResult(text=f"Error: {problem}"[: self._config.max_tool_response_length], failed=True)
        async with self._room:
            result = await self._executed(call.name, json.loads(call.arguments))
        if not isinstance(result, ToolResult):
            try:
                result = result_of(result)
            except Exception as error:  # noqa: BLE001  whatever a tool returns
                result = _failure(f"the tool gave no result: {error}")
        text = cut(result.text, self._config.max_tool_response_length, self._config.tool_response_cut)
        return ToolResult(text=text, reward=result.reward, failed=result.failed)

    async def _executed(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the tool returns, created if it is not yet; a failed ToolResult if that fails."""
        tool = self._tools.tools[name]
        with self._clock():
            failure = await self._guarded(self._create(name), self._limit_s(name))
        if failure is not None:
            return failure
        place: AbstractAsyncContextManager[Any] = nullcontext()
        if isinstance(tool, EpisodeTool):
            place = tool.place(self._name)
        async with place:
            with self._clock():
                return await self._guarded(self._told(name, "execute", arguments), self._limit_s(name))

    async def _told(self, name: str, verb: str, *arguments: Any) -> Any:
        """Calls the method ``verb`` of a tool, with the row's arguments for it behind ``arguments``."""
        of_row = (self._kwargs.get(name) or {}).get(f"{verb}_kwargs") or {}
        return await getattr(self._tools.tools[name], verb)(self._name, *arguments, **of_row)

    async def _create(self, name: str) -> None:
        async with self._creating[name]:
            if name not in self._created:
                self._begun[name] = None
                await self._told(name, "create")
                self._created.append(name)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """While open: a call runs."""
        if not self._num_running:
            self._running_since = time.monotonic()
        self._num_running += 1
        try:
            yield
        finally:
            if self._num_running == 1:
                self._seconds_before = self.seconds
            self._num_running -= 1

    async def _final_reward_of(self, name: str) -> float:
        reward = await self._told(name, "calc_reward")
        return 0.0 if reward is None else finite(reward, f"the reward of {name}")

    def _limit_s(self, name: str) -> float:
        """The limit of a call that begins now: what the episode has left, or less if the tool does not limit itself."""
        tool = self._tools.tools[name]
        left_s = max(0.0, self._config.max_tool_s - self.seconds)
        limits_itself = isinstance(tool, EpisodeTool) and tool.limits_itself
        return left_s if limits_itself else min(self._config.tool_timeout_s, left_s)

    async def _guarded(self, work: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
        """What ``work`` returns; a failed ToolResult if it raises or takes longer than ``limit_s``."""
        limit_s = self._config.tool_timeout_s if limit_s is None else limit_s
        try:
            return await limited(work, limit_s)
        except TimeoutError:
            return _failure(f"the tool took longer than {limit_s:g} s")
        except Exception as error:  # noqa: BLE001  whatever a tool raises
            return _failure(f"{type(error).__name__}: {error}")


def cut(text: str, length: int, side: CutSide) -> str:
    """``text``, of which at most ``length`` characters are kept, and ``CUT`` where others were."""
    if len(text) <= length:
        return text
    if side is CutSide.left:
        return CUT + text[-length:]
    if side is CutSide.right:
        return text[:length] + CUT
    head = length - length // 2
    return text[:head] + CUT + text[len(text) - length // 2 :]


def _failure(problem: str) -> ToolResult:
    return ToolResult(text=f"Error: {redacted(problem)[:MAX_ERROR]}", failed=True)
