"""Test cases of programs, in the formats of common data sets: what to run, and what must come out.

- ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of a script (APPS, TACO, CodeContests)
- the same with ``"fn_name"``: arguments and result of a function, or of a method of ``class Solution`` (APPS, TACO)
- ``["assert f(1) == 2", ...]``, or these under ``"assert_case"`` or ``"test_list"``: tests as Python source (MBPP,
  HumanEval, EvalPlus, pytest's functions and unittest's classes); see ``asserts``

or any of these as JSON text.  The program's process never sees the expected values, and what it answers is compared
outside of it: here (``ScriptCase``, ``CallCase``, ``AssertCase``) or by the tests in another process (``JudgedCase``).
Only an ``InsideCase`` is judged in the program's own process, where a program could forge the verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from mcore_rl.json_text import read_json
from mcore_rl.rewards.confinement import Ending, Outcome, Step
from mcore_rl.rewards.plain_data import encode

REL_TOL = ABS_TOL = 1e-6  # of numbers with a fraction
# The names, besides ``math``, that a condition which is judged here may use.
JUDGES: dict[str, Any] = {
    each.__name__: each
    for each in (
        abs, all, any, bool, dict, float, int, isinstance, len, list, max, min, round, set, sorted, str, sum, tuple,
    )
} | {"isclose": math.isclose}  # fmt: skip
_FORMS = (
    'Write {"inputs": [...], "outputs": [...]}, with "fn_name" for a function, or a list of asserts; '
    "or one of these as JSON text"
)


@dataclass(frozen=True, kw_only=True)
class ScriptCase:
    """A script that reads ``stdin`` and must print ``stdout``."""

    stdin: str
    stdout: str
    steps: tuple[Step, ...] = ()

    def passed(self, outcome: Outcome) -> bool:
        """Whether the script ended by itself with exit code 0 and printed ``stdout``; see ``same_output``."""
        return outcome.ending is Ending.finished and same_output(outcome.stdout, self.stdout)


@dataclass(frozen=True, kw_only=True)
class CallCase:
    """A call of a function: ``steps`` has its name and arguments, ``expected`` the result that it must return."""

    steps: tuple[Step, ...]
    expected: Any
    stdin: str = ""

    def passed(self, outcome: Outcome) -> bool:
        """Whether the result equals ``expected``, or its only item, since APPS wraps the result in a list."""
        if outcome.ending is not Ending.finished or len(outcome.values) != 1:
            return False
        value = _jsonable(outcome.values[0])
        expected = _jsonable(self.expected)
        return _same_value(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])
        )


@dataclass(frozen=True)
class Condition:
    """A condition on a tuple of values.  source: a Python expression of ``values``, ``math`` and ``JUDGES``."""

    source: str

    def holds(self, values: object) -> bool:
        """Whether ``values`` meets the condition; False if the evaluation fails."""
        try:
            return isinstance(values, tuple) and bool(
                eval(self.source, {"__builtins__": {}, "math": math, **JUDGES, "values": values})
            )
        except Exception:  # noqa: BLE001  values of a program may make any comparison raise
            return False


@dataclass(frozen=True, kw_only=True)
class AssertCase:
    """Expressions to evaluate.  expected: for each value that they give, in order, the equal literal or a Condition."""

    steps: tuple[Step, ...]
    expected: tuple[Any, ...] = field(default=())
    stdin: str = ""

    def passed(self, outcome: Outcome) -> bool:
        """Whether nothing raised and every value equals its literal, by Python's ``==``, or meets its Condition."""
        if outcome.ending is not Ending.finished or len(outcome.values) != len(self.expected):
            return False
        return all(
            expected.holds(value) if isinstance(expected, Condition) else _equals(value, expected)
            for value, expected in zip(outcome.values, self.expected, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class _TestsCase:
    """Tests as Python source, which give a verdict."""

    tests: str

    def passed(self, outcome: Outcome) -> bool:
        """Whether the tests reached their end and something was checked, by what their process says."""
        return outcome.ending is Ending.finished and outcome.values == (True,)


@dataclass(frozen=True, kw_only=True)
class JudgedCase(_TestsCase):
    """Tests that run in a process of their own.

    names: the built-in names that are the program's in them.  has_prelude: they use names of ``PRELUDE``.
    """

    names: tuple[str, ...] = ()
    has_prelude: bool = False


@dataclass(frozen=True, kw_only=True)
class InsideCase(_TestsCase):
    """Tests that only run in the program's own process, which could forge what they say; ``why`` they do."""

    why: str


Case = ScriptCase | CallCase | AssertCase | JudgedCase | InsideCase


def read_cases(ground_truth: object) -> list[Case]:
    """The test cases of a row, in order.  ValueError, with what is wrong: it has none of the forms above."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = read_json(ground_truth)
        except ValueError as error:
            raise ValueError(f"ground truth is not JSON: {error}. {_FORMS}") from error
    if isinstance(ground_truth, Mapping):
        for key in ("assert_case", "test_list"):
            if ground_truth.get(key) is not None:
                return read_cases(list(ground_truth[key]))
        inputs, outputs = ground_truth.get("inputs"), ground_truth.get("outputs")
        if _is_list(inputs) and _is_list(outputs) and len(inputs) == len(outputs) > 0:
            name = ground_truth.get("fn_name")
            pairs = zip(inputs, outputs, strict=True)
            return [_call_case(name, *pair) if name else _script_case(*pair) for pair in pairs]
    elif _is_list(ground_truth) and ground_truth and all(isinstance(item, str) for item in ground_truth):
        from mcore_rl.rewards.asserts import read_tests  # which makes cases

        return [read_tests(item) for item in ground_truth]
    raise ValueError(f"ground truth holds no test cases. {_FORMS}")


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal line by line and word by word; space between words and at the end is ignored.

    If the expected word is a number with a fraction or an exponent, a number within 1e-6 (absolute or relative) passes.
    """
    lines, expected_lines = _words(printed), _words(expected)
    return len(lines) == len(expected_lines) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _script_case(stdin: object, stdout: object) -> ScriptCase:
    """The case of a script; ``stdin`` and ``stdout`` are text or a list of lines, as in APPS."""
    first, second = ("\n".join(map(str, side)) if _is_list(side) else str(side) for side in (stdin, stdout))
    return ScriptCase(stdin=first, stdout=second)


def _call_case(name: object, arguments: object, expected: object) -> CallCase:
    """The case of a call.  ``arguments`` is a list, or text with one JSON value per line (LiveCodeBench).

    In the second form ``expected`` may be JSON text, too.  ValueError: ``arguments`` is neither.
    """
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not _is_list(arguments):
        raise ValueError(f"the inputs of {name} are {arguments!r}. Write a list of arguments")
    return CallCase(steps=(("call", (str(name), encode(list(arguments)))),), expected=expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=REL_TOL, abs_tol=ABS_TOL)


def _jsonable(value: Any) -> Any:
    """``value`` with tuples as lists and keys as text, to be compared with values that came from JSON."""
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    return value


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[key], expected[key]) for key in value)
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and _close(value, expected)
    return _equals(value, expected)


def _equals(value: Any, expected: Any) -> bool:
    try:
        return bool(value == expected)
    except (ValueError, TypeError, RecursionError):  # arrays of numpy have no truth
        return False
