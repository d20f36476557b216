"""Test cases of programs, in the formats of common data sets: what to run, and what must come out.

- ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of a script (APPS, TACO, CodeContests)
- the same with ``"fn_name"``: arguments and result of a function, or of a method of ``class Solution`` (APPS, TACO)
- ``["assert f(1) == 2", ...]``, or these under ``"assert_case"`` or ``"test_list"`` (MBPP, HumanEval)

or any of these as JSON text.  The program's process never sees the expected values: of ``assert f(1) == 2`` and of
``assert isclose(f(1), 2)`` it only gets ``f(1)``, also if they are in a ``check(candidate)``.  Tests in other forms
(loops, classes) are judged in the program's process, where a program could cheat.
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
# The names, besides ``math``, and the kinds of expression that a condition which is judged here may use.
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
        value = _jsonable(read_literal(outcome.values[0]))
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
    """Statements to execute.  expected: for each value that they give, in order, the equal literal or a Condition."""

    steps: tuple[Step, ...]
    expected: tuple[Any, ...] = field(default=())
    stdin: str = ""

    def passed(self, outcome: Outcome) -> bool:
        """Whether nothing raised and every value equals its literal, by Python's ``==``, or meets its Condition."""
        if outcome.ending is not Ending.finished or len(outcome.values) != len(self.expected):
            return False
        return all(
            expected.holds(read_literal(text)) if isinstance(expected, Condition) else read_literal(text) == expected
            for text, expected in zip(outcome.values, self.expected, strict=True)
        )


Case = ScriptCase | CallCase | AssertCase


def read_cases(ground_truth: object) -> list[Case]:
    """The test cases of a row, in order.  ValueError, with what is wrong: it has none of the forms above."""
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
    """Whether two outputs are equal line by line and word by word; space between words and at the end is ignored.

    If the expected word is a number with a fraction or an exponent, a number within 1e-6 (absolute or relative) passes.
    """
    lines, expected_lines = _words(printed), _words(expected)
    return len(lines) == len(expected_lines) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def read_literal(text: str) -> Any:
    """The value whose ``repr`` is ``text``; if ``text`` is no literal, an object that equals nothing else."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return object()


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
    return CallCase(steps=(("call", (str(name), list(arguments))),), expected=expected)


def _assert_case(source: str) -> AssertCase:
    """The case of ``source``: the program computes one value per assert; without an assert, it must reach the end.

    ValueError: ``source`` is not Python.
    """
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
    """(expression for the program to compute, the literal it must equal or the Condition it must meet) of an assert."""
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
    """``statements`` with every call such as HumanEval's ``check(f)`` replaced by the body of ``check``.

    The definitions of functions that were inlined are removed.
    """
    kept: list[ast.stmt] = []
    functions = {each.name: each for each in statements if isinstance(each, ast.FunctionDef) and _is_plain(each)}
    inlined: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[])) if name in functions:
                names = [each.arg for each in functions[name].args.args]
                if len(names) == len(arguments):
                    put = _Put(dict(zip(names, arguments, strict=True)))
                    kept += [put.visit(copy.deepcopy(each)) for each in functions[name].body]
                    inlined.add(name)
                    continue
        kept.append(statement)
    return [each for each in kept if not (isinstance(each, ast.FunctionDef) and each.name in inlined)]


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether the body means the same outside of the function: it returns nothing, and all parameters are plain."""
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
    """Replaces names by expressions."""

    def __init__(self, places: dict[str, ast.expr]) -> None:
        self._places = places

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._places.get(node.id, node))


class _ElsewhereError(Exception):
    """A condition that cannot be judged here."""


class _Split(ast.NodeTransformer):
    """Splits a condition: the parts that the program must compute become ``values[i]`` and are listed in ``asked``.

    These are the largest parts that use the program and contain no expected literal.
    """

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
    """``node`` and all nodes within it, without those inside calls of the program."""
    yield node
    if not _is_programs(node):
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _is_programs(node: ast.AST) -> bool:
    """Whether ``node`` is a name that the program defines, or a call of something that it defines."""
    return (isinstance(node, ast.Name) and not _is_judge(node)) or (
        isinstance(node, ast.Call) and not _is_judge(node.func)
    )


def _is_expected(node: ast.AST) -> bool:
    """Whether ``node`` is a literal that reveals an expected value; None, True and False do not count."""
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
    return bool(value == expected)
