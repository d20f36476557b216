"""Interactions in verl's form: found, refused with their key, ended once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.interactions import EpisodeAnswers, EpisodeInteraction, Gsm8kInteraction, load_interactions
from mcore_rl.config.agent import AgentConfig
from mcore_rl.ground.errors import ConfigError
from tests.support.awaited import awaited


class Echo(EpisodeInteraction):
    """Answers what it is told, and writes down what happens."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.log: list[Any] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("start", instance_id, kwargs))

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.config.get("sleep", 0))
        return len(messages) > 2, messages[-1]["content"], 0.5, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("finalize", instance_id))


class Nothing:
    """Has none of the methods."""


@awaited
async def test_an_episode_of_an_interaction() -> None:
    echo = Echo({})
    answers = EpisodeAnswers(echo, "e1", {"query": "q"}, 5.0)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert await answers.answer(said) == (False, "b", 0.5)
    assert await answers.answer([*said, {"role": "assistant", "content": "c"}]) == (True, "c", 0.5)
    await answers.close()
    await answers.close()
    assert echo.log == [("start", "e1", {"query": "q"}), ("finalize", "e1")]


@awaited
async def test_an_answer_that_does_not_come_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        await EpisodeAnswers(Echo({"sleep": 9}), "e1", {}, 0.05).answer([{"role": "user", "content": "a"}])


@awaited
async def test_gsm8k_reads_the_marked_answer_and_else_the_last_number() -> None:
    gsm8k = Gsm8kInteraction({})
    await gsm8k.start_interaction("e", ground_truth="18", query="q")
    for text, right in (("#### 18", True), ("it is 18", True), ("18, so #### 17", False), ("none", False)):
        ends, answer, score, _ = await gsm8k.generate_response("e", [{"role": "assistant", "content": text}])
        assert (ends, score) == (right, float(right)) and ("incorrect" in answer) == (not right)
    await gsm8k.finalize_interaction("e")
    assert not gsm8k._gold


def test_those_of_a_file_are_beside_those_built_in(tmp_path: Path) -> None:
    path = tmp_path / "interactions.yaml"
    path.write_text(f"interaction:\n  - name: echo\n    class_name: {__name__}.Echo\n    config: {{a: 1}}\n")
    made = load_interactions(AgentConfig(interaction_config_path=str(path)))
    assert set(made) == {"gsm8k", "echo"} and made["echo"].config == {"a": 1}
    assert set(load_interactions(AgentConfig())) == {"gsm8k"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("interaction: 3", "is no list of interactions"), ("[", "is no list of interactions"),
     ("interaction: [{class_name: no.Such}]", "cannot be imported"),
     (f"interaction: [{{class_name: {__name__}.Nothing}}]", "has no start_interaction")],
)  # fmt: skip
def test_a_file_that_names_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "interactions.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rollout\.agent\.interaction_config_path") as caught:
        load_interactions(AgentConfig(interaction_config_path=str(path)))
    assert said in str(caught.value)
