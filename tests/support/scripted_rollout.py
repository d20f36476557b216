"""Prompts, an engine and a scorer without models, whose answers a test can foretell; for the controller's tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.protocol import FinishReason, Request, Sample, Sampling, VersionSpan


def row(number: int, tokens: Sequence[int] = (5, 6), source: str = "sums") -> PromptRow:
    return PromptRow(
        id=f"file:{number}",
        tokens=tuple(tokens),
        messages=[],
        data_source=source,
        ground_truth=str(number),
        extra_info={"index": number},
        columns={"ability": "math"},
    )


def sample(
    prompt_id: str = "p", index: int = 0, tokens: Sequence[int] = (7, 8), *, cut: bool = False, text: str = ""
) -> Sample:
    """Token t has log-prob -t / 10."""
    return Sample(
        prompt_id=prompt_id,
        index=index,
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-token / 10 for token in tokens], dtype=np.float32),
        versions=(VersionSpan(version=3, start=0, end=len(tokens)),),
        finish=FinishReason.length if cut else FinishReason.stop,
        text=text,
    )


class ScriptedEngine:
    """Samples in a shuffled order; ``calls`` keeps what was asked.  Text: ``<prompt id>#<index>``.

    cut_from: samples of this index and above are cut off at their limit.
    """

    def __init__(self, fails_after: int | None = None, cut_from: int | None = None) -> None:
        self.calls: list[tuple[list[Request], Sampling]] = []
        self.fails_after, self.cut_from = fails_after, cut_from

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        self.calls.append((list(requests), sampling))
        shuffled = list(requests)
        random.Random(len(self.calls)).shuffle(shuffled)
        for done, each in enumerate(shuffled):
            if done == self.fails_after:
                raise RuntimeError("the engine is gone")
            await asyncio.sleep(0)
            name = f"{each.prompt.id}#{each.index}"
            cut = self.cut_from is not None and each.index >= self.cut_from
            yield sample(each.prompt.id, each.index, tokens=(9,) * (1 + each.index), text=name, cut=cut)


class ScriptedScorer:
    """``value`` of the request, or its whole Score; a test may hold grading back with ``gate``."""

    def __init__(self, value: Callable[[RewardRequest], float | Score]) -> None:
        self.value = value
        self.requests: list[RewardRequest] = []
        self.gate: asyncio.Event | None = None
        self.running = 0

    async def score(self, request: RewardRequest) -> Score:
        self.requests.append(request)
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            value = self.value(request)
            return value if isinstance(value, Score) else Score(value, correct=float(value > 0))
        finally:
            self.running -= 1
