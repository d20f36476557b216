"""A call whose answer is no better than the one before costs a little, as in verl's tool."""

from __future__ import annotations

import pytest

from mcore_rl.agents.toolbox.gsm8k import PENALTY, SCHEMA, Gsm8kAnswer
from tests.support.awaited import awaited


@awaited
async def test_the_reward_is_of_progress() -> None:
    tool = Gsm8kAnswer({}, SCHEMA)
    await tool.create("a", ground_truth="... #### 1,200")
    await tool.create("b", ground_truth=7)
    rewards = [(await tool.execute("a", {"answer": each})).reward for each in ("12", "$1,200", "1200", "no idea")]
    assert rewards == [PENALTY, 0.0, PENALTY, PENALTY]
    other = await tool.execute("b", {"answer": "it is 7"})
    assert other.reward == 0.0 and other.text == "Current parsed answer=7 reward=1.0"
    await tool.release("a")
    with pytest.raises(KeyError):
        await tool.execute("a", {"answer": "1"})


@awaited
async def test_a_row_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a number"):
        await Gsm8kAnswer({}, SCHEMA).create("a")
