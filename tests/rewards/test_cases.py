"""Test cases: the forms they come in, what is sent to the program, and how outputs are compared."""

from __future__ import annotations

import json

import pytest

from mcore_rl.rewards.cases import AssertCase, CallCase, ScriptCase, read_cases, read_literal, same_output
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
        AssertCase(steps=(("execute", "import math"), ("value", "bool(math.isclose(f(4), 5))")), expected=(True,)),
    ]


def test_tests_in_functions_must_reach_their_end() -> None:
    (case,) = read_cases(["def check(g):\n    assert g(1) == 2\ncheck(f)"])
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
