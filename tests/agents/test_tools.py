"""Wrong calls are told what is wrong; what tools return in any form is a result."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.agents.tools import EpisodeTool, ToolCall, ToolResult, ToolSchema, ToolSet, result_of
from mcore_rl.rewards.score import NotANumberError


def schema(name: str = "book") -> ToolSchema:
    city = {"type": "string", "enum": ["Bonn", "Ulm"]}
    parameters = {"type": "object", "properties": {"city": city, "days": {"type": "integer"}}, "required": ["city"]}
    return ToolSchema(type="function", function={"name": name, "description": "books", "parameters": parameters})


TOOLS = ToolSet({"book": EpisodeTool({}, schema())})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"city": "Bonn"}', ""),
        ('{"city": "Bonn", "days": 2}', ""),
        ('{"city": "Bonn"', "The arguments of book are no JSON: Expecting"),
        ('["Bonn"]', 'The arguments of book are ["Bonn"]. Write a JSON object.'),
        ('{"days": 1}', "'city' is a required property"),
        ('{"city": "Paris"}', "city: 'Paris' is not one of ['Bonn', 'Ulm']"),
        ('{"city": "Bonn", "days": "2"}', 'days is "2", not of type integer'),
        ('{"city": "Bonn", "nights": 1}', "there is no argument 'nights'"),
    ],
)
def test_what_is_wrong_with_a_call(arguments: str, problem: str) -> None:
    said = TOOLS.problem_of(ToolCall(name="book", arguments=arguments))
    assert problem in said and bool(said) == bool(problem)


def test_all_of_it_is_said_at_once_and_briefly() -> None:
    said = TOOLS.problem_of(ToolCall(name="book", arguments=json.dumps({"days": "x" * 10**5, "a": 1})))
    assert "required" in said and "days is" in said and "'a'" in said and len(said) < 400


def test_an_unknown_tool_is_told_which_there_are() -> None:
    assert TOOLS.problem_of(ToolCall(name="fly")) == "There is no tool 'fly'. The tools are: book."
    assert TOOLS.problem_of(ToolCall(name="book", problem="unreadable")) == "unreadable"


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("a", ToolResult(text="a")),
        (("a", 0.5), ToolResult(text="a", reward=0.5)),
        (("a", None, {}), ToolResult(text="a")),
        ((SimpleNamespace(text="a"), 1, {}), ToolResult(text="a", reward=1.0)),
        ({"k": "é"}, ToolResult(text='{"k": "é"}')),
        (ToolResult(text="b"), ToolResult(text="b")),
    ],
)
def test_results_in_any_form(answer: Any, result: ToolResult) -> None:
    made = answer if isinstance(answer, ToolResult) else result_of(answer)
    assert made == result


def test_a_reward_that_is_no_number_is_none() -> None:
    with pytest.raises(NotANumberError):
        result_of(("a", float("nan")))


def test_a_schema_reads_like_verls() -> None:
    assert schema().function.name == "book" and schema().model_dump()["type"] == "function"
    with pytest.raises(AttributeError):
        _ = schema().nothing
