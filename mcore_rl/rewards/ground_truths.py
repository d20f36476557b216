"""What graders make of the ground truths of a data set, before a run starts.

A row whose ground truth its grader cannot use costs every response to it, so it is not trained on.  One that LaTeX does
not read as a whole (a sentence, broken LaTeX) is compared as text: an equal answer is right only in the same words.
How many those are is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from mcore_rl.ground.errors import ConfigError, DataError
from mcore_rl.rewards.gsm8k import gold_number, grade_gsm8k
from mcore_rl.rewards.math import gold_form, grade_math, parts_by_text
from mcore_rl.rewards.registry import Grader, grader_of

SHOWN = 5
MISSING = ("nan", "<na>")  # as pandas writes a missing value as text
MAX_SHOWN = 80  # characters of a ground truth
REQUIRES: dict[Grader, Callable[[str], object]] = {grade_gsm8k: gold_number, grade_math: gold_form}

logger = logging.getLogger(__name__)


def check_ground_truths(rows: Iterable[tuple[str, str, object]], *, refuse: bool = True) -> None:
    """Reads each (row id, data source, ground truth), and warns of those that are compared as text.

    refuse: raise DataError if graders cannot use some; False: warn, where such responses are to count as wrong.
    """
    problems: list[str] = []
    num_math = 0
    by_text = list[str]()
    for row, source, truth in rows:
        try:
            grader = grader_of(source)
        except ConfigError:
            continue  # refused elsewhere, once for all rows
        is_number = isinstance(truth, float) or grader is grade_math
        if is_number and str(truth).strip().lower() in MISSING:
            problems.append(f"{row}: the ground truth is NaN. Write the answer, or leave the row out")
            continue
        try:
            REQUIRES.get(grader, str)(str(truth))
        except ValueError as error:
            problems.append(f"{row}: {error}")
            continue
        if grader is grade_math:
            num_math += 1
            if parts_by_text(str(truth)):
                by_text.append(f"{row} {str(truth)[:MAX_SHOWN]!r}")
    if problems:
        refusal = DataError("reward_model.ground_truth", problems)
        if refuse:
            raise refusal
        logger.warning("%s", refusal)
    if by_text:
        logger.warning("%s", "\n".join(_report(num_math, by_text)))


def _report(num_math: int, by_text: list[str]) -> Iterator[str]:
    yield (
        f"{len(by_text)} of {num_math} mathematical ground truths are compared as text, at least in part, because "
        "LaTeX does not read all of them: an answer in other words is wrong there. Rewrite them or leave the rows out:"
    )
    yield from (f"  {each}" for each in by_text[:SHOWN])
    if len(by_text) > SHOWN:
        yield f"  and {len(by_text) - SHOWN} more"
