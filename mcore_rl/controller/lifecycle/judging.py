"""Opens what grades in a run or an evaluation, graders and judge, and tries both once before anything is drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, Style
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.responses import ResponseRow
from mcore_rl.rewards.ground_truths import check_ground_truths
from mcore_rl.rewards.judge_client import AnswersJudge
from mcore_rl.rewards.llm_judge import Judge
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer

FILE = "judgements.jsonl"  # in the run directory


@contextmanager
def opened_scorer(
    config: RewardConfig,
    custom: CustomRewardFunction,
    data_sources: Iterable[str],
    rows: Iterable[PromptRow] | Iterable[ResponseRow],
    say: Callable[[str], None],
    *,
    refuse: bool = True,
) -> Iterator[Scorer]:
    """While open: what grades, once it has seen that it can grade ``rows``; ``say`` is told where code is judged.

    data_sources: those of the rows that graders grade.  refuse: rows whose ground truth no grader can read.
    Raises ConfigError or DataError, and warns: see ``Scorer.check_sources`` and ``_check_graded_rows``.
    """
    with Scorer(config, custom) as scorer:
        scorer.check_sources(data_sources)
        for line in _check_graded_rows(scorer, custom, rows, refuse=refuse):
            say(line)
        yield scorer


def _check_graded_rows(
    scorer: Scorer,
    custom: CustomRewardFunction,
    rows: Iterable[PromptRow] | Iterable[ResponseRow],
    *,
    refuse: bool,
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


@asynccontextmanager
async def opened_judge(
    config: RewardConfig, path: Path | None, engines: AnswersJudge | None = None
) -> AsyncIterator[Judge | None]:
    """While open: the judge; None without ``reward.judge.address`` and ``engines``.  path: of its judgements.

    engines: that the run started for it.  Raises ConfigError as ``Judge``.
    """
    if config.judge.address is None and engines is None:
        yield None
        return
    async with Judge(config, path, engines) as judge:
        yield judge


async def check_judge(config: RewardConfig, rows: Iterable[PromptRow] | Iterable[ResponseRow]) -> None:
    """Asks the judge behind an address once, about the first row of its style, with the ground truth as the response.

    ConfigError: it does not answer.  That its answer has no score is a warning: it may be this row's fault.
    """
    async with opened_judge(config, None) as judge:
        first = next((row for row in rows if row.style is Style.judge), None)
        if judge is None or first is None:
            return
        truth = "" if first.ground_truth is None else str(first.ground_truth)
        messages = [*first.messages, {"role": "assistant", "content": truth}]
        request = RewardRequest((first.id, 0), first.data_source, truth, first.ground_truth, messages=messages)
        if problem := await judge.check(request):
            warn(f"the judge, asked about {first.id} with the ground truth as the response: {problem}")
