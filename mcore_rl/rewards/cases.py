"""Test cases of programs, as the field writes them: what to run, and what must come out.

- ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of a script (APPS, TACO, CodeContests)
- the same with ``"fn_name"``: arguments and result of a function, or of a method of ``class Solution`` (APPS, TACO)
- ``["assert f(1) == 2", ...]``, or these under ``"assert_case"`` or ``"test_list"`` (MBPP, HumanEval)

or any of these as JSON text.  What is expected stays here: of ``assert f(1) == 2`` and of ``assert isclose(f(1), 2)``
only ``f(1)`` goes to the program, also where they stand in a ``check(candidate)``.  What else tests do (loops, classes)
is judged where the program runs, which a program could cheat.
"""

from __future__ import annotations

import ast
import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from mcore_rl.rewards.confinement import Ending, Outcome, Step

REL_TOL = ABS_TOL = 1e-6  # of numbers with a fraction
# What conditions of tests are judged with here, besides ``math``, and the kinds of expression that they are made of.
JUDGES: dict[str, Any] = {
    each.__name__: each
    for each in (abs, all, any, bool, dict, float, int, len, list, max, min, round, set, sorted, str, sum, tuple)
} | {"isclose": math.isclose}
_JUDGED = (
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Call,
    ast.Subscript, ast.Slice, ast.Name, ast.Attribute, ast.keyword, ast.cmpop, ast.boolop, ast.unaryop, ast.operator,
    ast.expr_context,
)  # fmt: skip
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
        """Whether it ended by itself with exit code 0 and printed that; see ``same_output``."""
        return outcome.ending is Ending.finished and same_output(outcome.stdout, self.stdout)


@dataclass(frozen=True, kw_only=True)
class CallCase:
    """A function and its arguments in ``steps``, and what it must give."""

    steps: tuple[Step, ...]
    expected: Any
    stdin: str = ""

    def passed(self, outcome: Outcome) -> bool:
        """Whether the result equals what is expected, alone or as the only item of a list, as APPS writes it."""
        if outcome.ending is not Ending.finished or len(outcome.values) != 1:
            return False
        value = _jsonable(read_literal(outcome.values[0]))
        expected = _jsonable(self.expected)
        return _same_value(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])
        )


@dataclass(frozen=True)
class Condition:
    """What a tuple of values must fulfil: ``source``, an expression of ``values`` and of ``JUDGES``."""

    source: str

    def holds(self, values: object) -> bool:
        """Whether it is true of them; not where it cannot be said."""
        try:
            return isinstance(values, tuple) and bool(
                eval(self.source, {"__builtins__": {}, "math": math, **JUDGES, "values": values})
            )
        except Exception:  # noqa: BLE001  whatever comes of comparing what a program gave
            return False


@dataclass(frozen=True, kw_only=True)
class AssertCase:
    """Statements to execute; ``expected``: of each value that they give, in order; or what it must fulfil."""

    steps: tuple[Step, ...]
    expected: tuple[Any, ...] = field(default=())
    stdin: str = ""

    def passed(self, outcome: Outcome) -> bool:
        """Whether nothing raised and every value is as expected, as Python compares them."""
        if outcome.ending is not Ending.finished or len(outcome.values) != len(self.expected):
            return False
        return all(
            expected.holds(read_literal(text)) if isinstance(expected, Condition) else read_literal(text) == expected
            for text, expected in zip(outcome.values, self.expected, strict=True)
        )


Case = ScriptCase | CallCase | AssertCase


def read_cases(ground_truth: object) -> list[Case]:
    """The test cases of a row, in order; ValueError, saying what is wrong, where it is in none of the forms above."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
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
        return [_assert_case(item) for item in ground_truth]
    raise ValueError(f"ground truth holds no test cases. {_FORMS}")


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs say the same: line by line and word by word, whatever the space between and at the end.

    Where the expected word is a number with a fraction or an exponent, one within 1e-6 (absolute or relative) will do.
    """
    lines, expected_lines = _words(printed), _words(expected)
    return len(lines) == len(expected_lines) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def read_literal(text: str) -> Any:
    """The value that ``text`` is the ``repr`` of; a value equal to nothing else where it is no literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return object()


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _script_case(stdin: object, stdout: object) -> ScriptCase:
    """APPS writes some as text, some as a list of lines."""
    first, second = ("\n".join(map(str, side)) if _is_list(side) else str(side) for side in (stdin, stdout))
    return ScriptCase(stdin=first, stdout=second)


def _call_case(name: object, arguments: object, expected: object) -> CallCase:
    """Arguments are a list, or text with one JSON value in a line (LiveCodeBench); so may be the result."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not _is_list(arguments):
        raise ValueError(f"the inputs of {name} are {arguments!r}. Write a list of arguments")
    return CallCase(steps=(("call", (str(name), list(arguments))),), expected=expected)


def _assert_case(source: str) -> AssertCase:
    """Each assert of ``source`` as a value; where there is none, that its last line is reached."""
    steps: list[Step] = []
    expected: list[Any] = []
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"test {source[:80]!r} is not Python: {error}") from error
    for statement in _inlined(statements):
        if not isinstance(statement, ast.Assert):
            steps.append(("execute", ast.unparse(statement)))
            continue
        asked, wanted = _asked_and_wanted(statement.test)
        steps.append(("value", ast.unparse(asked)))
        expected.append(wanted)
    if not expected:
        steps.append(("value", "True"))
        expected.append(True)
    return AssertCase(steps=tuple(steps), expected=tuple(expected))


def _asked_and_wanted(test: ast.expr) -> tuple[ast.expr, Any]:
    """(expression, literal that it must equal or Condition that it must fulfil) of an assert's condition."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for asked, wanted in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return asked, ast.literal_eval(wanted)
            except ValueError:
                continue
    split = _Split()
    try:
        condition = ast.unparse(split.visit(copy.deepcopy(test)))
    except _ElsewhereError:
        condition = ""
    if condition in ("", "values[0]") or not split.asked:
        return ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[test], keywords=[]), True
    return ast.Tuple(elts=split.asked, ctx=ast.Load()), Condition(condition)


def _inlined(statements: list[ast.stmt]) -> list[ast.stmt]:
    """With the body of ``check`` in place of ``check(f)``, of HumanEval, and of its definition."""
    found: list[ast.stmt] = []
    functions = {each.name: each for each in statements if isinstance(each, ast.FunctionDef) and _is_plain(each)}
    inlined: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[])) if name in functions:
                names = [each.arg for each in functions[name].args.args]
                if len(names) == len(arguments):
                    put = _Put(dict(zip(names, arguments, strict=True)))
                    found += [put.visit(copy.deepcopy(each)) for each in functions[name].body]
                    inlined.add(name)
                    continue
        found.append(statement)
    return [each for each in found if not (isinstance(each, ast.FunctionDef) and each.name in inlined)]


def _is_plain(function: ast.FunctionDef) -> bool:
    """Its body says the same outside of it: it returns nothing, and its parameters are names."""
    parameters = function.args
    others = [
        *parameters.posonlyargs,
        *parameters.kwonlyargs,
        *parameters.defaults,
        parameters.vararg,
        parameters.kwarg,
    ]
    ends = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)
    return not (any(others) or function.decorator_list or any(isinstance(node, ends) for node in ast.walk(function)))


class _Put(ast.NodeTransformer):
    """Expressions in place of names."""

    def __init__(self, places: dict[str, ast.expr]) -> None:
        self._places = places

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._places.get(node.id, node))


class _ElsewhereError(Exception):
    """A condition that cannot be judged here."""


class _Split(ast.NodeTransformer):
    """Takes what the program must say out of a condition: the largest parts in which nothing expected stands."""

    def __init__(self) -> None:
        self.asked: list[ast.expr] = []

    def visit(self, node: ast.AST) -> Any:
        parts = list(_parts(node))
        if any(map(_is_programs, parts)) and not any(map(_is_expected, parts)):
            assert isinstance(node, ast.expr)
            self.asked.append(node)
            return ast.parse(f"values[{len(self.asked) - 1}]", mode="eval").body
        if not isinstance(node, _JUDGED) or (isinstance(node, ast.Attribute) and not _is_judge(node)):
            raise _ElsewhereError
        return self.generic_visit(node)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what is in it, but for what is in calls of the program."""
    yield node
    if not _is_programs(node):
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _is_programs(node: ast.AST) -> bool:
    """A name of the program's, or a call of something of its."""
    return (isinstance(node, ast.Name) and not _is_judge(node)) or (
        isinstance(node, ast.Call) and not _is_judge(node.func)
    )


def _is_expected(node: ast.AST) -> bool:
    """A literal that tells more than that something is there or true."""
    return isinstance(node, ast.Constant) and not (node.value is None or isinstance(node.value, bool))


def _is_judge(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name == "math" or name in JUDGES
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return not name.startswith("_")
    return False


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
    """Tuples as lists and keys as text, since what is expected came from JSON."""
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
    return bool(value == expected)
