"""Tests that call a program by message: what honest programs may return, and what none can forge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.rewards.cases import InsideCase, JudgedCase, read_cases
from mcore_rl.rewards.code import grade_code
from mcore_rl.rewards.confinement import Ending, Outcome, UnjudgedError, run_confined, run_judged, weaknesses
from mcore_rl.rewards.score import RewardRequest
from tests.support.skips import KERNEL

CONFIG = CodeConfig(timeout_s=60.0, memory_mib=1024)
pytestmark = pytest.mark.skipif(bool(weaknesses()), reason=KERNEL + "; ".join(weaknesses()))


def judged(program: str, tests: str) -> Outcome:
    (case,) = read_cases([tests])
    assert isinstance(case, JudgedCase)
    return run_judged(program, case.tests, case.names, CONFIG, has_prelude=case.has_prelude)


def passes(program: str, tests: str) -> bool:
    return judged(program, tests).values == (True,)


# Ways to write the tests of `double`, of which today's data sets are full.
TESTS = {
    "loop only": "def check(candidate):\n    for n in range(5):\n        assert candidate(n) == 2 * n\ncheck(double)",
    "EvalPlus": """
def is_floats(x):
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and x and all(isinstance(i, float) for i in x))
def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert type(out) == type(exp)
        assert abs(out - exp) <= atol
    else:
        assert exact_match
def check(candidate):
    inputs = [[0], [3], [2.5]]
    results = [0, 6, 5.0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
check(double)
""",
    "isinstance": "out = double(3)\nassert isinstance(out, int) and not isinstance(out, bool)\nassert out in (6,) "
    "and out >= 6",
    "test functions": "def test_small():\n    assert double(3) == 6\n\ndef test_text():\n    assert double('a') == "
    "'aa'",
    "pytest": "import pytest\nfrom solution import double\ndef test_it():\n    assert double(3) == pytest.approx(6)\n"
    "class TestMore:\n    def test_none(self):\n        with pytest.raises(TypeError):\n            double(None)",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.n = 3\n"
    "    def test_it(self):\n        self.assertEqual(double(self.n), 6)\nif __name__ == '__main__':\n    "
    "unittest.main()",
    "all": "assert all(map(lambda n: double(n) == 2 * n, range(5)))",
    "raise": "for n in (1, 2):\n    if double(n) != 2 * n:\n        raise Exception('wrong')",
    "numpy": "import numpy as np\nnp.testing.assert_allclose(double(0.5), 1.0)\nassert np.allclose([double(1)], [2])",
    "two at once": "assert {double(n) for n in (1, 2)} == {2, 4}\nassert sorted(map(double, [2, 1])) == [2, 4]",
}
EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self
    def __contains__(self, item): return True
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __abs__ = __getitem__ = __sub__
    def __float__(self): return 0.0
    @property
    def __class__(self): return int
"""
# Says at the wire what it likes, in the place of `serve`; {answer} is the bytes of each message.
RAW = """
import json, os, stat
pipes = [d for d in range(3, 64) if os.path.exists(f"/dev/null")]
ends = []
for d in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(d).st_mode): ends.append(d)
    except OSError: pass
source, sink = ends
def message(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body
while True:
    if not os.read(source, 1 << 16): os._exit(0)
    os.write(sink, {answer})
"""
TRICKS = {
    "nothing": "x = 1",
    "exit": "import sys; sys.exit(0)",
    "sudden exit": "import os; os._exit(0)",
    "exit in the function": "import os\ndef double(n): os._exit(0)",
    "SystemExit in the function": "def double(n): raise SystemExit(0)",
    "an object equal to everything": EQUAL + "double = Equal()",
    "a function that returns one": EQUAL + "def double(n): return Equal()",
    "a list of one": EQUAL + "def double(n): return [Equal()]",
    "a subclass of int": "class N(int):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ "
    "= int.__hash__\n"
    "    __ge__ = __le__ = __eq__\ndef double(n): return N(0)",
    "nan": "def double(n): return float('nan')",
    "StopIteration": "def double(n): raise StopIteration",
    "GeneratorExit": "def double(n): raise GeneratorExit",
    "KeyboardInterrupt": "def double(n): raise KeyboardInterrupt",
    "unittest.SkipTest": "import unittest\ndef double(n): raise unittest.SkipTest('no')",
    "its own builtins": "import builtins\nbuiltins.all = builtins.isinstance = builtins.abs = lambda *_: True\n"
    "builtins.AssertionError = Exception\ndef double(n): return 0",
    "its own assert methods": "import unittest, math\nunittest.TestCase.assertEqual = lambda *_: None\nmath.isclose "
    "= lambda *_: True\n"
    "def double(n): return 0",
    "its own sys.exit": "import sys, atexit, os\nsys.excepthook = lambda *_: os._exit(0)\natexit.register(os._exit, "
    "0)\n"
    "def double(n): raise AssertionError",
    "tracing": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\n"
    "def double(n):\n    frame = sys._getframe()\n    while frame: frame.f_locals.update(n=0); frame = frame.f_back",
    "its own judge": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'judge' in name or 'plain' "
    "in name:\n"
    "        module.encode = lambda *_, **__: True\n        module.is_check = lambda *_: False\ndef double(n): "
    "return 0",
    "a thread that answers": "import threading, os\ndef flood():\n    for d in range(3, 64):\n        try: "
    "os.write(d, bytes(3) + b'\\x10[\"value\",1,null]')\n"
    "        except OSError: pass\nthreading.Thread(target=flood, daemon=True).start()\ndef double(n): return 0",
    "closed descriptors": "import os\nos.closerange(0, 64)\ndef double(n): return 0",
    "forged verdict": 'import os\nfor d in range(3, 64):\n    try: os.write(d, b\'{"passed": true, "error": '
    '""}\\n\')\n    except OSError: pass\n'
    "def double(n): return 0",
    "deep": "def double(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "huge": "def double(n): return 10 ** 10 ** 6",
    "a class of Python": "def double(n): return int",
    "recursion": "def double(n): return double(n)",
    "memory": "def double(n): return bytearray(1 << 40)",
    "output": "import sys\ndef double(n):\n    while True: sys.stdout.write('x' * 10**6)",
    **{
        f"raw {name}": RAW.replace("{answer}", answer)
        for name, answer in {
            "true": "message(['value', True, None])",
            "reference": "message(['value', {'ref': 0}, None])",
            "opaque": "message(['value', {'opaque': 'int'}, None])",
            "stop": "message(['raise', 'StopIteration', ''])",
            "exit": "message(['raise', 'SystemExit', '0'])",
            "skip": "message(['raise', 'SkipTest', ''])",
            "assertion": "message(['raise', 'AssertionError', ''])",
            "callback": "message(['callback', 0, [], {}])",
            "changed": "message(['value', 0, [[[]], {'dict': []}, 0]])",
            "module": "message(['value', {'extra': ['os', 'system', ['true']]}, None])",
            "eval": "message(['value', {'type': 'eval'}, None])",
            "array of objects": "message(['value', {'array': ['O', [1], [0]]}, None])",
            "verdict": "message({'passed': True, 'error': ''})",
            "no JSON": "message(b'[' * 10**5)",
            "a length without end": "b'\\xff' * 8",
            "nothing": "b''[:0] or os._exit(0)",
        }.items()
    },
}


@pytest.mark.parametrize("kind", TESTS)
def test_an_honest_program_passes_and_a_wrong_one_does_not(kind: str) -> None:
    assert judged("def double(n): return n * 2", TESTS[kind]).message == ""
    assert passes("def double(n): return n * 2", TESTS[kind])
    assert not passes("def double(n): return n * 2 + (n == 2 or n == 3 or n == 0.5 or '')", TESTS[kind])


@pytest.mark.parametrize(("kind", "trick"), [(list(TESTS)[n % len(TESTS)], trick) for n, trick in enumerate(TRICKS)])
def test_no_trick_passes(kind: str, trick: str) -> None:
    """The kinds of tests in turn; every trick with some of them is of the full tier."""
    assert not passes(TRICKS[trick], TESTS[kind])


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["EvalPlus", "unittest", "all"])
@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_passes_these_kinds(kind: str, trick: str) -> None:
    assert not passes(TRICKS[trick], TESTS[kind])


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): x.sort(reverse=True)", "x = [1, 3, 2]\nf(x)\nassert x == [3, 2, 1]"),
        ("def f(x): x['a'] = 1; x.pop('b')", "x = {'b': 2}\nf(x)\nassert x == {'a': 1}"),
        ("def f(n):\n    for i in range(n): yield i", "g = f(3)\nassert next(g) == 0\nassert list(g) == [1, 2]"),
        ("def f(g, n): return g(n) + g(n, more=2)", "assert f(lambda n, more=0: n + more, 3) == 8\nx = 1"),
        ("def f(g):\n    try: g()\n    except KeyError as e: return "
         "str(e)", "def g(): raise KeyError('k')\nassert f(g) == \"'k'\""),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
         "    def __len__(self): return len(self.items)", "s = Stack()\ns.push(3)\nassert len(s) == 1\nassert "
                                                          "s.items == [3]"),
        ("class Solution:\n    def f(self, x): return x + 1", "x = Solution()\nassert x.f(1) == 2\nassert f(2) == 3"),
        ("def f(x): raise ValueError('less')", "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == "
                                               "'less'\nelse:\n    assert False"),
        ("class Mine(KeyError): pass\ndef f(x): raise Mine('k')", "try:\n    f(1)\nexcept KeyError as e:\n    "
                                                                  "assert e.args == ('k',)"),
        ("import numpy as np\ndef f(x): return np.array(x) * 2.0", "import numpy as np\nassert "
                                                                   "np.array_equal(f(np.array([1, 2])), [2, 4])"),
        ("from decimal import Decimal\nfrom datetime import date\ndef f(x): return Decimal('0.1') + x, date(2020, "
         "1, 2)",
         "from decimal import Decimal\nfrom datetime import date\nassert f(Decimal('0.2')) == (Decimal('0.3'), "
         "date(2020, 1, 2))"),
        ("def f(): return {(1, 2): {3}, 'x': b'y', None: 1j, 2**70: float('inf')}",
         "x = f()\nassert x == {(1, 2): {3}, 'x': b'y', None: 1j, 2**70: float('inf')}"),
        ("def f(kind): return kind('3')", "x = 1\nassert f(int) == 3"),
        ("LIMIT = 5\ndef f(n, *, by=1): return n * by", "x = 2\nassert f(x, by=LIMIT) == 10"),
        ("def f(x): return lambda y: x + y", "g = f(1)\nassert g(2) == 3"),
        ("def merge(a, b): return a + b", "def check(c):\n    for n in (1, 2):\n        assert c([n], []) == [n]\n"
                                          "check(merge)"),
        ("def f(x): print('noise'); return x", "for n in (1, 2):\n    assert f(n) == n"),
        ("import math\ndef f(x): return [float(x)] * 2", "x = 1.0\nassert Counter(f(1)) == {1.0: 2}\nassert "
                                                         "isclose(f(1)[0], 1)"),
    ],
)  # fmt: skip
def test_what_tests_do_with_programs(program: str, tests: str) -> None:
    outcome = judged(program, tests)
    assert (outcome.values, outcome.message, outcome.ending) == ((True,), "", Ending.finished)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("for n in f():\n    assert n", "the tests reached no check"),
        ("def g(): pass\nif g():\n    assert f()\ndef test_x():\n    g()", "the tests reached no check"),
        ("x = 1\nassert f or x", "the tests called nothing of the program"),
    ],
)
def test_tests_that_reach_nothing_pass_nobody(tests: str, message: str) -> None:
    outcome = judged("def f(): return []", tests)
    assert (outcome.values, outcome.message) == ((False,), message)


def test_a_program_that_has_not_begun_when_its_tests_end_is_no_failure_of_confinement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process is stopped where it starts, as a busy machine may do."""

    class Stopped(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **others: Any) -> None:
            super().__init__(command, **others)
            if json.loads(command[-1])["role"] == "program":
                os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr("mcore_rl.rewards.confinement.subprocess.Popen", Stopped)
    outcome = judged("def f(): return []", "def g(): pass\nif g():\n    assert f()")
    assert (outcome.values, outcome.message) == ((False,), "the tests reached no check")


def test_the_judge_never_asks_the_program_what_is_equal() -> None:
    """Two objects of it, and one among others."""
    program = EQUAL.partition("    @property")[0] + "def f(n=0): return Equal()"
    outcome = judged(program, "x = f()\nassert x == f()")
    assert outcome.values == (False,)
    assert "the tests compare two objects of the program" in outcome.message
    for tests in (
        "x = 5\nassert x in f()",
        "x = [f()]\nassert x == [5]",
        "x = 5\nassert abs(f() - x) < 1e-6",
        "x = 5\nassert f() <= x",
    ):
        assert not passes(program, tests)


def test_objects_of_the_tests_do_not_go_to_the_program() -> None:
    with pytest.raises(UnjudgedError, match="the tests hand the program a module, which is no data"):
        judged("def f(x): return 1", "import math\nx = math\nassert f(x) == 1")


def test_what_is_expected_is_not_in_the_programs_process() -> None:
    program = """
import gc, os, sys
def f(x):
    seen = [gc.get_objects(), sys.argv, [frame.f_locals for frame in sys._current_frames().values()]]
    for descriptor in range(64):
        try:
            os.set_blocking(descriptor, False)
            seen.append(os.read(descriptor, 10**6))
        except OSError:
            pass
    text = str(seen)
    number = str(741852962 - -int("1"))
    return number if number in text else "no"
"""
    tests = "expected = [741852963]\nfor value in expected:\n    assert f(1) == ANSWER"
    assert not passes(program, tests.replace("ANSWER", "str(value)"))
    assert passes(program, tests.replace("ANSWER", "'no'"))
    assert passes(f"seen = [741852963]\n{program}", tests.replace("ANSWER", "str(value)")), "it would find it"


def test_the_limits_hold_for_both() -> None:
    short = CodeConfig(timeout_s=1.0)
    for program in ("def f(): \n    while True: pass", "while True: pass", "import time\ndef f(): time.sleep(600)"):
        assert run_judged(program, "for x in (1,):\n    assert f()", (), short).ending is Ending.timeout
    threads = "import threading, time\nthreading.stack_size(1 << 16)\ndef f():\n    while True: "
    threads += "threading.Thread(target=time.sleep, args=(600,)).start()"
    assert run_judged(threads, "for x in (1,):\n    assert f()", (), CONFIG).values != (True,)


def test_inside_the_program_can_say_that_it_passed() -> None:
    """Which is why it has to be asked for."""
    tests = "class Node: pass\ndef test_f():\n    assert f(Node()) == 5"
    (case,) = read_cases([tests])
    assert isinstance(case, InsideCase)
    assert run_confined("def f(node): return 5", CONFIG, inside=tests).values == (True,)
    assert run_confined("def f(node): return 4", CONFIG, inside=tests).values == (False,)
    assert run_confined("x = 1", CONFIG, inside=tests).values == (False,)
    assert run_confined(EQUAL + "def f(node): return Equal()", CONFIG, inside=tests).values == (True,)
    request = RewardRequest(("p", 0), "code", EQUAL + "def f(node): return Equal()", [tests])
    with pytest.raises(
        ValueError, match=r"judged in the program's own process: it defines class Node.*allow_inside_judging=true"
    ):
        grade_code(request, RewardConfig())
    assert grade_code(request, RewardConfig(code=CodeConfig(allow_inside_judging=True))).value == 1.0
