"""Test cases: the forms they come in, what is sent to the program, and how outputs are compared."""

from __future__ import annotations

import ast
import json

import pytest

from mcore_rl.rewards.cases import AssertCase, CallCase, Condition, ScriptCase, read_cases, read_literal, same_output
from mcore_rl.rewards.confinement import Ending, Outcome


def outcome(*values: str, stdout: str = "", ending: Ending = Ending.finished) -> Outcome:
    return Outcome(ending=ending, stdout=stdout, values=values, layers=(), message="")


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
        AssertCase(steps=(("value", "bool(f(3))"),), expected=(True,)),
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
    "condition",
    [
        "f(1)",
        "not f(1)",
        "f(1) is None",
        "f(1) is not None",
        "f(1) == g(2)",
        "isinstance(f(1), int)",
        "all(f(i) == 2 * i for i in range(10))",
        "np.allclose(f(1), [1.0, 2.0])",
        "(lambda value: value == 3)(f(1))",
        "().__class__ == 3 + f(1)",
    ],
)
def test_conditions_that_only_the_program_can_judge(condition: str) -> None:
    (case,) = read_cases([f"assert {condition}"])
    assert case == AssertCase(steps=(("value", ast.unparse(ast.parse(f"bool({condition})"))),), expected=(True,))


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
    numbers = [1, 2]
    assert candidate(numbers) == 3, "one"
    assert abs(candidate([0.5]) - 0.5) < 1e-6
    for number in []:
        pass
check(total)
"""
    (case,) = read_cases([source])
    assert isinstance(case, AssertCase)
    values = [text for verb, text in case.steps if verb == "value"]
    assert values == ["total(numbers)", "(total([0.5]),)"]
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
def test_tests_in_other_functions_must_reach_their_end(definition: str) -> None:
    (case,) = read_cases([f"{definition}\ncheck(f)"])
    assert isinstance(case, AssertCase)
    assert [verb for verb, _ in case.steps] == ["execute", "execute", "value"]
    assert case.passed(outcome("True"))
    assert not case.passed(outcome())


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


@pytest.mark.parametrize(
    "text", ["(" * 5000, "[" * 100_000, "f(1)", "\0", "{[]: 1}", "9**9**9", "-" * 3000 + "1", "-" * 100_000 + "1"]
)
def test_what_is_no_literal_equals_nothing(text: str) -> None:
    assert type(read_literal(text)) is object
