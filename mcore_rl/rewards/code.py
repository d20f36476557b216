"""Grades programs by test cases, each in a process of its own; see ``cases`` and ``confinement``."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.ground.errors import Violation
from mcore_rl.rewards.cases import Case, InsideCase, JudgedCase, read_cases
from mcore_rl.rewards.confinement import ConfinementError, Ending, Outcome, run_confined, run_judged, weaknesses
from mcore_rl.rewards.score import RewardRequest, Score

BUDGET = 0.8  # share of ``reward.timeout_s`` for all test cases, so that the grader answers before the scorer kills it

WEAK = "Grade code on a machine that confines it, or set reward.code.allow_weak_confinement=true and trust the programs"
INSIDE = (
    "Write the tests so that they only call the program and compare plain data (docs/rewards.md), leave the rows "
    "out, or set "
    "reward.code.allow_inside_judging=true and look at what is learned"
)
NAMED_ROWS = 10  # that a message names, of each kind

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

    Without ``continuous``, no case runs after the first that fails; with ``code.first_cases``, none after these
    once one has failed.  Cases fail for which ``timeout_s`` leaves no time.
    parts: ``passed`` and ``timed_out``, the shares of all cases that passed and that ran into a time limit.

    ValueError: the ground truth holds no test cases, or some that only the program's process could judge and
    ``allow_inside_judging`` is not set.  ConfinementError: this machine can run no program, or cannot fully confine one
    and ``allow_weak_confinement`` is not set.
    """
    if not config.code.allow_weak_confinement and weaknesses():
        raise ConfinementError(f"{'; '.join(weaknesses())}. {WEAK}")
    deadline = time.monotonic() + BUDGET * config.timeout_s
    cases = read_cases(request.ground_truth)
    inside = _inside(cases)
    if inside is not None and not config.code.allow_inside_judging:
        raise ValueError(f"its tests would be judged in the program's own process: {inside.why}. {INSIDE}")
    program = program_of(request.response)
    counted = min(config.code.first_cases or len(cases), len(cases))
    passed = timed_out = passed_first = 0
    for number, case in enumerate(cases, 1):
        left_s = deadline - time.monotonic()
        if left_s > 0:
            limit_s = min(config.code.timeout_s, left_s)
            outcome = _run(case, program, config.code, limit_s)
            passed += case.passed(outcome)
            timed_out += outcome.ending is Ending.timeout
        else:
            timed_out += 1
        if number <= counted:
            passed_first = passed
        if passed < number and not (config.code.continuous and number < counted):
            break
    value = passed_first / counted if config.code.continuous else float(passed == len(cases))
    return Score(
        value, {"passed": passed / len(cases), "timed_out": timed_out / len(cases)}, correct=float(passed == len(cases))
    )


def _inside(cases: Iterable[Case]) -> InsideCase | None:
    """The first of ``cases`` that only the program's own process could judge."""
    return next((case for case in cases if isinstance(case, InsideCase)), None)


def _run(case: Case, program: str, config: CodeConfig, limit_s: float) -> Outcome:
    if isinstance(case, JudgedCase):
        return run_judged(program, case.tests, case.names, config, has_prelude=case.has_prelude, timeout_s=limit_s)
    if isinstance(case, InsideCase):
        return run_confined(program, config, inside=case.tests, timeout_s=limit_s)
    return run_confined(program, config, stdin=case.stdin, steps=case.steps, timeout_s=limit_s)


@dataclass
class CodeRows:
    """What the tests of a data set's rows are: where they are judged, and which cannot be used.

    outside, inside: rows by data source.  unusable, inside_rows: (row, why) of the first of each kind.
    """

    outside: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    num_unusable: int = 0
    unusable: list[tuple[str, str]] = field(default_factory=list)
    inside_rows: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, object]]) -> CodeRows:
        """Reads the tests of rows: (name, data source, ground truth) of each."""
        code_rows = cls()
        for name, data_source, ground_truth in rows:
            try:
                cases = read_cases(ground_truth)
            except (ValueError, TypeError, RecursionError) as error:
                code_rows.num_unusable += 1
                if len(code_rows.unusable) < NAMED_ROWS:
                    code_rows.unusable.append((name, str(error)))
                continue
            inside = _inside(cases)
            (code_rows.outside if inside is None else code_rows.inside)[data_source] += 1
            if inside is not None and len(code_rows.inside_rows) < NAMED_ROWS:
                code_rows.inside_rows.append((name, inside.why))
        return code_rows

    def violations(self, config: CodeConfig) -> list[Violation]:
        """Every row that cannot be used, and those that are judged inside where nobody asked for it."""
        more = self.num_unusable - len(self.unusable)
        key = "reward_model.ground_truth"
        violations = [Violation(key, name, why, "Correct the row or leave it out") for name, why in self.unusable]
        if more > 0:
            violations.append(Violation(key, f"{more} more rows", "as these", "Correct them or leave them out"))
        if self.inside and not config.allow_inside_judging:
            rows = "; ".join(f"{name}: {why}" for name, why in self.inside_rows)
            count = self.inside.total()
            problem = f"{count} rows have tests that run in the program's own process, which can forge them ({rows})"
            violations.append(Violation("reward.code.allow_inside_judging", False, problem, INSIDE))
        return violations

    def report(self) -> list[str]:
        """One line for each data source: how many rows are judged outside of the program, and how many inside."""
        return [
            f"{source}: {self.outside[source]} rows are judged outside of the program's process, "
            f"{self.inside[source]} inside, where a program could forge its verdict"
            for source in sorted(self.outside | self.inside)
        ]
