"""Rows choose their loop; what does not fit is said with its remedy; the user's own code may be a loop or a parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.tools import EpisodeTool
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError, DeadEngineError, RolloutError
from mcore_rl.rollout.episodes import Episode
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row

OWN = """
import json

class Twice:
    async def run(self, row, session):
        first = await session.draw()
        session.append([{"role": "user", "content": f"again, {row.id}"}])
        await session.draw()
        session.reward(0.25)
        return session.episode("twice")

class Broken:
    async def run(self, row, session):
        raise KeyError("no")

class Nothing:
    async def run(self, row, session):
        await session.draw()

class Heir(Twice):
    pass

class Costly(Twice):
    def __init__(self, price):
        pass

class NoLoop:
    pass

def read_calls(text):
    if not text.startswith("CALL"):
        return []
    if text == "CALL wrong":
        return 3
    found = json.loads(text[4:])
    return [found if "odd" in found else {"name": "calculator", "arguments": found}]
"""
BY_TOOLS = {"default_agent_loop": "tool_agent", "tools": ["calculator"]}


class Counting(EpisodeTool):
    """Counts its calls, and says at the end that the episode was worth something."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float]:
        return "called", 0.5

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        LOG.append(("reward", instance_id, kwargs))
        return 4.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        LOG.append(("release", instance_id))


LOG: list[Any] = []
COUNT = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("last", ["done", COUNT])
@awaited
async def test_a_tool_has_the_last_word_and_is_released_however_the_episode_ends(tmp_path: Path, last: str) -> None:
    LOG.clear()
    path = tmp_path / "tools.yaml"
    schema = "{type: function, function: {name: count, parameters: {type: object}}}"
    path.write_text(f"tools: [{{class_name: {__name__}.Counting, tool_schema: {schema}}}]")
    made = runner(tool_config_path=str(path), tool_reward_coef=0.5, max_turns=2)
    kwargs = {"count": {"calc_reward_kwargs": {"truth": 3}}}
    episode = await run(made, [COUNT, last], agent_name="tool_agent", tools_kwargs=kwargs)
    of_last = 2.0 if last == "done" else 2.25
    assert [each.reward for each in episode.segments if each.trained] == [0.25, of_last]
    assert LOG == [("reward", "p#0", {"truth": 3}), ("release", "p#0")]
    assert episode.agent is not None and episode.agent.reason == ("answered" if last == "done" else "max_turns")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def runner(**settings: Any) -> AgentRunner:
    return AgentRunner(AgentConfig(**settings), CodeConfig(), style("qwen2.5"))


async def run(made: AgentRunner, turns: list[str], **columns: Any) -> Episode:
    tokenizer = style("qwen2.5")
    return await made.run(
        DrawnTurns(tokenizer, turns), agent_row(tokenizer, **columns), "p", 0, 0, Sampling(max_tokens=500)
    )


@pytest.mark.parametrize("kind", ["Twice", "Heir"])
@awaited
async def test_a_loop_of_ones_own(own: Path, kind: str) -> None:
    episode = await run(runner(loops={"mine": f"{own}:{kind}"}), ["a", "b"], agent_name="mine")
    assert episode.agent is not None and episode.agent.reason == "twice"
    assert [segment.text for segment in episode.segments] == ["", "a", "again, file:0", "b"]
    assert episode.turn_rewards == [0.25]


@awaited
async def test_an_error_of_ones_own_loop_names_it_and_the_row(own: Path) -> None:
    with pytest.raises(RolloutError, match="file:0: the agent loop mine raised KeyError: 'no'"):
        await run(runner(loops={"mine": f"{own}:Broken"}), ["a"], agent_name="mine")


@awaited
async def test_a_loop_of_ones_own_that_returns_no_episode_is_named(own: Path) -> None:
    with pytest.raises(RolloutError, match="file:0: the agent loop mine returned NoneType"):
        await run(runner(loops={"mine": f"{own}:Nothing"}), ["a"], agent_name="mine")


@awaited
async def test_the_death_of_an_engine_is_told_as_it_is(own: Path) -> None:
    def die(turn: int) -> str:
        raise DeadEngineError("engine 0 died")

    turns: Any = die
    with pytest.raises(DeadEngineError, match=r"^engine 0 died"):  # whoever restarts engines must know it
        await run(runner(loops={"mine": f"{own}:Twice"}), turns, agent_name="mine")


@awaited
async def test_a_parser_of_ones_own(own: Path) -> None:
    made = runner(tools=["calculator"], tool_parser=f"{own}:read_calls")
    episode = await run(made, ['CALL{"expression": "6 * 7"}', "CALL{", "done"], agent_name="tool_agent")
    texts = [segment.text for segment in episode.segments]
    assert texts[2] == "42" and texts[4].startswith("Error: The call could not be read") and texts[5] == "done"


@pytest.mark.parametrize("written", ['CALL{"odd": 1}', 'CALL"odd"'])
@awaited
async def test_what_a_model_writes_does_not_end_the_run(own: Path, written: str) -> None:
    made = runner(tools=["calculator"], tool_parser=f"{own}:read_calls")
    episode = await run(made, [written, "done"], agent_name="tool_agent")
    assert episode.segments[2].text.startswith("Error: The call could not be read")


@awaited
async def test_a_parser_of_ones_own_that_is_wrong_is_named(own: Path) -> None:
    made = runner(tools=["calculator"], tool_parser=f"{own}:read_calls")
    with pytest.raises(RolloutError, match=r"rollout\.agent\.tool_parser=.*own\.py:read_calls raised TypeError"):
        await run(made, ["CALL wrong"], agent_name="tool_agent")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"default_agent_loop": "nonesuch"}, "rollout.agent.default_agent_loop=nonesuch: there is no such loop"),
        ({"loops": {"mine": "OWN:Absent"}}, "rollout.agent.loops.mine="),
        ({"loops": {"mine": "OWN:NoLoop"}}, "is no class with async def run"),
        ({"loops": {"mine": "OWN:read_calls"}}, "is no class with async def run"),
        ({"loops": {"mine": "OWN:Costly"}}, "cannot be made: TypeError"),
        ({"loops": {"single_turn": "OWN:Twice"}}, "is the name of a built-in loop"),
        ({"loops": {"mine": "no.py:Loop"}}, "there is no Python file"),
    ],
)
def test_what_is_wrong_is_refused_with_its_key(own: Path, settings: Any, said: str) -> None:
    written = eval(repr(settings).replace("OWN", str(own)))
    with pytest.raises(ConfigError) as caught:
        runner(**written)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("parser", "said"), [("OWN:absent", "rollout.agent.tool_parser="), ("nonesuch", "vLLM has no such parser")]
)
def test_a_parser_is_needed_where_calls_are_read(own: Path, parser: str, said: str) -> None:
    made = runner(tools=["calculator"], tool_parser=parser.replace("OWN", str(own)))
    assert made.check({"react", "interaction"}) == []
    with pytest.raises(ConfigError) as caught:
        made.check({"react", "tool_agent"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "record", "said"),
    [
        ({}, {}, ""),
        ({}, {"agent_name": "single_turn_agent"}, ""),
        ({}, {"agent_name": "tool_agent"}, "and there are no tools. Write rollout.agent.tools=[calculator]"),
        ({"tools": ["calculator"]}, {"agent_name": "tool_agent"}, ""),
        ({"tools": ["calculator"]}, {"extra_info": {"agent_name": "react"}}, ""),
        ({}, {"agent_name": "other"}, "there is no such loop"),
        (
            {},
            {"tools_kwargs": {"calculator": {"create_kwargs": {}}}},
            "has tools_kwargs, and is run by single_turn_agent",
        ),
        (
            {"default_agent_loop": "tool_agent", "tools": ["calculator"]},
            {"tools_kwargs": {"a": {}}},
            "tools_kwargs of a",
        ),
        ({"default_agent_loop": "tool_agent", "tools": ["calculator"]}, {"tools_kwargs": {"a": None}}, ""),
        (BY_TOOLS, {"tools_kwargs": '{"calculator": {}}'}, "tools_kwargs that is str and has no fields"),
        (BY_TOOLS, {"tools_kwargs": {"calculator": "x"}}, "tools_kwargs.calculator that is not of the form"),
        (BY_TOOLS, {"tools_kwargs": {"calculator": {"ground_truth": "3"}}}, "is not of the form {create_kwargs,"),
        (BY_TOOLS, {"tools_kwargs": {"calculator": {"create_kwargs": "x"}}}, "calculator.create_kwargs that has no"),
        (BY_TOOLS, {"tools_kwargs": {"calculator": {"create_kwargs": None, "other": None}}}, ""),
        (
            {},
            {"agent_name": "interaction", "interaction_kwargs": '{"name": "gsm8k"}'},
            "interaction_kwargs that is str",
        ),
        (BY_TOOLS, {"agent_name": "react", "interaction_kwargs": {"name": "gsm8k"}}, "react asks no interaction"),
        ({}, {"agent_name": "interaction"}, "has no interaction_kwargs"),
        ({}, {"agent_name": "interaction", "interaction_kwargs": {"name": "gsm8k"}}, ""),
        ({}, {"agent_name": "interaction", "extra_info": {"interaction_kwargs": {"name": "x"}}}, "the interaction x"),
    ],
)
def test_rows_are_checked_before_anything_starts(settings: Any, record: dict[str, Any], said: str) -> None:
    problem = runner(**settings).problem_of(record)
    assert said in problem and bool(said) == bool(problem)


def test_prompts_name_the_tools_of_loops_that_call_them() -> None:
    made = runner(tools=["calculator"])
    assert made.tools_of({"agent_name": "tool_agent"}) == made.schemas and made.schemas
    assert made.tools_of({"agent_name": "interaction"}) is None and made.tools_of({}) is None
    assert made.tools_of({"agent_name": "react"}) is None, "its calls have another form than the template's"


def test_the_default_loop_runs_rows_that_name_none() -> None:
    row = agent_row(style("qwen2.5"))
    assert not runner().runs(row) and runner(default_agent_loop="tool_agent").runs(row)
    assert runner().runs(agent_row(style("qwen2.5"), agent_name="react"))


def test_the_template_is_checked_for_what_will_be_appended() -> None:
    assert runner(tools=["calculator"]).check({"tool_agent"}) == []
    gemma = AgentRunner(AgentConfig(tools=["calculator"]), CodeConfig(), style("gemma"))
    assert len(gemma.check({"tool_agent"})) == 2 and gemma.check({"react"}) == []


@pytest.mark.parametrize("part", ["nothing", "tool", "interaction", "loop"])
def test_an_episode_may_be_run_again_unless_a_part_of_it_says_otherwise(
    own: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tools=["calculator"], loops={"mine": f"{own}:Twice"}, tool_parser=f"{own}:read_calls")
    tokenizer = style("qwen2.5")
    asks = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "3"}}
    rows = {
        "tool": agent_row(tokenizer, agent_name="tool_agent"),
        "interaction": agent_row(tokenizer, agent_name="tool_agent", **asks),
        "loop": agent_row(tokenizer, agent_name="mine"),
    }
    said = {"tool": made._tools.tools["calculator"], "interaction": made.interactions["gsm8k"]}
    said |= {"loop": made.loops["mine"]}
    if part != "nothing":
        monkeypatch.setattr(type(said[part]), "replayable", False, raising=False)
    # Any loop may call the tools.
    not_again = {"nothing": set[str](), "tool": {*rows}, "interaction": {"interaction"}, "loop": {"loop"}}[part]
    assert {name for name, row in rows.items() if not made.can_replay(row)} == not_again
