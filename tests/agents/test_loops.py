"""The loops that are built in, with turns that a test wrote and real tools."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mcore_rl.agents.loops import react_call
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.toolbox.calculator import SCHEMA, Calculator
from mcore_rl.agents.tools import ToolCall, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rollout.episodes import Author, Episode, FinishReason
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>'


async def episode_of(
    turns: Any, columns: dict[str, Any], tools: tuple[str, ...] = ("calculator",), room: int = 2000, **settings: Any
) -> Episode:
    tokenizer = style("qwen2.5")
    runner = AgentRunner(AgentConfig(tools=list(tools), **settings), CodeConfig(), tokenizer)
    row = agent_row(tokenizer, **columns)
    assert runner.problem_of({"extra_info": row.extra_info, **row.columns}) == ""
    try:
        return await runner.run(DrawnTurns(tokenizer, turns), row, "p", 0, 0, Sampling(max_tokens=room))
    finally:
        runner.close()


def said(episode: Episode) -> list[tuple[str, str]]:
    return [(segment.author.value, segment.text) for segment in episode.segments[1:]]


def reason(episode: Episode) -> str:
    assert episode.agent is not None
    return episode.agent.reason


@awaited
async def test_a_tool_agent_calls_until_it_answers() -> None:
    wrong = '<tool_call>{"name": "calculator", "arguments": {"sum": 1}}</tool_call>'
    unreadable = '<tool_call>{"name": calculator}</tool_call>'
    episode = await episode_of([CALL, wrong, unreadable, CALL + CALL, "#### 408"], {"agent_name": "tool_agent"})
    texts = [text for author, text in said(episode) if author == "tool"]
    assert texts[0] == "408" and "'expression' is a required property" in texts[1]
    assert texts[2].startswith("Error: The call could not be read") and texts[3] == "408\n408"
    assert (reason(episode), episode.end, episode.response) == ("answered", FinishReason.stop, "#### 408")
    assert episode.agent is not None and (episode.agent.calls, episode.agent.failed_calls) == (5, 2)


@awaited
async def test_endless_calls_end_at_the_limit_of_turns() -> None:
    episode = await episode_of(lambda number: CALL, {"agent_name": "tool_agent"}, max_turns=3)
    assert (reason(episode), episode.end, episode.truncated) == ("max_turns", FinishReason.length, True)
    assert [author for author, _ in said(episode)] == ["model", "tool", "model", "tool", "model"]


@awaited
async def test_react_goes_on_within_its_turn() -> None:
    turns = ["Thought: hard\nAction: calculator\nAction Input: 12 * 34\nObservation:", "Final Answer: 408"]
    episode = await episode_of(turns, {"agent_name": "react"})
    tokenizer = style("qwen2.5")
    assert [segment.author for segment in episode.segments[1:]] == [Author.model, Author.tool, Author.model]
    text = tokenizer.decode([token for segment in episode.segments[1:] for token in segment.tokens.tolist()])
    assert text == f"{turns[0]} 408\n{turns[1]}<|im_end|>", "nothing of the template stands within the turn"
    assert reason(episode) == "answered"


@awaited
async def test_react_that_ends_its_turn_is_answered_as_by_a_user() -> None:
    turns = ['Action: calculator\nAction Input: {"expression": "2 * 3"}', "Final Answer: 6"]
    episode = await episode_of(turns, {"agent_name": "react"})
    assert said(episode)[1] == ("user", "Observation: 6")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("Thought: x\nAction: calculator\nAction Input: 1 + 1\n", '{"expression": "1 + 1"}'),
        ('Action: calculator\nAction Input: "1 + 1"', '{"expression": "1 + 1"}'),
        ('Action: calculator \nAction Input: {"expression": "1"}', '{"expression": "1"}'),
        ("Action: a\nAction Input: 1\nObservation: 2\nAction: calculator\nAction Input: 42", '{"expression": "42"}'),
        ("Action: calculator\nAction Input: [1", '{"expression": "[1"}'),
    ],
)
def test_actions_are_read(text: str, arguments: str) -> None:
    assert react_call(text, ToolSet({"calculator": Calculator({}, SCHEMA)})) == ToolCall(
        name="calculator", arguments=arguments
    )


def test_a_line_of_spaces_and_deep_json_are_read_at_once() -> None:
    tools, start = ToolSet({"calculator": Calculator({}, SCHEMA)}), time.monotonic()
    assert react_call(f"Action:{' ' * 100_000}x", tools) is None
    deep = react_call(f"Action: calculator\nAction Input: {'[' * 100_000}", tools)
    assert deep is not None and tools.problem_of(deep) == "" and time.monotonic() - start < 5


def test_a_text_without_an_action_is_none() -> None:
    tools = ToolSet({})
    assert react_call("Final Answer: 3", tools) is None and react_call("Action: calculator", tools) is None
    assert react_call("Action: fly\nAction Input: home", tools) == ToolCall(name="fly", arguments='"home"')


GSM8K = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "408", "query": None}}


@awaited
async def test_an_interaction_answers_until_it_ends() -> None:
    episode = await episode_of(["#### 4", "#### 40", "#### 408"], {"agent_name": "interaction", **GSM8K}, tools=())
    assert [author for author, _ in said(episode)] == ["model", "user", "model", "user", "model"]
    assert said(episode)[1][1].startswith("Your response is incorrect!") and reason(episode) == "interaction"
    assert [segment.reward for segment in episode.segments if segment.trained] == [0.0, 0.0, 1.0]


@awaited
async def test_a_tool_agent_with_an_interaction_has_both() -> None:
    episode = await episode_of([CALL, "#### 4", CALL, "#### 408"], {"agent_name": "tool_agent", **GSM8K})
    assert [author for author, _ in said(episode)][1::2] == ["tool", "user", "tool"] and reason(
        episode
    ) == "interaction"


@awaited
async def test_an_interaction_that_fails_loses_the_episode_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = style("qwen2.5")
    runner = AgentRunner(AgentConfig(), CodeConfig(), tokenizer)
    kwargs = {"name": "gsm8k", "ground_truth": "none"}
    for number in range(3):
        row = agent_row(tokenizer, number=number, agent_name="interaction", interaction_kwargs=kwargs)
        episode = await runner.run(DrawnTurns(tokenizer, ["#### 4"]), row, "p", 0, 0, Sampling(max_tokens=99))
        assert (reason(episode), episode.end, episode.lost) == ("interaction_failed", FinishReason.abort, True)
        assert not any(segment.trained for segment in episode.segments) and said(episode) == [("model", "#### 4")]
    (record,) = caplog.records
    assert "file:0: an interaction failed" in record.getMessage() and "is not a number" in record.getMessage()
    assert "agent/lost" in record.getMessage()


@awaited
async def test_one_answer_is_a_loop_too() -> None:
    episode = await episode_of(["#### 5"], {"agent_name": "single_turn"})
    assert episode.is_single_turn and reason(episode) == "answered"


@awaited
async def test_expressions_that_the_model_writes_are_computed_behind_them() -> None:
    turns = ["Half is <<48 / 2>>", ", and then <<(1 @ 2) @ 3>>", " or 1>>", " at <<1 / 0>>", ". The answer is 24"]
    episode = await episode_of(turns, {"agent_name": "math_expression"}, tools=())
    tokenizer = style("qwen2.5")
    text = tokenizer.decode([token for segment in episode.segments[1:] for token in segment.tokens.tolist()])
    assert text == (
        "Half is <<48 / 2>> = 24, and then <<(1 @ 2) @ 3>> = -9 or 1>> = (Error: there is no << before >>)"
        " at <<1 / 0>> = (Error: division by zero). The answer is 24<|im_end|>"
    )
    assert [segment.trained for segment in episode.segments[1:]] == [True, False] * 4 + [True]
    assert episode.agent is not None and (episode.agent.calls, episode.agent.failed_calls) == (4, 2)
    assert reason(episode) == "answered" and episode.response == ". The answer is 24"
