"""An agent of a framework from PyPI, untouched, in an environment of its own: its episodes hold the drawn tokens.

``tools/set_up_oracles.sh`` makes the environment from ``tests/framework.txt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig, ProgramConfig, ProgramReward
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rollout.episodes import Author, Episode
from mcore_rl.rollout.protocol import Sampling
from tests.agents.test_runner import OWN
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row
from tests.support.skips import not_installed

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1500)]
# As its documentation writes an agent; it reads OPENAI_BASE_URL and OPENAI_API_KEY by itself.
AGENT = '''
import asyncio, json, sys
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions")

@function_tool
def calculator(expression: str) -> str:
    """Works out an expression."""
    return str(eval(expression))

row = json.load(sys.stdin)
agent = Agent(name="solver", instructions="You solve.", model="policy", tools=[calculator])
critic = Agent(name="critic", instructions="You criticise.", model="policy")

async def main():
    if "STREAM" in row["prompt"][0]["content"]:
        streamed = Runner.run_streamed(agent, row["prompt"][0]["content"])
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output
    answer = (await Runner.run(agent, row["prompt"][0]["content"])).final_output
    if "CRITIC" in row["prompt"][0]["content"]:
        await Runner.run(critic, answer)
    return answer

print(json.dumps({"reward": float(asyncio.run(main()) == row["ground_truth"])}))
'''


@pytest.fixture
def python() -> str:
    path = Path(sys.prefix) / "framework" / "bin" / "python"
    if not path.exists():
        pytest.skip(not_installed("openai-agents"))
    return str(path)


async def run(python: str, folder: Path, turns: Any, question: str) -> list[Episode]:
    (folder / "agent.py").write_text(AGENT)
    (folder / "own.py").write_text(OWN)
    program = ProgramConfig(command=[python, str(folder / "agent.py")], reward=ProgramReward.program, timeout_s=300)
    config = AgentConfig(default_agent_loop="program", program=program, tool_parser=f"{folder}/own.py:read_calls")
    made, tokenizer = AgentRunner(config, CodeConfig(), style("qwen2.5")), style("qwen2.5")
    engine = DrawnTurns(tokenizer, turns)
    try:
        episodes = await made.conversations(
            engine, agent_row(tokenizer, question), "p", 0, 0, Sampling(max_tokens=4000)
        )
    finally:
        made.close()
    drawn = [(*engine.drawn(text), engine.end) for text in turns]
    trained = [tuple(part.tokens.tolist()) for each in episodes for part in each.segments if part.trained]
    assert sorted(trained) == sorted(drawn), "every drawn token is trained once"
    return episodes


@pytest.mark.parametrize("question", ["what is 2 + 3?", "STREAM what is 2 + 3?"])
@awaited
async def test_an_agent_with_a_tool_is_one_episode(python: str, question: str, tmp_path: Path) -> None:
    turns = ['CALL{"expression": "2 + 3"}', 'CALL{"expression": "5 * 1"}', "5"]
    (episode,) = await run(python, tmp_path, turns, question)
    assert episode.graded.value == 1 and episode.agent is not None and episode.agent.begins == "first"
    authors = [Author.prompt, *[Author.model, Author.tool] * 2, Author.model]
    assert [segment.author for segment in episode.segments] == authors
    assert [segment.text for segment in episode.segments[2::2]] == ["5", "5"]
    assert [each["role"] for each in episode.row.messages] == ["system", "user"] and episode.agent.calls == 2


@awaited
async def test_a_second_agent_is_a_conversation_of_the_same_sample(python: str, tmp_path: Path) -> None:
    turns = ['CALL{"expression": "2 + 3"}', "5", "not bad"]
    main, other = await run(python, tmp_path, turns, "CRITIC what is 2 + 3?")
    assert main.graded.value == other.graded.value == 1 and (main.part, other.part) == (0, 1)
    assert [each.agent.begins for each in (main, other) if each.agent] == ["separate", "first"]
    assert main.response == "not bad" and main.row.messages[0]["content"] == "You criticise."
