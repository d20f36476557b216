"""An environment with gymnasium's API, played by drawn turns from the first observation to the end."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.gym_environment import GymEnvironment
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rollout.episodes import Episode
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row

MADE: list[Guess] = []


class Guess:
    """Guess a number; ``truncated`` after ``tries``."""

    def __init__(self, tries: int = 3) -> None:
        self.tries, self.closed = tries, False
        MADE.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.number, self.count = random.Random(seed).randrange((options or {}).get("most", 10)), 0
        return f"Guess below {(options or {}).get('most', 10)}.", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread(), "a step may block"
        self.count += 1
        if action == "number":
            return 3, 0.0, False, False, {}
        right = int(action) == self.number
        return ("right" if right else "wrong"), float(right) - 0.1, right, self.count >= self.tries, {}

    def close(self) -> None:
        self.closed = True


async def played(tmp_path: Path, turns: list[str], env: str = f"{__name__}:Guess", **kwargs: Any) -> Episode:
    path = tmp_path / "interaction.yaml"
    path.write_text(
        "interaction: [{name: guess, class_name: mcore_rl.agents.gym_environment.GymEnvironment, "
        f"config: {{env: '{env}', kwargs: {{tries: 2}}}}}}]"
    )
    tokenizer = style("qwen2.5")
    runner = AgentRunner(AgentConfig(interaction_config_path=str(path)), CodeConfig(), tokenizer)
    row = agent_row(tokenizer, agent_name="interaction", interaction_kwargs={"name": "guess", **kwargs})
    return await runner.run(DrawnTurns(tokenizer, turns), row, "p", 0, 0, Sampling(max_tokens=500))


@awaited
async def test_the_environment_answers_until_it_ends(tmp_path: Path) -> None:
    number = random.Random(4).randrange(100)
    given = {"seed": 4, "options": {"most": 100}, "observation": "Guess below 100."}
    episode = await played(tmp_path, [str(number + 1), str(number)], **given)
    assert [segment.text for segment in episode.segments[1:]] == [str(number + 1), "wrong", str(number)]
    assert [segment.reward for segment in episode.segments if segment.trained] == pytest.approx([-0.1, 0.9])
    assert episode.agent is not None and episode.agent.reason == "interaction" and MADE[-1].closed


@awaited
async def test_truncated_ends_it_too(tmp_path: Path) -> None:
    episode = await played(tmp_path, ["-1", "-2", "-3"], seed=4)
    assert episode.agent is not None and episode.agent.turns == 2


@pytest.mark.parametrize("kwargs", [{"seed": 4, "observation": "Guess below 11."}, {"seed": 4}])
@awaited
async def test_another_first_observation_or_one_that_is_no_text_loses_the_episode(
    tmp_path: Path, kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    episode = await played(tmp_path, ["number"], **kwargs)
    assert episode.lost and MADE[-1].closed
    assert ("reset says" if "observation" in kwargs else "the observation is int, no text") in caplog.text


@pytest.mark.parametrize("env", ["CartPole-v1", f"{__name__}:Nothing", "no.such.module:Env", ""])
@awaited
async def test_what_makes_no_environment_is_refused(tmp_path: Path, env: str) -> None:
    with pytest.raises(ConfigError, match="GymEnvironment: cannot be made"):
        await played(tmp_path, ["1"], env=env)


def test_an_id_is_gymnasiums(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    fake = types.ModuleType("gymnasium")
    fake.make = lambda env, **kwargs: (env, kwargs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gymnasium", fake)
    assert GymEnvironment({"env": "TextWorld-v0"})._make(tries=1) == ("TextWorld-v0", {"tries": 1})
