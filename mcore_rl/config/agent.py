"""The configuration group ``rollout.agent``: agent loops, tools, and what ends an episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from mcore_rl.config.bounds import InputFile, Interval, Lines, NonNegativeFloat, PositiveInt, Seconds


class CutSide(Enum):
    """Where text that is too long is cut: at its beginning (left), its end (right), or in the middle."""

    left = "left"
    right = "right"
    middle = "middle"


class ProgramReward(Enum):
    """Who says what a run of a program is worth.

    grader: the row's grader, of the program's last completion.
    program: the program, by its result or by ``POST /v1/episode/reward``.
    sum: both, added.
    """

    grader = "grader"
    program = "program"
    sum = "sum"


@dataclass(kw_only=True)
class ProgramConfig:
    """A user's program that the loop ``program`` runs for each episode.  One of the first three says which.

    command: its command line.
    function: ``FILE.py:FUNCTION``, called with the row in a process of its own.
    url: of a service that runs already, which is sent the row.
    timeout_s: limit of one run, less the time in which it waits for the model.
    max_parallel: programs that run at once; the others wait.
    reward: who says what a run is worth.
    env: variables of the environment that hold secrets and that the program gets all the same.
    host: the address at which the gateway listens; any but the loopback is for ``url`` on another machine.
    port: at which it listens; 0: any that is free.
    """

    command: list[str] = field(default_factory=list)
    function: str | None = None
    url: str | None = None
    timeout_s: Seconds = 600.0
    max_parallel: PositiveInt = 64
    reward: ProgramReward = ProgramReward.grader
    env: list[str] = field(default_factory=list)
    host: Lines = "127.0.0.1"
    port: Annotated[int, Interval("[0, 65535]")] = 0

    @property
    def given(self) -> list[str]:
        """Which of ``command``, ``function`` and ``url`` are written."""
        of_each = {"command": self.command, "function": self.function, "url": self.url}
        return [name for name, value in of_each.items() if value]


@dataclass(kw_only=True)
class AgentConfig:
    """Agents: how an episode runs, what the model may call, and the limits that end an episode.

    default_agent_loop: the loop of rows without ``agent_name``.
    loops: further loops, by the name that rows use: ``FILE.py:CLASS`` each.
    tools: what the model may call: built-in tools by name, and functions as ``FILE.py:FUNCTION``.
    tool_config_path: a yaml file of tools in verl's form, besides ``tools``.
    mcp_config_path: a yaml or JSON file of MCP servers, whose tools the model may call, too.
    search_corpus: the documents of the tool ``search``: a jsonl or parquet file, or a folder.
    search_results: the most documents that a call of ``search`` returns.
    tool_parser: reads the model's calls: one of vLLM's parsers by name, or ``FILE.py:FUNCTION``.
    interaction_config_path: a yaml file of interactions in verl's form.
    max_turns: the most turns of the model.
    max_turn_tokens: the most tokens of a turn; None: as many as the episode has left.
    max_calls_per_turn: the most calls of a turn.
    max_parallel_calls: calls of a turn that run at once; the others wait.
    tool_timeout_s: limit of one call; the model is told that it took too long.
    max_tool_s: limit of all calls of an episode together.
    max_tool_response_length: the most characters of a call's result; the rest is cut.
    tool_response_cut: where a result is cut.
    tool_reward_coef: factor of the rewards that tools and interactions give for a turn.
    program: a user's program that runs each episode of the loop ``program``.
    """

    default_agent_loop: str = "single_turn_agent"
    loops: dict[str, Any] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    tool_config_path: InputFile | None = None
    mcp_config_path: InputFile | None = None
    search_corpus: str | None = None
    search_results: PositiveInt = 3
    tool_parser: str = "hermes"
    interaction_config_path: InputFile | None = None
    max_turns: PositiveInt = 8
    max_turn_tokens: PositiveInt | None = None
    max_calls_per_turn: PositiveInt = 8
    max_parallel_calls: PositiveInt = 4
    tool_timeout_s: Seconds = 30.0
    max_tool_s: Seconds = 300.0
    max_tool_response_length: PositiveInt = 1024
    tool_response_cut: CutSide = CutSide.middle
    tool_reward_coef: NonNegativeFloat = 1.0
    program: ProgramConfig = field(default_factory=ProgramConfig)

    @property
    def files(self) -> list[str]:
        """The files of the user: tools, loops, a parser, a program, yaml; of ``FILE.py:NAME`` the file."""
        places = [*self.tools, *map(str, self.loops.values()), self.tool_parser, self.program.function or ""]
        own = [place.rpartition(":")[0] for place in places if ":" in place]
        named = (self.tool_config_path, self.mcp_config_path, self.interaction_config_path)
        return [*own, *(path for path in named if path is not None)]
