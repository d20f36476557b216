"""Calls of an episode: side by side, limited, and with a result whatever the tool does."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.agents import episode_calls
from mcore_rl.agents.episode_calls import CUT, EpisodeCalls, cut
from mcore_rl.agents.tools import EpisodeTool, ToolCall, ToolSchema, ToolSet
from mcore_rl.config.agent import AgentConfig, CutSide
from tests.support.awaited import awaited


class Recording(EpisodeTool):
    """Does what its argument says, and writes down what happens to it."""

    def __init__(self, name: str = "tool") -> None:
        super().__init__({}, ToolSchema(type="function", function={"name": name}))
        self.log: list[Any] = []
        self.running = self.most = 0

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.log.append(("create", instance_id, kwargs))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(parameters.get("sleep", 0))
        finally:
            self.running -= 1
        if parameters.get("raise"):
            raise OSError("no such thing")
        return parameters.get("say", "done"), parameters.get("reward"), {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.25

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", instance_id, kwargs))


def call(arguments: str = "{}", name: str = "tool") -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def calls_of(tool: Any, kwargs: Any = None, **settings: Any) -> EpisodeCalls:
    return EpisodeCalls(ToolSet({"tool": tool}), AgentConfig(**settings), "e7", kwargs or {})


@awaited
async def test_a_tool_lives_as_long_as_the_episode_that_calls_it() -> None:
    tool = Recording()
    rows = {"tool": {"create_kwargs": {"ground_truth": "3", "precision": None}, "release_kwargs": {"a": 1}}}
    calls = calls_of(tool, rows)
    assert [each.text for each in await calls.run([call(), call('{"say": "x", "reward": 0.5}')])] == ["done", "x"]
    await calls.run([call()])
    assert await calls.final_reward() == 0.25
    await calls.release()
    await calls.release()
    assert tool.log == [("create", "e7", {"ground_truth": "3", "precision": None}), ("release", "e7", {"a": 1})]
    assert (calls.num_calls, calls.num_failed) == (3, 0)


@awaited
async def test_a_tool_whose_beginning_fails_is_released() -> None:
    class Half(Recording):
        async def create(self, instance_id: str, **kwargs: Any) -> None:
            self.log.append("took something")
            await asyncio.sleep(9)

    tool = Half()
    calls = calls_of(tool, tool_timeout_s=0.1)
    assert all(each.failed for each in await calls.run([call()])) and await calls.final_reward() == 0.0
    await calls.release()
    assert tool.log == ["took something", ("release", "e7", {})]


@awaited
async def test_an_episode_that_calls_nothing_creates_nothing() -> None:
    tool = Recording()
    calls = calls_of(tool)
    assert await calls.final_reward() == 0.0
    await calls.release()
    assert not tool.log


@awaited
async def test_calls_of_a_turn_run_side_by_side_up_to_the_limit() -> None:
    tool = Recording()
    await calls_of(tool, max_parallel_calls=3).run([call('{"sleep": 0.1}')] * 6)
    assert tool.most == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [('{"raise": 1}', "Error: OSError: no such thing"), ('{"sleep": 9}', "Error: the tool took longer than 0.1 s"),
     ("{", "are no JSON")],
)  # fmt: skip
@awaited
async def test_failures_are_observations(arguments: str, said: str) -> None:
    calls = calls_of(Recording(), tool_timeout_s=0.1)
    (result,) = await calls.run([call(arguments)])
    assert said in result.text and result.failed and calls.num_failed == 1


@awaited
async def test_a_result_that_is_no_result_is_a_failure() -> None:
    (result,) = await calls_of(Recording()).run([call('{"reward": "much"}')])
    assert result.failed and "the tool gave no result" in result.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("[" * 100_000, "are no JSON: it nests too deep"), ('{"far": 1}', "cannot be checked")],
    ids=["too deep", "a reference to nothing"],
)
@awaited
async def test_arguments_that_cannot_be_checked_are_a_failure(arguments: str, said: str) -> None:
    tool = Recording()
    tool.tool_schema["function"]["parameters"] = {"type": "object", "properties": {"far": {"$ref": "#/absent"}}}
    (result,) = await calls_of(tool).run([call(arguments)])
    assert result.failed and said in result.text


@awaited
async def test_all_calls_of_an_episode_have_a_time_together() -> None:
    calls = calls_of(Recording(), max_tool_s=1.0, tool_timeout_s=9.0)
    results = [(await calls.run([call('{"sleep": 0.6}')]))[0].failed for _ in range(2)]
    assert results == [False, True] and calls.is_out_of_time


@awaited
async def test_calls_of_one_turn_have_no_more_time_together() -> None:
    calls, start = calls_of(Recording(), max_tool_s=0.3, tool_timeout_s=9.0, max_parallel_calls=1), time.monotonic()
    results = await calls.run([call('{"sleep": 9}')] * 30)
    assert all(each.failed for each in results) and time.monotonic() - start < 6.0 and calls.is_out_of_time


@pytest.mark.parametrize("said", ["text", float("nan")])
@awaited
async def test_what_a_tool_says_at_the_end_ends_no_run(said: Any) -> None:
    class Strange(Recording):
        async def calc_reward(self, instance_id: str) -> Any:  # type: ignore[override]
            return said

        async def release(self, instance_id: str) -> None:  # type: ignore[override]
            raise OSError("gone")

    for kwargs in ({}, {"tool": {"calc_reward_kwargs": {"unknown": 1}, "release_kwargs": {"unknown": 1}}}):
        calls = calls_of(Strange(), kwargs)
        await calls.run([call()])
        assert await calls.final_reward() == 0.0
        await calls.release()


@awaited
async def test_a_tool_that_swallows_its_cancellation_ends_nothing_but_its_call() -> None:
    told = asyncio.Event()

    class Stubborn(Recording):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            while not told.is_set():
                try:
                    await told.wait()
                except asyncio.CancelledError:
                    self.log.append("no")
            self.log.append("ended")

    tool = Stubborn()
    calls = calls_of(tool, tool_timeout_s=0.1)
    (result,) = await calls.run([call()])
    await calls.release()
    assert result.failed and "no" in tool.log and "ended" not in tool.log
    told.set()
    while "ended" not in tool.log:
        await asyncio.sleep(0)


@awaited
async def test_a_tool_that_is_never_created_holds_up_no_other() -> None:
    class Never(Recording):
        async def create(self, instance_id: str, **kwargs: Any) -> None:
            await asyncio.sleep(9)

    tools = ToolSet({"never": Never("never"), "tool": Recording()})
    calls = EpisodeCalls(tools, AgentConfig(tool_timeout_s=0.2), "e", {})
    never, other = await calls.run([call(name="never"), call(name="tool")])
    assert never.failed and other.text == "done"


@awaited
async def test_time_in_which_calls_wait_for_a_place_is_not_counted() -> None:
    class Crowded(Recording):
        room = asyncio.Semaphore(1)

        def place(self, instance_id: str) -> Any:
            return self.room

    tool = Crowded()
    episodes = [EpisodeCalls(ToolSet({"tool": tool}), AgentConfig(max_tool_s=0.3), f"e{n}", {}) for n in range(5)]
    results = await asyncio.gather(*(each.run([call('{"sleep": 0.15}')]) for each in episodes))
    assert tool.most == 1 and not any(result.failed for (result,) in results)
    assert all(0.14 < each.seconds < 0.3 and not each.is_out_of_time for each in episodes)


@awaited
async def test_seconds_are_those_in_which_a_call_ran() -> None:
    """By a clock that this test moves: two calls side by side, and a third when one of them has ended."""
    clock, begun = SimpleNamespace(now=100.0), list[int]()
    gates = [asyncio.Event() for _ in range(3)]

    class Gated(Recording):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            begun.append(parameters["gate"])
            await gates[parameters["gate"]].wait()
            return "done", None, {}

    async def until(num_begun: int) -> None:
        while len(begun) < num_begun:
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_calls, "time", SimpleNamespace(monotonic=lambda: clock.now))
        calls = calls_of(Gated(), max_parallel_calls=2)
        running = asyncio.create_task(calls.run([call(f'{{"gate": {each}}}') for each in range(3)]))
        for gate, now in enumerate((102.0, 103.0, 103.5)):
            await until(min(3, gate + 2))
            clock.now = now
            gates[gate].set()
        await running
        assert calls.seconds == 3.5, "side by side counts once"
        clock.now = 200.0
        assert calls.seconds == 3.5, "no call runs"


@awaited
async def test_a_tool_that_limits_itself_may_wait_for_its_turn() -> None:
    tool = Recording()
    tool.limits_itself = True
    (result,) = await calls_of(tool, tool_timeout_s=0.05).run([call('{"sleep": 0.2}')])
    assert not result.failed


@pytest.mark.parametrize(
    ("side", "kept"), [(CutSide.left, f"{CUT}56789"), (CutSide.right, f"01234{CUT}"), (CutSide.middle, f"012{CUT}89")]
)
def test_long_results_are_cut_where_it_is_asked(side: CutSide, kept: str) -> None:
    assert cut("0123456789", 5, side) == kept and cut("01234", 5, side) == "01234"


@awaited
async def test_results_are_cut() -> None:
    (result,) = await calls_of(Recording(), max_tool_response_length=4).run([call('{"say": "0123456789"}')])
    assert result.text == f"01{CUT}89"
