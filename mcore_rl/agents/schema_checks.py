"""Checks the arguments of a call against the schema of its tool, which a stranger may have written (an MCP server).

What a schema can ask for is limited: a regular expression has ``MAX_PATTERN`` characters at most, those of one check
have ``MATCH_S`` of a core together, a check takes at most ``MAX_STEPS`` keywords, and no reference is followed out of
it.  Values are compared by their text, once each: jsonschema compares the items of an array in pairs.

Invariant: a check ends within a second of a core, whatever the schema and the arguments are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry

MATCH_S = 0.05
MAX_PATTERN = 1000
MAX_STEPS = 10_000
MAX_ERRORS = 20  # that are told


class TooDearError(Exception):
    """A check would take too long; the message says what of it."""


def wrong_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[ValidationError]:
    """What is wrong with ``arguments``.  TooDearError, and whatever jsonschema raises of a schema that is none."""
    check = _Check()
    kind = extend(Draft202012Validator, {name: check.counted(each) for name, each in check.keywords.items()})
    validator = kind(dict(schema), registry=Registry())  # an own registry: jsonschema's default asks the network
    return sorted(islice(validator.iter_errors(arguments), MAX_ERRORS), key=lambda error: error.json_path)


class _Check:
    """One check, and what it may still cost."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._seconds = MATCH_S
        self._texts_of: dict[int, set[str]] = {}  # by the id of a list of values

    @property
    def keywords(self) -> dict[str, Any]:
        """What checks each keyword of a schema: jsonschema's own, but for those that match."""
        return {
            **Draft202012Validator.VALIDATORS,
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "unevaluatedProperties": self._unevaluated,
            "unevaluatedItems": self._unevaluated,
            "uniqueItems": self._unique_items,
            "enum": self._enum,
            "const": self._const,
        }

    def counted(self, check: Any) -> Any:
        """``check``, which counts as a step."""

        def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._steps -= 1
            if self._steps < 0:
                raise TooDearError(f"the schema asks for more than {MAX_STEPS} checks")
            return check(validator, value, instance, schema)

        return checked

    def _matches(self, pattern: str, text: str) -> bool:
        if len(pattern) > MAX_PATTERN:
            raise TooDearError(f"a pattern of the schema has more than {MAX_PATTERN} characters")
        while self._seconds > 0:
            begun = time.thread_time()
            try:
                return regex.search(pattern, text, timeout=self._seconds) is not None
            except TimeoutError:  # by the clock: on a busy machine this thread may have waited for a core
                self._seconds -= MATCH_S / 100
            finally:
                self._seconds -= time.thread_time() - begun
        raise TooDearError(f"patterns of the schema take longer than {MATCH_S} s of a core, as {pattern[:80]!r}")

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not self._matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            for pattern, inner in patterns.items():
                for name, value in instance.items():
                    if self._matches(pattern, name):
                        yield from validator.descend(value, inner, path=name, schema_path=pattern)

    def _additional_properties(self, validator: Any, inner: Any, instance: Any, schema: Any) -> Any:
        if not validator.is_type(instance, "object"):
            return None
        named = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        others = {
            name: value
            for name, value in instance.items()
            if name not in named and not any(self._matches(pattern, name) for pattern in patterns)
        }
        return Draft202012Validator.VALIDATORS["additionalProperties"](validator, inner, others, {})

    def _unevaluated(self, validator: Any, inner: Any, instance: Any, schema: Any) -> Any:
        said = "the schema has unevaluatedProperties or unevaluatedItems, which are not checked"
        raise TooDearError(f"{said}. Write additionalProperties or items")

    def _unique_items(self, validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if unique and validator.is_type(instance, "array") and len({_text(each) for each in instance}) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")

    def _enum(self, validator: Any, values: Sequence[Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
        if id(values) not in self._texts_of:
            self._texts_of[id(values)] = {_text(each) for each in values}
        if _text(instance) not in self._texts_of[id(values)]:
            yield ValidationError(f"{instance!r} is not one of {values!r}")

    def _const(self, validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if _text(instance) != _text(value):
            yield ValidationError(f"{value!r} was expected")


def _text(value: Any) -> str:
    """The text that equal JSON values share: 1 is 1.0 and not true, and objects have no order."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(each) for key, each in value.items()}
    return [_with_integers(each) for each in value] if isinstance(value, list | tuple) else value
