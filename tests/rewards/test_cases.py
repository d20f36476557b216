"""Test cases: the forms they come in, what is sent to the program, and how outputs are compared."""

from __future__ import annotations

import ast
import json
from contextlib import suppress

import pytest

from mcore_rl.rewards.cases import (
    AssertCase,
    CallCase,
    Condition,
    InsideCase,
    JudgedCase,
    ScriptCase,
    read_cases,
    same_output,
)
from mcore_rl.rewards.confinement import Ending, Outcome
from mcore_rl.rewards.plain_data import Opaque


def outcome(*values: str, stdout: str = "", ending: Ending = Ending.finished) -> Outcome:
    """values: as Python writes them; what is no literal arrives as an object."""
    decoded = []
    for text in values:
        decoded.append(Opaque("object"))
        with suppress(ValueError, SyntaxError):
            decoded[-1] = ast.literal_eval(text)
    return Outcome(ending=ending, stdout=stdout, values=tuple(decoded), layers=(), message="")


def test_scripts() -> None:
    cases = read_cases(json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["a\n", ["b", "c"]], "fn_name": None}))
    assert cases == [ScriptCase(stdin="1\n", stdout="a\n"), ScriptCase(stdin="2\n3", stdout="b\nc")]


def test_calls() -> None:
    cases = read_cases({"inputs": [[[1, 2], "x"], '[1, 2]\n"x"'], "outputs": [[3], "3"], "fn_name": "f"})
    assert cases == [
        CallCase(steps=(("call", ("f", [[1, 2], "x"])),), expected=[3]),
        CallCase(steps=(("call", ("f", [[1, 2], "x"])),), expected=3),
    ]


@pytest.mark.parametrize("key", [None, "assert_case", "test_list"])
def test_asserts_are_sent_without_what_is_expected(key: str | None) -> None:
    texts = ["assert f(1) == (2, 3)", "assert [4] == f(2)", "assert f(3)", "import math\nassert math.isclose(f(4), 5)"]
    cases = read_cases(texts if key is None else {key: texts})
    assert cases == [
        AssertCase(steps=(("value", "f(1)"),), expected=((2, 3),)),
        AssertCase(steps=(("value", "f(2)"),), expected=([4],)),
        AssertCase(steps=(("value", "(f(3),)"),), expected=(Condition("values[0]"),)),
        AssertCase(
            steps=(("execute", "import math"), ("value", "(f(4),)")),
            expected=(Condition("math.isclose(values[0], 5)"),),
        ),
    ]


@pytest.mark.parametrize(
    ("condition", "asked", "judged", "right", "wrong"),
    [
        ("abs(f(1) - 0.5) < 1e-06", "(f(1),)", "abs(values[0] - 0.5) < 1e-06", "(0.5,)", "(0.6,)"),
        ("isclose(f(1), 0.5, abs_tol=0.1)", "(f(1),)", "isclose(values[0], 0.5, abs_tol=0.1)", "(0.45,)", "(0.3,)"),
        ("math.isclose(f(1), math.pi * 2)", "(f(1),)", "math.isclose(values[0], math.pi * 2)", "(6.283185307179586,)",
         "(6.28,)"),
        ("sorted(f([3, 1])) in ([1], [2])", "(sorted(f([3, 1])),)", "values[0] in ([1], [2])", "([2],)", "([3],)"),
        ("f(1) in {2, 3} and len(g(4)) > 5", "(f(1), len(g(4)))", "values[0] in {2, 3} and values[1] > 5", "(2, 6)",
         "(2, 5)"),
        ("Solution().f(1) != 2", "(Solution().f(1),)", "values[0] != 2", "(3,)", "(2,)"),
        ("f(1)[0] < 2 < len(f(1))", "(f(1), len(f(1)))", "values[0][0] < 2 < values[1]", "([1], 3)", "([1], 2)"),
        ("result[:2] == 'ab' + 'c'[:0]", "(result,)", "values[0][:2] == 'ab' + 'c'[:0]", "('abx',)", "('b',)"),
    ],
)  # fmt: skip
def test_conditions_are_judged_here(condition: str, asked: str, judged: str, right: str, wrong: str) -> None:
    (case,) = read_cases([f"assert {condition}"])
    assert case == AssertCase(steps=(("value", asked),), expected=(Condition(judged),))
    assert case.passed(outcome(right))
    for bad in (wrong, "(<object>,)", "True", "()", "'xxx'", "(1" + "0" * 5000 + ",) * 9"):
        assert not case.passed(outcome(bad)), bad


@pytest.mark.parametrize(
    ("condition", "asked", "judged"),
    [
        ("f(1)", "(f(1),)", "values[0]"),
        ("not f(1)", "(f(1),)", "not values[0]"),
        ("f(1) is None", "(f(1),)", "values[0] is None"),
        ("f(1) is not None", "(f(1),)", "values[0] is not None"),
        ("f(1) == g(2)", "(f(1), g(2))", "values[0] == values[1]"),
        ("isinstance(f(1), int)", "(f(1),)", "isinstance(values[0], int)"),
        ("all(f(1))", "(f(1),)", "all(values[0])"),
        ("bool(f(1)) and f(2)", "(f(1), f(2))", "bool(values[0]) and values[1]"),
        ("(f(1) == 2) == True", "(f(1),)", "(values[0] == 2) == True"),
        ("2 == f(1) == g(1)", "(f(1), g(1))", "2 == values[0] == values[1]"),
    ],
)
def test_what_decides_is_never_left_to_the_program(condition: str, asked: str, judged: str) -> None:
    assert read_cases([f"assert {condition}"]) == [
        AssertCase(steps=(("value", asked),), expected=(Condition(judged),)),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "assert all(f(i) == 2 * i for i in range(10))",
        "import numpy as np\nassert np.allclose(f(1), [1.0, 2.0])",
        "assert (lambda value: value == 3)(f(1))",
        "assert ().__class__ == 3 + f(1)",
        "expected = [1]\nassert f(1) == expected",
        "for i in range(3):\n    assert f(i) == i",
        "from collections import Counter\nassert Counter(f(1)) == {1: 2}",
        "from solution import f\ndef test_f():\n    assert f(1) == 2",
        "assert 2 ** f(1) < 5",
        "assert 1 << f(1) < 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)",
    ],
)
def test_other_tests_are_judged_in_a_process_of_their_own(source: str) -> None:
    assert read_cases([source]) == [JudgedCase(tests=source)]


def test_a_name_of_python_is_the_programs_where_there_is_no_other() -> None:
    assert read_cases(["assert sum(10, 15) == 6"]) == [AssertCase(steps=(("value", "sum(10, 15)"),), expected=(6,))]
    handed = "def check(c):\n    for i in range(3):\n        assert c(i) == i\ncheck(merge)"
    assert read_cases([handed]) == [JudgedCase(tests=handed, names=("merge",), has_prelude=True)]
    used = "for i in range(3):\n    assert merge(f(i)) == i"
    assert read_cases([used]) == [JudgedCase(tests=used, has_prelude=True)], "heapq's"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("class Node: pass\nassert f(Node()) == 1", "it defines class Node, whose objects are no data"),
        ("assert isinstance(f(1), Point)", "isinstance asks for the program's class Point"),
        ("try:\n    f(1)\nexcept Wrong:\n    assert g(1)", "it catches the program's Wrong"),
        ("import pytest\ndef test_f():\n    with pytest.raises(Wrong):\n        "
         "f(1)", "raises asks for the program's class Wrong"),
        ("class TestMore(Base):\n    def test_f(self):\n        assert self.f() == "
         "1", "class TestMore is made of one of the program's"),
        ("import inspect\nassert 'for' not in inspect.getsource(f)", "inspect looks at source"),
        ("import sys\nsys.stdout = None\nf(1)\nassert g() == 1", "sys.stdout reads what is printed"),
        ("assert Point(1) != Point(2)", "it compares objects of the program's class Point"),
        ("exec('y = f(1)')\nassert y == 1", "exec runs source"),
    ],
)  # fmt: skip
def test_what_only_the_programs_process_can_judge_is_said(source: str, why: str) -> None:
    assert read_cases([source]) == [InsideCase(tests=source, why=why)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "checks nothing. Add an assert"),
        ("x = 1", "checks nothing. Add an assert"),
        ("f(1)", "checks nothing. Add an assert"),
        (
            "def check(c):\n    assert c(1) == 2",
            "only defines check and checks nothing. Call it on the program's function",
        ),
        (
            "def check(c):\n    for i in c(1):\n        assert i\ndef main():\n    check(f)",
            "only defines check, main and checks",
        ),
        ("class Checks:\n    def run(self):\n        assert f(1)", "only defines Checks and checks nothing"),
        ("assert True", "calls nothing of the program"),
        ("x = 1\nassert x == 1", "calls nothing of the program"),
        ("def test_f(value):\n    assert f(value)", "has test_f(value), whose arguments a test runner would give"),
        ("async def test_f():\n    assert f(1)", "has test_f, which is async"),
        (
            "import no_such_module\nassert f(1) == no_such_module.x",
            "imports no_such_module, which is not installed here",
        ),
    ],
)
def test_tests_that_test_nothing_are_refused(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        read_cases([source])


def test_a_condition_reaches_nothing_but_its_judges() -> None:
    for source in ("open('/etc/passwd')", "__import__('os')", "values.__class__.__mro__[5]", "1 / 0", "values[9]"):
        assert not Condition(source).holds((1,))
    assert Condition("values[0] == abs(-1)").holds((1,))


def test_a_check_of_a_candidate_is_taken_apart() -> None:
    """As HumanEval writes it: neither its definition nor what it expects goes to the program."""
    source = """
METADATA = {"author": "x"}
def check(candidate):
    "The tests."
    assert candidate([1, 2]) == 3, "one"
    assert abs(candidate([0.5]) - 0.5) < 1e-6
check(total)
"""
    (case,) = read_cases([source])
    assert isinstance(case, AssertCase)
    values = [text for verb, text in case.steps if verb == "value"]
    assert values == ["total([1, 2])", "(total([0.5]),)"]
    assert case.expected == (3, Condition("abs(values[0] - 0.5) < 1e-06"))
    assert not any("check" in text or "3" in text for _, text in case.steps)


@pytest.mark.parametrize(
    "definition",
    [
        "def check(g):\n    if g is None: return\n    assert g(1) == 2",
        "def check(g, n=1):\n    assert g(n) == 2",
        "def check(*g):\n    assert g[0](1) == 2",
        "@wraps\ndef check(g):\n    assert g(1) == 2",
    ],
)
def test_tests_in_other_functions_run_as_they_are(definition: str) -> None:
    source = f"from functools import wraps\n{definition}\ncheck(f)"
    assert read_cases([source]) == [JudgedCase(tests=source)]


def test_tests_that_run_must_have_passed() -> None:
    for case in (JudgedCase(tests=""), InsideCase(tests="", why="")):
        assert case.passed(outcome("True"))
        for bad in (
            outcome(),
            outcome("False"),
            outcome("1.5"),
            outcome("True", "True"),
            outcome("True", ending=Ending.timeout),
        ):
            assert not case.passed(bad)


@pytest.mark.parametrize(
    "ground_truth",
    [
        "not json",
        "[]",
        "3",
        None,
        {},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": "1", "outputs": "1"},
        ["assert ("],
        [1],
        {"inputs": [3], "outputs": [3], "fn_name": "f"},
    ],
)
def test_other_forms_are_refused(ground_truth: object) -> None:
    with pytest.raises(ValueError, match=r"ground truth|is not Python|Write a list of arguments"):
        read_cases(ground_truth)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1   2 \n3  \n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1", "1\n2", False),
        ("", "1", False),
        ("", "", True),
        ("0.3333333", "0.33333333", True),
        ("0.3334", "0.33333333", False),
        ("1e3", "1000.0", True),
        ("1000.0", "1000", False),  # an integer is asked for
        ("nan", "1.0", False),
        ("yes", "YES", False),
        ("x.", "y.", False),
    ],
)
def test_outputs(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "passes"),
    [
        ("3", 3, True),
        ("3", [3], True),  # APPS wraps results
        ("[3]", [[3]], True),
        ("(1, (2,))", [1, [2]], True),
        ("{1: 'a'}", {"1": "a"}, True),
        ("{1: 'a', 2: 'b'}", {"1": "a"}, False),
        ("0.30000000000000004", 0.3, True),
        ("0.31", 0.3, False),
        ("'3'", 3, False),
        ("None", 3, False),
        ("<object at 0x1>", 3, False),
        ("3, 4", [3, 4], True),
        ("[1, 2]", [1], False),
        ("'x'", 0.5, False),
    ],
)
def test_results_of_calls(value: str, expected: object, passes: bool) -> None:
    assert CallCase(steps=(), expected=expected).passed(outcome(value)) is passes


def test_a_program_that_did_not_finish_passes_nothing() -> None:
    for ending in (Ending.failed, Ending.timeout):
        assert not CallCase(steps=(), expected=3).passed(outcome("3", ending=ending))
        assert not ScriptCase(stdin="", stdout="3").passed(outcome(stdout="3", ending=ending))
        assert not AssertCase(steps=(), expected=(3,)).passed(outcome("3", ending=ending))


def test_more_or_fewer_values_than_asked_for_pass_nothing() -> None:
    assert not CallCase(steps=(), expected=3).passed(outcome("3", "3"))
    assert not AssertCase(steps=(), expected=(3, 4)).passed(outcome("3"))
