"""Programs in responses: where they stand, and their grade over several test cases."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.rewards import code
from mcore_rl.rewards.cases import read_cases
from mcore_rl.rewards.code import grade_code, program_of
from mcore_rl.rewards.confinement import ConfinementError, Outcome, run_confined
from mcore_rl.rewards.score import RewardRequest, Score

DOUBLE = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]})


def grade(response: str, ground_truth: object = DOUBLE, *, continuous: bool = False, **limits: float) -> Score:
    config = RewardConfig(code=CodeConfig(continuous=continuous), **limits)  # type: ignore[arg-type]
    return grade_code(RewardRequest(("p", 0), "code", response, ground_truth), config)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("so\n```python\nx = 1\n```\nthat is it", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nrun with\n```bash\npython x.py\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```text\n3\n```", "x = 1\n"),
        ("```Python3 title\nx = '```'\n```", "x = '```'\n"),  # a fence stands at the start of a line
        ("```python\nx = 1", "x = 1"),  # cut off
        ("``` python\nx = 1\n```", "x = 1\n"),
        ("1. so:\n   ```python\nx = 1\n   ```", "x = 1\n"),
    ],
)
def test_where_the_program_stands(response: str, program: str) -> None:
    assert program_of(response) == program


def test_all_cases_pass() -> None:
    assert grade("```python\nprint(2 * int(input()))\n```") == Score(1.0, {"passed": 1.0, "timed_out": 0.0}, 1.0)


def test_partial_credit_only_where_it_is_asked_for() -> None:
    response = "n = int(input())\nprint(2 * n if n != 2 else 0)"
    assert grade(response, continuous=True) == Score(0.75, {"passed": 0.75, "timed_out": 0.0}, 0.0)
    assert grade(response) == Score(0.0, {"passed": 0.25, "timed_out": 0.0}, 0.0)  # it ends at the second


@pytest.mark.parametrize(
    ("wrong", "first", "value", "passed"),
    [
        ((2,), 2, 0.5, 0.25),  # the others do not run any more
        ((1, 4), 2, 0.5, 0.25),
        ((3,), 2, 1.0, 0.5),  # as published: the first two pass
        ((), 2, 1.0, 1.0),
        ((4,), 9, 0.75, 0.75),
    ],
)
def test_the_share_may_be_of_the_first_cases(wrong: tuple[int, ...], first: int, value: float, passed: float) -> None:
    config = RewardConfig(code=CodeConfig(continuous=True, first_cases=first))
    response = f"n = int(input())\nprint(0 if n in {wrong} else 2 * n)"
    score = grade_code(RewardRequest(("p", 0), "code", response, DOUBLE), config)
    assert score == Score(value, {"passed": passed, "timed_out": 0.0}, float(not wrong))


def test_a_function_a_method_and_asserts() -> None:
    calls = {"inputs": [[1], [2]], "outputs": [2, 4], "fn_name": "double"}
    assert grade("def double(n: Optional[int]): return 2 * n", calls).value == 1.0
    assert grade("class Solution:\n    def double(self, n): return 2 * n", calls).value == 1.0
    assert grade("def double(n): return n + 1", calls, continuous=True).value == 0.5
    assert grade("def twice(n): return 2 * n", calls).value == 0.0
    asserts = ["assert double(2) == 4", "import math\nassert math.isclose(double(0.5), 1)"]
    assert grade("def double(n): return 2 * n", asserts).value == 1.0
    assert grade("def double(n): return 4", asserts, continuous=True).value == 0.5


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("Counter('aab')", "assert f() == {'a': 2, 'b': 1}"),
        ("defaultdict(list, {1: [2]})", "assert f() == {1: [2]}"),
        ("namedtuple('P', 'x y')(1, [2.5])", "assert f() == (1, [2.5])"),
        ("__import__('numpy').int64(3)", "assert f() == 3"),
        ("frozenset([1])", "assert f() == {1}"),
        ("True", "assert f() == 1"),
        ("10 ** 5000", "assert f() % 7 == 2"),
    ],
)
def test_values_of_subclasses_equal_their_literals(value: str, test: str) -> None:
    assert grade(f"def f(): return {value}", [test]).value == 1.0


FORGED = """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, {text!r})
    except OSError: pass
os._exit(0)
"""
TRICKS = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "import atexit, os; atexit.register(os._exit, 0)\ndef f(): return 4",
    "class Same:\n    def __eq__(self, other): return True\ndef f(): return Same()",
    "class Same:\n    def __eq__(self, other): return True\n    __repr__ = lambda self: '<same>'\nf = Same",
    "class Number(float):\n    __sub__ = lambda *_: 0\n    __eq__ = lambda *_: True\ndef f(): return Number(4)",
    "import builtins; builtins.repr = lambda value: '3'\ndef f(): return 4",
    "import builtins; builtins.bool = lambda value: True; builtins.abs = lambda value: 0\ndef f(): return 4",
    "import math; math.isclose = lambda *_, **__: True\ndef f(): return 4",
    "import json; json.dumps = lambda value: 'true'\ndef f(): return 4",
    "import sys\ndef f(): sys.excepthook = print; raise AssertionError",
    "import sys\ndef f():\n    sys._getframe(1).f_locals['value'] = 5; return 4",
    "def f(): return 4\nf.__eq__ = lambda other: True",
    "class E(Exception):\n    def __str__(self): raise SystemExit(0)\ndef f(): raise E",
    "def f(): return '5'",
    "def f(): return '\\ud800'",
    "def f(): return '\\x00' * 100",
    "import os; os.write(1, bytes(range(256)))\ndef f(): return bytes(range(256))",
    "def f():\n    x = []\n    x.append(x)\n    return x",
    "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "def f(): return 10 ** 10 ** 5",
    "def f(): return {2 ** 61 * n for n in range(2000)}",
    *(FORGED.format(text=text) for text in (b"True\n", b'"True"\n', b'[]\n"True"\n', b'"True"\n"True"\n', b"[]\n")),
    "raise SystemExit",
    "",
]  # fmt: skip


@pytest.mark.parametrize(
    "test",
    [
        "assert f() == 5",
        "import math\nassert math.isclose(f(), 5.25)",
        "def check(candidate):\n    assert abs(candidate() - 5.5) < 1e-6\ncheck(f)",
    ],
)
def test_known_tricks_pass_no_assert(test: str) -> None:
    """Programs that imitate what the grader says, or change what it compares with."""
    assert [trick for trick in TRICKS if grade(trick, [test], continuous=True).value != 0.0] == []
    number = re.search(r"5[.\d]*", test)
    assert number is not None
    assert grade(f"def f(): return {number[0]}", [test]).value == 1.0


def test_what_is_expected_is_not_in_the_process() -> None:
    """Neither in an object nor in a file that it has open."""
    program = """
import gc, os, sys
def f():
    seen = [gc.get_objects(), sys.argv, [frame.f_locals for frame in sys._current_frames().values()]]
    for descriptor in range(64):
        try:
            seen.append(os.pread(descriptor, 10**6, 0))
        except OSError:
            pass
    text = str(seen)
    return str(741852962 - -int("1")) in text, "int" in text
"""
    for ground_truth in (["assert f() == 741852963"], {"inputs": [[]], "outputs": [741852963], "fn_name": "f"}):
        (case,) = read_cases(ground_truth)
        assert run_confined(program, CodeConfig(), steps=case.steps).values == ((False, True),)


def test_time_for_all_cases_together_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first case spends what there is for all; the others fail without being run."""
    limits: list[float] = []

    def recorded(*args: Any, timeout_s: float, **kwargs: Any) -> Outcome:
        limits.append(timeout_s)
        return run_confined(*args, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(code, "run_confined", recorded)
    score = grade("while True: pass", continuous=True, timeout_s=1.0)
    assert score == Score(0.0, {"passed": 0.0, "timed_out": 1.0}, 0.0)
    assert len(limits) == 1
    assert 0 < limits[0] <= 0.8


def test_text_that_cannot_be_encoded_is_a_wrong_program() -> None:
    assert grade("print(2 * int(input())) \ud800").value == 0.0
    assert grade("# \ud800\nprint(2 * int(input()))").value == 1.0
    assert grade("print(2 * int(input())) # \0").value == 0.0


def test_without_confinement_no_program_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "weaknesses", lambda: ("seccomp is missing",))
    with pytest.raises(ConfinementError, match=r"seccomp is missing. Grade code on .*allow_weak_confinement=true"):
        grade("print(2 * int(input()))")
    config = RewardConfig(code=CodeConfig(allow_weak_confinement=True))
    assert grade_code(RewardRequest(("p", 0), "code", "print(2 * int(input()))", DOUBLE), config).value == 1.0


def test_rows_without_cases_are_named() -> None:
    with pytest.raises(ValueError, match="ground truth"):
        grade("x", "[]")
