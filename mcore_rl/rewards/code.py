"""Programs graded by test cases, each run in a process of its own; see ``cases`` and ``confinement``."""

from __future__ import annotations

import re
import time

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.cases import read_cases
from mcore_rl.rewards.confinement import ConfinementError, Ending, run_confined, weaknesses
from mcore_rl.rewards.score import RewardRequest, Score

BUDGET = 0.8  # share of ``reward.timeout_s`` for all test cases together, so that the grader answers before it is ended

WEAK = "Grade code on a machine that confines it, or set reward.code.allow_weak_confinement=true and trust the programs"

_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = {"python", "python3", "py"}


def program_of(response: str) -> str:
    """The last block fenced as Python; else the last fenced without a language; else the whole response.

    A block that is cut off reaches to the end of the response.
    """
    blocks = [(language.lower(), source) for language, source in _FENCE.findall(response)]
    for wanted in (_PYTHON, {""}):
        found = [source for language, source in blocks if language in wanted]
        if found:
            return str(found[-1])
    return response


def grade_code(request: RewardRequest, config: RewardConfig) -> Score:
    """``code.continuous``: the share of test cases that pass; else 1 where all do and 0 where one does not.

    parts: passed, the share that passed of all, and timed_out, the share that ran into a limit of time; without
    ``continuous`` nothing is run after the first case that fails.  Cases for which ``timeout_s`` leaves no time fail.
    ValueError: the ground truth holds no test cases.  ConfinementError: no program can be run on this machine, or none
    that is confined and ``allow_weak_confinement`` is not set.
    """
    if not config.code.allow_weak_confinement and weaknesses():
        raise ConfinementError(f"{'; '.join(weaknesses())}. {WEAK}")
    deadline = time.monotonic() + BUDGET * config.timeout_s
    cases = read_cases(request.ground_truth)
    program = program_of(request.response)
    passed = timed_out = 0
    for number, case in enumerate(cases, 1):
        left_s = deadline - time.monotonic()
        if left_s > 0:
            limit_s = min(config.code.timeout_s, left_s)
            outcome = run_confined(program, config.code, stdin=case.stdin, steps=case.steps, timeout_s=limit_s)
            passed += case.passed(outcome)
            timed_out += outcome.ending is Ending.timeout
        else:
            timed_out += 1
        if passed < number and not config.code.continuous:
            break
    share = passed / len(cases)
    value = share if config.code.continuous else float(passed == len(cases))
    return Score(value, {"passed": share, "timed_out": timed_out / len(cases)}, correct=float(passed == len(cases)))
