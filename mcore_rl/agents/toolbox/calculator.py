"""A calculator: exact arithmetic on numbers, and nothing else that Python could do."""

from __future__ import annotations

from typing import Any

from mcore_rl.agents.arithmetic import evaluated, written
from mcore_rl.agents.tools import EpisodeTool, ToolResult, schema_of_texts
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig

SCHEMA = schema_of_texts(
    "calculator",
    "Calculates an arithmetic expression exactly.",
    expression="As 12 * (3 + 4). Operators: + - * / // % **",
)


class Calculator(EpisodeTool):
    """The tool ``calculator``."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        try:
            return ToolResult(text=written(evaluated(parameters["expression"])))
        except ValueError as error:
            return ToolResult(text=f"Error: {error}", failed=True)


def make(config: AgentConfig, code: CodeConfig) -> Calculator:
    """Make the tool of a run."""
    return Calculator({}, SCHEMA)
