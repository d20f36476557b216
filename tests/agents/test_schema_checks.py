"""Schemas of strangers: what they say of arguments, and what they may cost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import regex
from jsonschema import Draft202012Validator

from mcore_rl.agents import schema_checks
from mcore_rl.agents.schema_checks import MATCH_S, MAX_ERRORS, TooDearError, wrong_arguments
from mcore_rl.agents.tools import EpisodeTool, ToolCall, ToolSchema, ToolSet


def doubling(depth: int) -> dict[str, Any]:
    """A schema of which each part asks twice for the next."""
    parts = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{depth}": {"required": ["x"]}}}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": "^(a|aa)+$"}}}, {"a": "a" * 80 + "b"}),
        ({"properties": {"a": {"pattern": "a" * 2000}}}, {"a": "b"}),
        ({"patternProperties": {"^(a|aa)+$": {}}}, {"a" * 80 + "b": 1}),
        ({"patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False}, {"a" * 80 + "b": 1}),
        ({"additionalProperties": {"pattern": "^(a|aa)+$"}}, {"x": "a" * 80 + "b"}),
        ({"patternProperties": {"^(a|aa)+$": {}}, "unevaluatedProperties": False}, {"a" * 80 + "b": 1}),
        ({"propertyNames": {"pattern": "^(a|aa)+$"}}, {"a" * 80 + "b": 1}),
        ({"properties": {"a": {"contains": {"not": {"pattern": "^(a|aa)+$"}}}}}, {"a": ["a" * 80 + "b"]}),
        ({"patternProperties": {f"^(a|aa)+{n}?$": {} for n in range(1000)}}, {"a" * 28 + "b": 1}),
        ({"patternProperties": {f"^x{n}y*$": {} for n in range(3000)}}, {"b": 1}),  # each is cheap
        (doubling(40), {"x": 1}),
        ({"properties": {"a": {"unevaluatedItems": False}}}, {"a": [1]}),
    ],
)
def test_a_check_that_is_dear_is_ended(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    begun = time.process_time()
    with pytest.raises(TooDearError):
        wrong_arguments(schema, arguments)
    assert time.process_time() - begun < 20 * MATCH_S


def test_a_thread_that_waits_for_a_core_is_no_dear_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the library is one by the clock, which runs on while others compute."""
    search, waits = regex.search, [1, 1, 1]

    def late(pattern: str, text: str, *, timeout: float) -> Any:
        if waits:
            waits.pop()
            time.sleep(timeout)
            raise TimeoutError
        return search(pattern, text, timeout=timeout)

    monkeypatch.setattr(schema_checks.regex, "search", late)
    schema = {"properties": {"a": {"pattern": "^b+$"}}}
    (error,) = wrong_arguments(schema, {"a": "abb"})
    assert "does not match" in error.message and not waits
    waits += [1] * 1000
    with pytest.raises(TooDearError):
        wrong_arguments(schema, {"a": "abb"})
    assert len(waits) > 800


MANY = [{"x": number} for number in range(3000)]


@pytest.mark.parametrize(
    ("schema", "values", "count"),
    [
        ({"uniqueItems": True}, MANY, 0),
        ({"uniqueItems": True}, [*MANY, MANY[7]], 1),
        ({"items": {"enum": MANY}}, MANY, 0),
        ({"items": {"enum": MANY}}, [{"y": 1}] * 3000, MAX_ERRORS),
        ({"items": {"const": MANY[:100]}}, [MANY[:100]] * 50, 0),
    ],
)
def test_comparisons_of_many_values_are_not_dear(schema: dict[str, Any], values: list[Any], count: int) -> None:
    begun = time.process_time()
    assert len(wrong_arguments({"properties": {"a": schema}}, {"a": values})) == count
    assert time.process_time() - begun < 20 * MATCH_S


def test_nothing_that_a_schema_refers_to_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("urllib.request.urlopen", load)
    for address in ("http://127.0.0.1:9/schema.json", "file:///etc/passwd"):
        with pytest.raises(Exception, match="Unresolvable"):
            wrong_arguments({"properties": {"a": {"$ref": address}}}, {"a": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^[0-9]{3}-[a-z]+$"}}},
        {"patternProperties": {"^a": {"type": "integer"}, "x$": {"minimum": 3}}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "string"}}, "additionalProperties": False},
        {"patternProperties": {"^x": {}}, "additionalProperties": {"type": "string"}},
        {"additionalProperties": False},
        {"required": ["a"], "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
         "$defs": {"n": {"type": "array", "items": {"pattern": "b"}}}},
        {"properties": {"a": {"uniqueItems": True}, "x": {"enum": [1, True, "2", {"b": [2.0]}]}}},
        {"properties": {"a": {"const": ["b", "c"]}, "x": {"const": {"c": 1, "b": [2]}}}},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"a": "123-abc"},
        {"a": "x"},
        {"a": None},
        {"a": ["b", "c"]},
        {"ax": 1},
        {"x1": "y", "b": 2},
        {"a": 1, "x": 2},
        {"a": [1, 1.0], "x": 1.0},
        {"a": [1, True], "x": False},
        {"a": [{"b": 1, "c": 2}, {"c": 2, "b": 1}], "x": {"b": [2], "c": 1.0}},
        {"a": [[0], [False]], "x": {"b": [2]}},
    ],
)
def test_errors_are_those_of_jsonschema(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    expected = {(each.json_path, each.validator) for each in Draft202012Validator(schema).iter_errors(arguments)}
    assert {(each.json_path, each.validator) for each in wrong_arguments(schema, arguments)} == expected


def test_a_call_of_a_tool_with_such_a_schema_is_refused_and_the_model_is_told() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|aa)+$"}}}
    tool = EpisodeTool({}, ToolSchema({"type": "function", "function": {"name": "t", "parameters": parameters}}))
    call = ToolCall(name="t", arguments=json.dumps({"a": "a" * 80 + "b"}))
    with pytest.raises(TooDearError, match="take longer"):
        ToolSet({"t": tool}).problem_of(call)
