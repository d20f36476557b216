"""The last look at the rows that graders grade, before anything is drawn: ground truths, or the user's function."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rl.config.reward import CustomRewardFunction, Style
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.responses import ResponseRow
from mcore_rl.rewards.ground_truths import check_ground_truths
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer


def check_graded_rows(
    scorer: Scorer,
    custom: CustomRewardFunction,
    rows: Iterable[PromptRow] | Iterable[ResponseRow],
    *,
    refuse: bool = True,
) -> list[str]:
    """Without a function of the user's, every ground truth is read; with one, it is called once, for the first row.

    Returns lines for the user: for each data source of code, where its rows are judged.
    Raises DataError (with ``refuse``) or ConfigError, and warns: see ``check_ground_truths``,
    ``Scorer.check_code_rows`` and ``Scorer.try_custom``.
    """
    graded = (row for row in rows if row.style is Style.rule)
    if custom.path is None:
        truths = [(row.id, row.data_source, row.ground_truth) for row in graded]
        check_ground_truths(truths, refuse=refuse)
        return scorer.check_code_rows(truths)
    first = next(graded, None)
    if first is not None:
        truth = str(first.ground_truth)
        messages = [*first.messages, {"role": "assistant", "content": truth}] if first.messages else ()
        extra = {**first.columns, **first.extra_info}
        scorer.try_custom(
            RewardRequest((first.id, 0), first.data_source, truth, first.ground_truth, extra, messages=messages)
        )
    return []
