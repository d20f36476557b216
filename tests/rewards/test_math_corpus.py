"""The corpus of our own making: every kind of answer in every spelling is right, and every change of it wrong.

``benchmarks/math_grader.py`` prints the rates for more answers, beside those of math-verify's defaults.
"""

from __future__ import annotations

from collections import Counter

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest
from tests.support.math_corpus import KINDS, Case, cases_of, golds
from tests.support.math_spellings import CHANGES, SPELLINGS

# (kind, way) of what is known to be judged wrongly: nothing may be added, and what is mended must be taken out.
KNOWN: frozenset[tuple[str, str]] = frozenset()
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.tier("full")) for seed in (1, 2, 3)))


def misjudged(case: Case) -> bool:
    right = grade_math(RewardRequest(("p", 0), "math", case.response, case.gold), RewardConfig()).value == 1.0
    return right != case.right


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_misjudged_but_what_is_known(seed: int) -> None:
    corpus = [case for kind, gold in golds(1, seed) for case in cases_of(kind, gold)]
    assert len(corpus) > 500
    missed = {(case.kind, case.way): (case.gold, case.response) for case in corpus if misjudged(case)}
    assert {each: what for each, what in missed.items() if each not in KNOWN} == {}


def test_every_way_applies_to_some_answer() -> None:
    used = Counter(case.way for kind, gold in golds(12) for case in cases_of(kind, gold))
    assert set(SPELLINGS) | set(CHANGES) <= set(used)
    assert KNOWN <= {(kind, way) for kind in KINDS for way in used}
