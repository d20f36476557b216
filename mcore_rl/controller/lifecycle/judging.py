"""Opens the judge of a run or an evaluation, and asks it once before anything is drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from mcore_rl.config.reward import RewardConfig, Style
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.responses import ResponseRow
from mcore_rl.rewards.judge_client import AnswersJudge
from mcore_rl.rewards.llm_judge import Judge
from mcore_rl.rewards.score import RewardRequest

FILE = "judgements.jsonl"  # in the run directory


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
