"""Test cases of programs, in the formats of common data sets: what to run, and what must come out.

- ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of a script (APPS, TACO, CodeContests)
- the same with ``"fn_name"``: arguments and result of a function, or of a method of ``class Solution`` (APPS, TACO)
- ``["assert f(1) == 2", ...]``, or these under ``"assert_case"`` or ``"test_list"``: tests as Python source (MBPP,
  HumanEval, EvalPlus, pytest's functions and unittest's classes); see ``read_tests``

or any of these as JSON text.  The program's process never sees the expected values, and what it answers is compared
outside of it: here (``ScriptCase``, ``CallCase``, ``AssertCase``) or by the tests in another process (``JudgedCase``).
Only an ``InsideCase`` is judged in the program's own process, where a program could forge the verdict.

Tests become the first kind of case that is possible:

- ``AssertCase``: asserts without names of their own.  The program gets the parts that it must compute, and the
  conditions are met or not here: of ``assert f(1) == 2`` and ``assert isclose(f(1), 2)`` it gets ``f(1)``, also if they
  are in HumanEval's ``check(candidate)``.
- ``JudgedCase``: any other tests.  They run in a process of their own and call the program from there (``judge``).
- ``InsideCase``: tests that need the program's own classes, modules or output, or that hand it objects of theirs.

A name is the program's if the tests neither define nor import it, Python has it not built in, and ``PRELUDE`` does not
import it.  Tests that test nothing are refused: those in which no check is ever reached, or that name nothing of the
program.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

from mcore_rl.ground.json_text import read_json
from mcore_rl.rewards.confined_program import PRELUDE
from mcore_rl.rewards.confinement import Ending, Outcome, Step
from mcore_rl.rewards.judge import is_check
from mcore_rl.rewards.plain_data import encode

REL_TOL = ABS_TOL = 1e-6  # of numbers with a fraction
# The names, besides ``math``, that a condition which is judged here may use.
JUDGES: dict[str, Any] = {
    each.__name__: each
    for each in (
        abs,
        all,
        any,
        bool,
        dict,
        float,
        int,
        isinstance,
        len,
        list,
        max,
        min,
        round,
        set,
        sorted,
        str,
        sum,
        tuple,
    )
} | {"isclose": math.isclose}
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
        inputs = ground_truth.get("inputs")
        outputs = ground_truth.get("outputs")
        if _is_list(inputs) and _is_list(outputs) and len(inputs) == len(outputs) > 0:
            name = ground_truth.get("fn_name")
            pairs = zip(inputs, outputs, strict=True)
            return [_call_case(name, *pair) if name else _script_case(*pair) for pair in pairs]
    elif _is_list(ground_truth) and ground_truth and all(isinstance(item, str) for item in ground_truth):
        return [read_tests(item) for item in ground_truth]
    raise ValueError(f"ground truth holds no test cases. {_FORMS}")


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal line by line and word by word; space between words and at the end is ignored.

    If the expected word is a number with a fraction or an exponent, a number within 1e-6 (absolute or relative) passes.
    """
    lines = _words(printed)
    expected_lines = _words(expected)
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


_JUDGED = (
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.Call,
    ast.Subscript,
    ast.Slice,
    ast.Name,
    ast.Attribute,
    ast.keyword,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
    ast.operator,
    ast.expr_context,
)
# What decides: never left to the program.
_DECIDING = (
    ast.Compare,
    ast.BoolOp,
    ast.Not,
    ast.IfExp,
    ast.Lambda,
    ast.GeneratorExp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.NamedExpr,
)
_DECIDERS = {"all", "any", "bool", "isinstance", "isclose", "math"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Names by which tests look into the program's process.
_INSIDE = {
    "exec": "runs source",
    "eval": "runs source",
    "globals": "looks at namespaces",
    "__import__": "imports by name",
    "importlib": "imports by name",
    "inspect": "looks at source",
    "mock": "replaces names",
    "patch": "replaces names",
    "MagicMock": "replaces names",
    "redirect_stdout": "reads what is printed",
    "redirect_stderr": "reads what is printed",
    "stdout": "reads what is printed",
    "stdin": "replaces the input",
    "modules": "looks at modules",
}
_CLASS_TESTS = {
    "isinstance": 1,
    "issubclass": 1,
    "raises": 0,
    "assertRaises": 0,
    "assertRaisesRegex": 0,
    "assertIsInstance": 1,
    "assertNotIsInstance": 1,
}


def read_tests(source: str) -> AssertCase | JudgedCase | InsideCase:
    """The case of ``source``.

    ValueError: it is not Python, tests nothing, or cannot be run here.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test {source[:80]!r} is not Python: {error}") from error
    names, shadowed, has_prelude = _names_of_program(tree)
    if problem := _problem(tree, names | shadowed):
        raise ValueError(f"test {' '.join(source.split())[:80]!r} {problem}")
    if why := _why_inside(tree, names):
        return InsideCase(tests=source, why=why)
    return _plain(tree, names | shadowed) or JudgedCase(
        tests=source, names=tuple(sorted(shadowed)), has_prelude=has_prelude
    )


def _names_of_program(tree: ast.Module) -> tuple[set[str], set[str], bool]:
    """(names of the program, those that Python or ``PRELUDE`` has too, whether the tests use names of ``PRELUDE``).

    A name of the second kind is the program's only where there is none of the first.
    """
    loaded = set()
    bound = {"solution"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                loaded.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ImportFrom(module="solution", names=aliases):
                loaded |= {alias.name for alias in aliases}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case ast.Attribute(value=ast.Name(id="solution"), attr=name):
                loaded.add(name)
    free = {name for name in loaded - bound if not (name.startswith("__") and name.endswith("__"))}
    names = free - _known_names()
    if names or "*" in loaded:
        return names, set(), not (free - names).isdisjoint(_known_names() - vars(builtins).keys())
    handed = list[str]()  # such as check(merge)
    called = list[str]()  # of MBPP's assert sum(10, 15) == 6, whose outermost call comes first
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in free:
                called.append(name)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in bound:
                handed += [each.id for each in arguments if isinstance(each, ast.Name) and each.id in free]
    return set(), set((handed or called)[:1]), True


@cache
def _known_names() -> frozenset[str]:
    """What tests have without an import: Python's names, and those that answers have."""
    prelude: dict[str, object] = {}
    exec(PRELUDE, prelude)
    return frozenset({*vars(builtins), *prelude, "isclose"})


def _problem(tree: ast.Module, names: set[str]) -> str:
    """Why nothing can come of these tests, and the remedy; empty if something can."""
    reached = list(_reached(tree))
    if not any(is_check(node) for node in reached):
        defined = [each.name for each in tree.body if isinstance(each, (*_FUNCTIONS, ast.ClassDef))]
        if defined:
            what = f"only defines {', '.join(defined)} and checks nothing"
            return f"{what}. Call it on the program's function, or add asserts"
        return "checks nothing. Add an assert"
    if not names:
        return "calls nothing of the program. Call the function that the program is to define"
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name.startswith("test"):
            arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg != "self"]
            if len(arguments) > len(node.args.defaults) or node.args.kwonlyargs:
                signature = f"{node.name}({', '.join(arguments)})"
                return f"has {signature}, whose arguments a test runner would give. Write them into the test"
            if isinstance(node, ast.AsyncFunctionDef):
                return f"has {node.name}, which is async. Call asyncio.run in it"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in modules:
                if not _is_installed(module.partition(".")[0]):
                    return f"imports {module}, which is not installed here. Install it, or leave it out"
    return ""


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of what runs: the module's statements, tests that a runner finds, and the functions that these name."""
    defined = {each.name: each for each in tree.body if isinstance(each, (*_FUNCTIONS, ast.ClassDef))}
    waiting: list[ast.AST] = [each for each in tree.body if not isinstance(each, (*_FUNCTIONS, ast.ClassDef))]
    for name in list(defined):
        each = defined[name]
        if name.startswith("test") or (isinstance(each, ast.ClassDef) and _is_test_class(each)):
            waiting.append(defined.pop(name))
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in defined:
                waiting.append(defined.pop(node.id))


def _is_test_class(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)


@cache
def _is_installed(module: str) -> bool:
    try:
        return module in ("", "solution", "__main__") or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _why_inside(tree: ast.Module, names: set[str]) -> str:
    """What only the program's own process could judge; empty if there is no such thing."""

    def of_program(node: ast.AST) -> str:
        return next((each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in names), "")

    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() if not _is_test_class(node):
                return f"it defines class {node.name}, whose objects are no data"
            case ast.ClassDef(bases=bases) if any(map(of_program, bases)):
                return f"class {node.name} is made of one of the program's"
            case ast.ExceptHandler(type=ast.AST() as kind) if of_program(kind):
                return f"it catches the program's {of_program(kind)}"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if name in _CLASS_TESTS:
                place = _CLASS_TESTS[name]
                if len(arguments) > place and isinstance(arguments[place], ast.Name) and of_program(arguments[place]):
                    return f"{name} asks for the program's class {of_program(arguments[place])}"
            case ast.Compare(
                left=ast.Call(func=ast.Name(id=name)), comparators=[ast.Call(func=ast.Name(id=other))]
            ) if {name, other} <= names and name[:1].isupper() and other[:1].isupper():
                return f"it compares objects of the program's class {name}"
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in _INSIDE:
                return f"sys.{name} {_INSIDE[name]}"
            case ast.Name(id=name, ctx=ast.Load()) if name in _INSIDE and name not in (
                "stdout",
                "stdin",
                "modules",
                *names,
            ):
                return f"{name} {_INSIDE[name]}"
    return ""


def _plain(tree: ast.Module, names: set[str]) -> AssertCase | None:
    """The case of tests that are asserts and imports, and nothing that has a name of its own; None of others."""
    steps: list[Step] = []
    expected: list[Any] = []
    for statement in _inlined(tree.body):
        match statement:
            case ast.Import() | ast.ImportFrom():
                steps.append(("execute", ast.unparse(statement)))
            case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name(id="METADATA")]):
                continue
            case ast.Assert(test=test):
                part = _asked_and_wanted(test, names)
                if part is None:
                    return None
                steps.append(("value", ast.unparse(part[0])))
                expected.append(part[1])
            case _:
                return None
    return AssertCase(steps=tuple(steps), expected=tuple(expected))


def _asked_and_wanted(test: ast.expr, names: set[str]) -> tuple[ast.expr, Any] | None:
    """(expression for the program to compute, the literal it must equal or the Condition it must meet) of an assert.

    None: neither; or there is a name that is not the program's.
    """
    known = names | JUDGES.keys() | {"math"}
    if any(isinstance(node, ast.Name) and node.id not in known for node in ast.walk(test)):
        return None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for asked, wanted in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if not any(map(_decides, ast.walk(asked))) and any(
                isinstance(n, ast.Name) and n.id in names for n in ast.walk(asked)
            ):
                try:
                    return asked, ast.literal_eval(wanted)
                except ValueError:
                    continue
    split = _Split(names)
    try:
        condition = ast.unparse(split.visit(copy.deepcopy(test)))
    except _ElsewhereError:
        return None
    return (ast.Tuple(elts=split.asked, ctx=ast.Load()), Condition(condition)) if split.asked else None


def _decides(node: ast.AST) -> bool:
    return isinstance(node, _DECIDING) or (
        isinstance(node, ast.Call) and _is_judge(node.func) and _root(node.func) in _DECIDERS
    )


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


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

    These are the largest parts that use the program, contain no expected literal and decide nothing.
    names: the program's.
    """

    def __init__(self, names: set[str]) -> None:
        self.asked: list[ast.expr] = []
        self._names = names

    def visit(self, node: ast.AST) -> Any:
        parts = list(self._parts(node))
        if any(map(self._is_programs, parts)) and not any(_is_expected(each) or _decides(each) for each in parts):
            assert isinstance(node, ast.expr)
            self.asked.append(node)
            return ast.parse(f"values[{len(self.asked) - 1}]", mode="eval").body
        if not isinstance(node, _JUDGED) or (isinstance(node, ast.Attribute) and not _is_judge(node)):
            raise _ElsewhereError
        if isinstance(node, ast.Name) and node.id in self._names:
            raise _ElsewhereError
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Pow | ast.LShift)
            and any(map(self._is_programs, parts))
        ):
            raise _ElsewhereError  # two small answers could keep the grader busy for hours
        return self.generic_visit(node)

    def _parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """``node`` and all nodes within it, without those inside calls of the program."""
        yield node
        if not self._is_programs(node):
            for child in ast.iter_child_nodes(node):
                yield from self._parts(child)

    def _is_programs(self, node: ast.AST) -> bool:
        """Whether ``node`` is a name that the program defines, or a call of something that it defines."""
        if isinstance(node, ast.Name):
            return node.id in self._names or not _is_judge(node)
        return isinstance(node, ast.Call) and (_root(node.func) in self._names or not _is_judge(node.func))


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
