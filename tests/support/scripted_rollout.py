"""Prompts, an engine and a scorer without models, whose answers a test can foretell; for the controller's tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, FinishReason, Segment, VersionSpan, prompt_segment
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.single_turn import single_turn


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


def answered(
    number: int,
    score: Score | None = None,
    prompt: Sequence[int] = (5, 6),
    response: Sequence[int] = (7, 8),
    *,
    group: int = 0,
    index: int = 0,
    source: str = "sums",
    cut: bool = False,
    text: str = "",
) -> Episode:
    """One answer to row ``number``, graded unless there is no score."""
    of = row(number, prompt, source)
    episode = single_turn(of, prompt_segment(of), sample(f"p{number}", index, response, cut=cut, text=text), group)
    return episode if score is None else episode.with_score(score)


def turn(author: Author, tokens: Sequence[int], *, reward: float | None = None, text: str = "") -> Segment:
    """The model's are trained, and token t has log-prob -t / 10."""
    values, of_model = np.array(tokens, dtype=np.int32), author is Author.model
    return Segment(
        author=author,
        tokens=values,
        trained=of_model,
        logprobs=(values / -10).astype(np.float32) if of_model else None,
        versions=(VersionSpan(version=3, start=0, end=len(tokens)),) if of_model else (),
        reward=reward,
        text=text,
    )


def conversation(number: int, turns: Sequence[Segment], score: Score | None = None, *, group: int = 0) -> Episode:
    """``turns`` after the prompt of row ``number``."""
    of = row(number)
    segments = (prompt_segment(of), *turns)
    episode = Episode(row=of, prompt_id=f"p{number}", group=group, index=0, segments=segments, end=FinishReason.stop)
    return episode if score is None else episode.with_score(score)


def lost_episode(number: int, score: Score | None = None) -> Episode:
    """One whose interaction failed."""
    turns = [replace(turn(Author.model, (9,)), trained=False)]
    counts = AgentCounts(reason="interaction_failed", turns=1)
    return replace(conversation(number, turns, score), end=FinishReason.abort, agent=counts)


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
