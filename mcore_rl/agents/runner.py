"""Runs the episodes of rows that ask for an agent: loop, tools and interaction of each, from first turn to release."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mcore_rl.agents.conversations import Conversations
from mcore_rl.agents.engine_waits import EngineWaits
from mcore_rl.agents.function_process import FunctionProcesses, absolute, imported
from mcore_rl.agents.interactions import EpisodeAnswers, load_interactions
from mcore_rl.agents.loops import MathExpression, React, SingleTurn, ToolAgent
from mcore_rl.agents.mcp_servers import McpServer
from mcore_rl.agents.programs import Programs
from mcore_rl.agents.reasoning import reasoning_of
from mcore_rl.agents.rendering import TOOL, USER, TurnRenderer
from mcore_rl.agents.session import EpisodeOverError, Session, SessionParts, interaction_kwargs
from mcore_rl.agents.tool_loading import lacking, load_tools
from mcore_rl.config.agent import AgentConfig, ProgramReward
from mcore_rl.config.reward import CodeConfig
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.errors import ConfigError, DeadEngineError, RolloutError, Violation
from mcore_rl.rollout.episodes import Episode
from mcore_rl.rollout.protocol import SampleSource, Sampling
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls, VllmCallReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mcore_rl.agents.gateway import Gateway

SINGLE = ("single_turn_agent", "single_turn")
TOOL_AGENTS = ("tool_agent", "react")
PROGRAM = "program"
WITHOUT_CALLS = (*SINGLE, "react", "interaction", "math_expression")  # no calls in the form of the chat template
BUILT_IN_LOOPS: dict[str, Any] = {
    **dict.fromkeys(SINGLE, SingleTurn()),
    "tool_agent": ToolAgent(),
    "react": React(),
    "interaction": ToolAgent(has_tools=False),
    "math_expression": MathExpression(),
    PROGRAM: None,  # ``Programs`` runs it
}
TOOL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")  # of a row, for a tool
MAX_READERS = 64  # of calls, one for each list of tools that programs name
FUNCTION_PROCESSES = 8  # of users' tool functions; they mostly wait
logger = logging.getLogger(__name__)


class AgentRunner:
    """Runs agents' episodes, as many at once as are asked for.

    config: ``rollout.agent``.  code: the limits of the Python interpreter.  template_kwargs: of the chat template.
    max_prompt_tokens: of a conversation that a user's program begins.

    ConfigError: with what is wrong with the tools, the parser, the loops or the interactions.
    """

    def __init__(
        self,
        config: AgentConfig,
        code: CodeConfig,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int = 2**31 - 1,
    ) -> None:
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens
        self._processes = FunctionProcesses(FUNCTION_PROCESSES, config.tool_timeout_s)
        self.loops = BUILT_IN_LOOPS | {name: _own_loop(name, str(place)) for name, place in config.loops.items()}
        if config.default_agent_loop not in self.loops:
            raise _refusal("default_agent_loop", config.default_agent_loop, self._no_loop(config.default_agent_loop))
        if len(config.program.given) > 1:
            raise _refusal("program", ", ".join(config.program.given), "says in several ways what runs. Write one")
        self._programs = Programs(config.program, self._gateway)
        self._readers: dict[str, Callable[[str, str], ReadCalls]] = {}
        self.interactions = load_interactions(config)
        self._servers: list[McpServer] = []
        try:
            self._tools = load_tools(config, code, self._processes, self._servers)
        except BaseException:
            self.close()
            raise
        self.schemas = self._tools.schemas
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self.waits = EngineWaits()
        self._warned = set[str]()  # kinds of failures

    @cached_property
    def _parts(self) -> SessionParts:
        """Made where a row has an agent: it holds a second tokenizer."""
        return SessionParts(
            config=self._config,
            tokenizer=self._tokenizer,
            renderer=TurnRenderer(self._tokenizer, self._template_kwargs, self.schemas),
            tools=self._tools,
            read_calls=self._read_calls if self.schemas else None,
            waits=self.waits,
        )

    @cached_property
    def _reader(self) -> Callable[[str, str], ReadCalls]:
        """Made where a loop reads calls.  ConfigError: ``tool_parser`` names none that can."""
        return self._calls_of_answers(self.schemas)

    def _calls_of_answers(self, schemas: list[dict[str, Any]]) -> Callable[[str, str], ReadCalls]:
        """Reads the calls in what a turn answers, not in what it thinks; ``content`` has both."""
        read = _reader(self._config.tool_parser, self._tokenizer, schemas)
        reasoning = reasoning_of(self._tokenizer, self._template_kwargs)

        def of_answer(raw: str, after: str) -> ReadCalls:
            if reasoning is None:
                return read(raw)
            answer = reasoning.answer(raw, after)
            calls = read(answer)
            thought = raw[: len(raw) - len(answer)] if raw.endswith(answer) else ""
            return replace(calls, content=thought + calls.content)

        return of_answer

    def _read_calls(self, raw: str, after: str = "") -> ReadCalls:
        return self._reader(raw, after)

    def _gateway(self) -> Gateway:
        """What programs are served by; made when the first of them runs, since it imports a server."""
        from mcore_rl.agents.gateway import Gateway

        program = self._config.program
        return Gateway(program.host, program.port, self._parts, self._read_calls_of)

    def _read_calls_of(self, tools: Sequence[Mapping[str, Any]], raw: str, after: str = "") -> ReadCalls:
        """The calls in a turn whose conversation has ``tools``, which a program names."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._readers:
            if len(self._readers) >= MAX_READERS:
                self._readers.clear()
            self._readers[key] = self._calls_of_answers([*map(dict, tools)])
        return self._readers[key](raw, after)

    def loop_of(self, columns: Mapping[str, Any]) -> str:
        """The name of the loop of a row, from its columns."""
        inner = columns.get("extra_info") or {}
        return str(columns.get("agent_name") or inner.get("agent_name") or self._config.default_agent_loop)

    def loop_of_row(self, row: PromptRow) -> str:
        """The name of the loop of ``row``."""
        return self.loop_of({"extra_info": row.extra_info, **row.columns})

    def runs(self, row: PromptRow) -> bool:
        """Whether ``row`` is for an agent; else one answer to the prompt is all."""
        return self.loop_of_row(row) not in SINGLE

    def can_replay(self, row: PromptRow) -> bool:
        """Whether an interrupted episode of ``row`` may be run again with the turns that it had.

        Its loop, its tools and its interaction say so by ``replayable``; one that says nothing may.
        """
        parts = [self.loops[self.loop_of_row(row)], *self._tools.tools.values()]
        if (name := interaction_kwargs(row).get("name")) in self.interactions:
            parts.append(self.interactions[name])
        return all(inspect.getattr_static(type(each), "replayable", True) for each in parts)

    def problem_of(self, record: Mapping[str, Any]) -> str:
        """What keeps a row of a file from being run as it asks, with the remedy; "" if nothing does."""
        name = self.loop_of(record)
        inner = record.get("extra_info") or {}
        if name not in self.loops:
            return f"agent_name {name}: {self._no_loop(name)}"
        given = {key: record.get(key) or inner.get(key) or {} for key in ("tools_kwargs", "interaction_kwargs")}
        for key, value in given.items():
            if not isinstance(value, dict):
                return f"has {key} that is {type(value).__name__} and has no fields. Write a struct (docs/agents.md)"
        asked = {key: _given(value) for key, value in given.items()}
        if name in SINGLE and any(asked.values()):
            columns = " and ".join(key for key, value in asked.items() if value)
            return f"has {columns}, and is run by {name}. Write agent_name, or rollout.agent.default_agent_loop"
        if name == PROGRAM and (problem := self._program_problem(asked)):
            return problem
        if name == "react" and asked["interaction_kwargs"]:
            return "has interaction_kwargs, and react asks no interaction. Write agent_name tool_agent or interaction"
        if name in TOOL_AGENTS and not self.schemas and not asked["interaction_kwargs"]:
            return f"is for {name}, and there are no tools. Write rollout.agent.tools=[calculator], say"
        unknown = sorted(set(asked["tools_kwargs"]) - set(self._tools.tools))
        if name not in SINGLE and unknown:
            return f"has tools_kwargs of {', '.join(unknown)}, which is no tool of rollout.agent.tools"
        for tool, of_tool in asked["tools_kwargs"].items():
            if not isinstance(of_tool, dict) or not set(_given(of_tool)) <= set(TOOL_KWARGS):
                return f"has tools_kwargs.{tool} that is not of the form {{{', '.join(TOOL_KWARGS)}}}"
            if wrong := [verb for verb, value in _given(of_tool).items() if not isinstance(value, dict)]:
                return f"has tools_kwargs.{tool}.{wrong[0]} that has no fields. Write a struct (docs/agents.md)"
        interaction = asked["interaction_kwargs"].get("name")
        if asked["interaction_kwargs"] and interaction not in self.interactions:
            known = ", ".join(sorted(self.interactions))
            remedy = f"Write one of {known}, or rollout.agent.interaction_config_path"
            return f"asks for the interaction {interaction}, which is not there. {remedy}"
        if name == "interaction" and not asked["interaction_kwargs"]:
            return "is for interaction, and has no interaction_kwargs: {name: NAME, ...}"
        return ""

    def _program_problem(self, asked: Mapping[str, Any]) -> str:
        if any(asked.values()):
            return "is for program, which has its own tools, and has tools_kwargs or interaction_kwargs. Leave them out"
        if not self._config.program.given:
            forms = "rollout.agent.program.function=FILE.py:FUNCTION, command or url"
            return f"is for program, and nothing says which. Write {forms}"
        return ""

    def scores(self, row: PromptRow) -> ProgramReward:
        """Who says what an episode of ``row`` is worth."""
        return self._config.program.reward if self.loop_of_row(row) == PROGRAM else ProgramReward.grader

    def tools_of(self, record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that the chat template writes into a row's prompt; None: none."""
        return self.schemas if self.schemas and self.loop_of(record) not in (*WITHOUT_CALLS, PROGRAM) else None

    def check_rows(self, rows: Iterable[PromptRow]) -> tuple[bool, list[str]]:
        """(whether a row is for an agent, what a user should know of the chat template).

        ConfigError: ``rollout.agent`` is set, and no row asks for an agent; and as ``check``.
        """
        if loops := {self.loop_of_row(row) for row in rows if self.runs(row)}:
            return True, self.check(loops)
        if self._config != AgentConfig():
            problem = "says how agents run, and no row asks for one"
            remedy = (
                "Write rollout.agent.default_agent_loop=tool_agent, say, or agent_name in the rows, or leave it out"
            )
            raise ConfigError([Violation("rollout.agent", "...", problem, remedy)])
        return False, []

    def check(self, loops: Collection[str]) -> list[str]:
        """Checks what rows of ``loops`` need; returns what a user should know of the chat template.

        DataError: it cannot write more turns.  ConfigError: ``tool_parser`` names nothing that reads calls.
        """
        calls = PROGRAM in loops or (bool(self.schemas) and not set(loops) <= set(WITHOUT_CALLS))
        if calls:
            self._read_calls("")
        return self._parts.renderer.check([TOOL, USER] if calls else [USER])

    async def conversations(
        self, source: SampleSource, row: PromptRow, prompt_id: str, group: int, index: int, sampling: Sampling
    ) -> list[Episode]:
        """``run``; and behind it the other conversations of a user's program, which share its score."""
        if self.loop_of_row(row) != PROGRAM:
            return [await self.run(source, row, prompt_id, group, index, sampling)]
        arguments = (self._parts, source, row, prompt_id, group, index, sampling, self._max_prompt_tokens)
        return await self._programs.run(lambda: Conversations(*arguments))

    async def run(
        self, source: SampleSource, row: PromptRow, prompt_id: str, group: int, index: int, sampling: Sampling
    ) -> Episode:
        """One episode of ``row``, without its score.  See ``Session``.  RolloutError: a loop of the user's raised."""
        if self.loop_of_row(row) == PROGRAM:
            return (await self.conversations(source, row, prompt_id, group, index, sampling))[0]
        session = Session(self._parts, source, row, prompt_id, group, index, sampling)
        name = self.loop_of_row(row)
        run = self.loops[name].run
        kwargs = interaction_kwargs(row)
        answers = None
        if isinstance(self.loops[name], ToolAgent) and kwargs:
            interaction = self.interactions[kwargs["name"]]
            own = {key: value for key, value in kwargs.items() if key != "name"}
            answers = EpisodeAnswers(interaction, f"{prompt_id}#{index}", own, self._config.tool_timeout_s)
            run = partial(run, answers=answers)
        try:
            try:
                episode: Any = await run(row, session)
            except EpisodeOverError as over:
                if over.__cause__ is not None:
                    self._warn_once("an interaction failed", row, over.__cause__, "agent/lost")
                episode = session.episode(over.reason, over.end)
            except Exception as error:
                if name in BUILT_IN_LOOPS or isinstance(error, DeadEngineError):
                    raise
                said = f"{type(error).__name__}: {error}"
                raise RolloutError(f"{row.id}: the agent loop {name} raised {said}") from error
            if not isinstance(episode, Episode):
                returned = f"returned {type(episode).__name__}. Return session.episode(REASON)"
                raise RolloutError(f"{row.id}: the agent loop {name} {returned}")
            if episode.lost:
                return episode
            of_all = self._config.tool_reward_coef * await session.tool_calls.final_reward()
            return _with_final_reward(episode, of_all)
        finally:
            await asyncio.shield(self._released(session, answers))

    def close(self) -> None:
        """Ends the processes of tools, users' programs, and the MCP servers."""
        self._processes.close()
        self._programs.close()
        for server in self._servers:
            server.close()

    async def _released(self, session: Session, answers: EpisodeAnswers | None) -> None:
        await session.tool_calls.release()
        if answers is not None:
            try:
                await answers.close()
            except Exception as error:  # noqa: BLE001  whatever the environment does
                self._warn_once("an interaction did not end", session.row, error)

    def _warn_once(self, what: str, row: PromptRow, error: BaseException, metric: str = "") -> None:
        """Warns of the first failure of its kind; ``metric`` counts them all."""
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._warned:
            self._warned.add(kind)
            more = f" (all are counted in {metric})" if metric else ""
            logger.warning("%s: %s: %r. Others of this kind are not told%s", row.id, what, error, more)

    def _no_loop(self, name: str) -> str:
        own = f"rollout.agent.loops.{name}=FILE.py:CLASS"
        return f"there is no such loop. Write one of {', '.join(self.loops)}, or {own}"


def _with_final_reward(episode: Episode, value: float) -> Episode:
    """``episode`` with the rewards that tools give for the whole, added to its last trained turn."""
    places = [place for place, each in enumerate(episode.segments) if each.trained]
    if value == 0.0 or not places:
        return episode
    segments = list(episode.segments)
    last = segments[places[-1]]
    segments[places[-1]] = replace(last, reward=(last.reward or 0.0) + value)
    return replace(episode, segments=tuple(segments))


def _reader(name: str, tokenizer: PreTrainedTokenizerBase, schemas: list[dict[str, Any]]) -> Callable[[str], ReadCalls]:
    """What reads the calls in a turn: one of vLLM's parsers, or the user's function text -> [{name, arguments}]."""
    if ":" not in name:
        return VllmCallReader(name, tokenizer, schemas).read
    function = _imported("tool_parser", name)

    def read(text: str) -> ReadCalls:
        unreadable = ReadCalls(calls=(), unreadable=True)
        try:
            entries = list(function(text))
        except (ValueError, RecursionError):
            return unreadable
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise RolloutError(f"rollout.agent.tool_parser={name} raised {said}") from error
        try:  # what the model wrote may be in it: no name, no object, JSON that is too deep
            return ReadCalls(
                calls=tuple((str(each["name"]), _as_json(each.get("arguments") or {})) for each in entries)
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            return unreadable

    return read


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _own_loop(name: str, place: str) -> Any:
    if name in BUILT_IN_LOOPS:
        raise _refusal(f"loops.{name}", place, "is the name of a built-in loop")
    kind = _imported(f"loops.{name}", place)
    if not isinstance(kind, type) or lacking(kind, ["run"]):
        raise _refusal(f"loops.{name}", place, "is no class with async def run(self, row, session)")
    try:
        return kind()
    except Exception as error:
        raise _refusal(f"loops.{name}", place, f"cannot be made: {type(error).__name__}: {error}") from error


def _imported(key: str, place: str) -> Any:
    try:
        return imported(absolute(place))
    except Exception as error:
        raise _refusal(key, place, f"{type(error).__name__}: {error}") from error


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row's dict that say something: null is as good as absent."""
    return {key: each for key, each in value.items() if each is not None}


def _refusal(key: str, value: str, problem: str) -> ConfigError:
    return ConfigError([Violation(f"rollout.agent.{key}", value, problem, "Write FILE.py:NAME, or a built-in name")])
