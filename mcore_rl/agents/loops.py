"""Agent loops: what happens between two turns of the model.  A row chooses its loop by the column ``agent_name``.

A loop of one's own is a class with ``async def run(self, row, session) -> Episode``, which returns what
``session.episode()`` gives at the end; ``rollout.agent.loops`` names it.  One object runs all episodes, side by side.
A limit of the session ends a loop by an exception that it need not catch.  An episode that was interrupted is run again
from its beginning, and gets the turns that it had; a class with ``replayable = False`` is given new ones.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from mcore_rl.agents.arithmetic import evaluated, written
from mcore_rl.agents.interactions import EpisodeAnswers
from mcore_rl.agents.rendering import USER
from mcore_rl.agents.session import ANSWERED, INTERACTION, INTERACTION_FAILED, EpisodeOverError, Session
from mcore_rl.agents.tools import ToolCall, ToolSet
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.json_text import read_json
from mcore_rl.rollout.episodes import Episode, FinishReason

OBSERVATION = "Observation:"
# Nothing here can match in two ways: with white space around the name, a line of spaces took cubic time.
_ACTION = re.compile(r"Action:(?P<name>[^\n]*)\nAction Input:(?P<input>.*)\Z", re.DOTALL)


class SingleTurn:
    """One answer to the prompt."""

    async def run(self, row: PromptRow, session: Session) -> Episode:
        """The episode of ``row``; the loop is above."""
        await session.draw()
        return session.episode(ANSWERED)


class ToolAgent:
    """Runs the calls of each turn and appends their results, until a turn has none.

    With an interaction, such a turn is answered by it, until it ends the episode.
    """

    def __init__(self, *, has_tools: bool = True) -> None:
        self._has_tools = has_tools

    async def run(self, row: PromptRow, session: Session, answers: EpisodeAnswers | None = None) -> Episode:
        """The episode of ``row``; the loop is above."""
        while True:
            turn = await session.draw()
            calls = session.calls_of(turn) if self._has_tools else []
            if calls:
                await session.answer_calls(calls)
            elif answers is None:
                return session.episode(ANSWERED)
            elif await _answered(session, answers):
                return session.episode(INTERACTION)


class React:
    """Thought, Action, Action Input, Observation in one text (arXiv:2210.03629), until a turn has no action.

    The model's turn goes on after an observation: nothing of the chat template stands between them.
    """

    async def run(self, row: PromptRow, session: Session) -> Episode:
        """The episode of ``row``; the loop is above."""
        while True:
            turn = await session.draw(stop=(OBSERVATION,))
            call = react_call(turn.text, session.tools)
            if call is None:
                return session.episode(ANSWERED)
            (text,) = await session.call_tools([call])
            if turn.stop == OBSERVATION:
                session.observe(f" {text}\n")
            else:
                session.append([{"role": USER, "content": f"{OBSERVATION} {text}"}])


class MathExpression:
    """Computes the expressions that the model writes as ``<<48 / 2>>``, and writes `` = 24`` behind them.

    The model's turn goes on, as with GSM8K's calculator annotations (arXiv:2110.14168, appendix C).  Operators are the
    calculator's, and ``@`` of verl's example of this name: a @ b is 3a - 2b.
    """

    async def run(self, row: PromptRow, session: Session) -> Episode:
        """The episode of ``row``; the loop is above."""
        while True:
            turn = await session.draw(stop=(">>",))
            if turn.stop != ">>":
                return session.episode(ANSWERED)
            _, mark, expression = turn.text.rpartition("<<")
            try:
                if not mark:
                    raise ValueError("there is no << before >>")
                text = written(evaluated(expression, {ast.MatMult: lambda a, b: 3 * a - 2 * b}))
            except ValueError as error:
                session.tool_calls.num_failed += 1
                text = f"(Error: {error})"
            session.tool_calls.num_calls += 1
            session.observe(f" = {text}")


def react_call(text: str, tools: ToolSet) -> ToolCall | None:
    """The last action in ``text``; None if there is none.  An input that is no JSON is the tool's only argument."""
    begin = text.rfind("Action:")
    action = _ACTION.match(text, begin) if begin >= 0 else None
    if action is None:
        return None
    name = action["name"].strip(" \t")
    given = action["input"].strip()
    try:
        arguments: Any = read_json(given)
    except ValueError:
        arguments = given
    if not isinstance(arguments, dict) and name in tools.tools:
        parameters = tools.tools[name].tool_schema["function"].get("parameters") or {}
        names = list(parameters.get("properties") or ())
        if len(names) == 1:
            whole = parameters["properties"][names[0]].get("type") == "string"
            return ToolCall(name=name, arguments=json.dumps({names[0]: given.strip("\"'") if whole else arguments}))
    return ToolCall(name=name, arguments=given if isinstance(arguments, dict) else json.dumps(arguments))


async def _answered(session: Session, answers: EpisodeAnswers) -> bool:
    """Appends what the interaction answers; True: it ends the episode instead."""
    try:
        with session.waits.waiting():
            ends, text, reward = await answers.answer(session.messages)
    except Exception as error:  # whatever the environment does
        raise EpisodeOverError(INTERACTION_FAILED, FinishReason.abort) from error
    session.reward(reward)
    if not ends:
        session.append([{"role": USER, "content": text}])
    return ends
