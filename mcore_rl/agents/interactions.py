"""Who answers the model: an environment or a simulated user, in verl's form, and GSM8K's feedback as an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_rl.agents.limited import limited
from mcore_rl.agents.tool_loading import imported_class, lacking, listed_classes
from mcore_rl.config.agent import AgentConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.rewards.gsm8k import gold_number, marked_answer
from mcore_rl.rewards.numbers import last_number
from mcore_rl.rewards.score import finite

KEY = "rollout.agent.interaction_config_path"
FORM = "Write interaction: [{name: NAME, class_name: MODULE.CLASS, config: {}}]"
METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class EpisodeInteraction:
    """Answers the model, with a state for each episode; the methods are those of verl's ``BaseInteraction``.

    config: of the yaml file.
    replayable: as that of a tool (``tools.EpisodeTool``): it may be asked again what it was asked before.
    """

    replayable = True

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        """Begins an episode.  kwargs: ``interaction_kwargs`` of the row."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """(whether the episode ends, what the model is answered, the reward of its turn, metrics).

        messages: the conversation so far; the last is the model's.
        """
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of what the model said last, for ``generate_response``."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an episode; called once, however it ended."""


class Gsm8kInteraction(EpisodeInteraction):
    """Says whether the number after ``####``, or else the last number, is right, until it is."""

    RIGHT = "Your response is correct!"
    WRONG = "Your response is incorrect! You need to reflect on your answer and try again."

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._gold: dict[str, Any] = {}
        self._said: dict[str, str] = {}

    async def start_interaction(self, instance_id: str, ground_truth: object = None, **kwargs: Any) -> None:
        """See ``EpisodeInteraction``.  ValueError: the row names no number as ``ground_truth``."""
        self._gold[instance_id] = gold_number(ground_truth)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """See ``EpisodeInteraction``; the reward is 1 where the answer is right."""
        self._said[instance_id] = str(messages[-1]["content"])
        score = await self.calculate_score(instance_id)
        return score == 1.0, self.RIGHT if score == 1.0 else self.WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """See the method of ``EpisodeInteraction``."""
        said = self._said[instance_id]
        answer = marked_answer(said)
        return float((last_number(said) if answer is None else answer) == self._gold[instance_id])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """See the method of ``EpisodeInteraction``."""
        self._gold.pop(instance_id, None)
        self._said.pop(instance_id, None)


BUILT_IN_INTERACTIONS: dict[str, type[EpisodeInteraction]] = {"gsm8k": Gsm8kInteraction}


def load_interactions(config: AgentConfig) -> dict[str, Any]:
    """The interactions that rows may name: those built in, and those of ``interaction_config_path``.

    ConfigError: with every one that cannot be made.
    """
    made: dict[str, Any] = {name: kind({}) for name, kind in BUILT_IN_INTERACTIONS.items()}
    violations = list[Violation]()
    for class_name, entry in listed_classes(config.interaction_config_path, "interaction", KEY, FORM):
        try:
            kind = imported_class(class_name, KEY)
            if missing := lacking(kind, METHODS):
                raise ConfigError([Violation(KEY, class_name, f"has no {', '.join(missing)}", FORM)])
            made[str(entry.get("name") or class_name)] = kind(dict(entry.get("config") or {}))
        except ConfigError as error:
            violations += error.violations
        except Exception as error:  # noqa: BLE001  whatever the user's class does
            violations.append(Violation(KEY, class_name, f"cannot be made: {type(error).__name__}: {error}", FORM))
    refuse_if_any(violations)
    return made


class EpisodeAnswers:
    """One interaction's part of one episode.  limit_s: of one answer."""

    def __init__(self, interaction: Any, name: str, kwargs: dict[str, Any], limit_s: float) -> None:
        self._interaction = interaction
        self._name = name
        self._kwargs = kwargs
        self._limit_s = limit_s
        self._started = False

    async def answer(self, messages: Sequence[dict[str, Any]]) -> tuple[bool, str, float | None]:
        """(whether the episode ends, what the model is answered, the reward of its turn).

        Raises whatever the interaction raises, and TimeoutError.
        """
        if not self._started:
            await limited(self._interaction.start_interaction(self._name, **self._kwargs), self._limit_s)
            self._started = True
        asking = self._interaction.generate_response(self._name, list(messages), **self._kwargs)
        ends, text, reward, *_ = await limited(asking, self._limit_s)
        return bool(ends), str(text), None if reward is None else finite(reward, "the reward of an interaction")

    async def close(self) -> None:
        """Ends the episode for the interaction; what that raises concerns nobody any more."""
        if self._started:
            await limited(self._interaction.finalize_interaction(self._name, **self._kwargs), self._limit_s)
            self._started = False
