"""What a model can call: tools with a name, a schema, and a life within an episode.

A tool is one of three: built in (``toolbox``), a Python function with type hints and a docstring, or a class in verl's
form (``create``, ``execute``, ``calc_reward``, ``release``), which a yaml file names.

Invariant: whatever a tool does, raise or hang, the model gets an observation and the episode goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.schema_checks import wrong_arguments
from mcore_rl.ground.json_text import read_json
from mcore_rl.rewards.score import finite

TOOLS_KEY = "rollout.agent.tools"  # names the tools of a run
MAX_VALUE = 80  # characters of a wrong argument that the model is shown


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a call gave.

    text: what the model reads.  reward: of the turn that called; None: nothing is said of it.  failed: the call was
    wrong, or the tool failed.
    """

    text: str
    reward: float | None = None
    failed: bool = False


class ToolSchema(dict[str, Any]):
    """A schema in OpenAI's form; fields can be read as attributes, too, as verl's tools do."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return ToolSchema(value) if isinstance(value, dict) else value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The schema as a plain dict, as pydantic's method."""
        return dict(self)


def schema_of_texts(name: str, description: str, **arguments: str) -> ToolSchema:
    """The schema of a tool all of whose arguments are texts that it requires.  arguments: their descriptions."""
    properties = {argument: {"type": "string", "description": text} for argument, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return ToolSchema(type="function", function={"name": name, "description": description, "parameters": parameters})


class EpisodeTool:
    """A tool, with a state for each episode that calls it; subclasses write ``execute``.

    The constructor and methods are those of verl's ``BaseTool``, so that a class written for it can stand here.

    config: of the yaml file.  tool_schema: {type: function, function: {name, description, parameters}}.
    limits_itself: its calls have a limit of their own instead of ``tool_timeout_s``.
    replayable: an episode that was interrupted may call it again as before, to get to where it was; False: not, since a
        call does something that must not be done twice, say, and the whole group of the episode is drawn again.
    """

    limits_itself = False
    replayable = True

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.name = str(tool_schema["function"]["name"])

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begins the tool's part of an episode.  kwargs: ``tools_kwargs.NAME.create_kwargs`` of the row."""

    def place(self, instance_id: str) -> AbstractAsyncContextManager[Any]:
        """Waits until a call can run, and is open while it does; what it waits is no time of the tool's."""
        return nullcontext()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Runs one call.

        Returns a text, or (text, reward) or (text, reward, metrics); the reward is of the turn, None or a number.
        """
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the episode by this tool, once it has ended; it is added to the last turn's."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the tool's part of an episode; called once, however it ended."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of the model's.

    arguments: JSON as the model wrote it.  problem: why it cannot be read, or "".  id: as the model wrote it; "": it
    writes none.
    """

    name: str
    arguments: str = "{}"
    problem: str = ""
    id: str = ""


@dataclass(frozen=True)
class ToolSet:
    """The tools that models of a run may call, by name."""

    tools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of all tools, for the chat template."""
        return [dict(tool.tool_schema) for tool in self.tools.values()]

    def problem_of(self, call: ToolCall) -> str:
        """What is wrong with ``call``, for the model to read; "" if nothing is."""
        if call.problem:
            return call.problem
        if call.name not in self.tools:
            return f"There is no tool {call.name!r}. The tools are: {', '.join(self.tools) or 'none'}."
        try:
            arguments = read_json(call.arguments)
        except ValueError as error:
            return f"The arguments of {call.name} are no JSON: {error}."
        if not isinstance(arguments, dict):
            return f"The arguments of {call.name} are {_shown(arguments)}. Write a JSON object."
        parameters = self.tools[call.name].tool_schema["function"].get("parameters") or {}
        wrong = wrong_arguments(parameters, arguments)
        unknown = sorted(set(arguments) - set(parameters.get("properties") or arguments))
        problems = [_said(error) for error in wrong] + [f"there is no argument {name!r}" for name in unknown]
        return f"The arguments of {call.name} are wrong: {'; '.join(problems)}." if problems else ""


def result_of(answer: Any) -> ToolResult:
    """The result in what ``execute`` returned.  TypeError, ValueError: it is none."""
    text, reward, *_ = (*answer, None) if isinstance(answer, tuple) else (answer, None)
    if hasattr(text, "text"):  # verl's ToolResponse
        text = text.text
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False, default=str)
    return ToolResult(text=text, reward=None if reward is None else finite(reward, "the reward of a tool"))


def _said(error: Any) -> str:
    """What is wrong with an argument, without the whole of its value."""
    where = error.json_path.removeprefix("$").lstrip(".")
    if error.validator == "type":
        return f"{where} is {_shown(error.instance)}, not of type {error.validator_value}"
    return f"{where}: {error.message[:200]}" if where else str(error.message)[:200]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."
