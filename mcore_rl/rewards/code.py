"""Grades programs by test cases, each in a process of its own; see ``cases`` and ``confinement``."""

from __future__ import annotations

import re
import time

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.cases import read_cases
from mcore_rl.rewards.confinement import ConfinementError, Ending, run_confined, weaknesses
from mcore_rl.rewards.score import RewardRequest, Score

BUDGET = 0.8  # share of ``reward.timeout_s`` for all test cases, so that the grader answers before the scorer kills it

WEAK = "Grade code on a machine that confines it, or set reward.code.allow_weak_confinement=true and trust the programs"

_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = {"python", "python3", "py"}


def program_of(response: str) -> str:
    """The last block fenced as Python; else the last block fenced without a language; else the whole response.

    A block whose closing fence is missing extends to the end of the response.
    """
    blocks = [(language.lower(), source) for language, source in _FENCE.findall(response)]
    for wanted in (_PYTHON, {""}):
        sources = [source for language, source in blocks if language in wanted]
        if sources:
            return str(sources[-1])
    return response


def grade_code(request: RewardRequest, config: RewardConfig) -> Score:
    """The score is 1 if all test cases pass, else 0; with ``code.continuous``, the share of test cases that pass.

    Without ``continuous``, no case runs after the first that fails.  Cases fail for which ``timeout_s`` leaves no time.
    parts: ``passed`` and ``timed_out``, the shares of all cases that passed and that ran into a time limit.

    ValueError: the ground truth holds no test cases.  ConfinementError: this machine can run no program, or cannot
    fully confine one and ``allow_weak_confinement`` is not set.
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
