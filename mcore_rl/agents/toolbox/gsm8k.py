"""The check of an answer to a GSM8K problem, which the model may ask for before it answers; as verl's tool.

A call costs nothing where the answer is better than the one before, and ``PENALTY`` where it is not, so that guessing
does not pay.  The row names the ground truth: ``tools_kwargs: {calc_gsm8k_reward: {create_kwargs: {ground_truth}}}``.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.agents.tools import EpisodeTool, ToolResult, ToolSchema, schema_of_texts
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards.gsm8k import gold_number
from mcore_rl.rewards.numbers import last_number

SCHEMA = schema_of_texts(
    "calc_gsm8k_reward",
    "Says whether an answer to the problem is right. 1.0: it is. 0.0: it is not.",
    answer="The answer, a number",
)
PENALTY = -0.05


class Gsm8kAnswer(EpisodeTool):
    """The tool ``calc_gsm8k_reward``."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._gold: dict[str, Any] = {}
        self._best: dict[str, float] = {}

    async def create(self, instance_id: str, ground_truth: object = None, **kwargs: Any) -> None:
        """See ``EpisodeTool.create``.  ValueError: the row names no number as ``ground_truth``."""
        self._gold[instance_id] = gold_number(ground_truth)
        self._best[instance_id] = 0.0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        answer = last_number(str(parameters["answer"]))
        score = float(answer == self._gold[instance_id])
        better = score > self._best[instance_id]
        self._best[instance_id] = score
        return ToolResult(text=f"Current parsed answer={answer} reward={score}", reward=0.0 if better else PENALTY)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """See ``EpisodeTool.release``."""
        self._gold.pop(instance_id, None)
        self._best.pop(instance_id, None)


def make(config: AgentConfig, code: CodeConfig) -> Gsm8kAnswer:
    """Make the tool of a run."""
    return Gsm8kAnswer({}, SCHEMA)
