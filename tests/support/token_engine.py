"""An engine without a model that draws token by token, under weights that change meanwhile, and may die."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from mcore_rl.ground.errors import DeadEngineError, WeightsIncompleteError
from mcore_rl.rollout.episodes import FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Pause, Request, Sample, Sampling, seed_of

Ends = Callable[[Request, int, random.Random], bool]


@dataclass
class _Under:
    """A request under way.  versions: of its tokens, those of ``so_far`` included."""

    request: Request
    random: random.Random
    versions: list[int] = field(default_factory=list)
    given_back: bool = False


class TokenEngine:
    """Draws one token of every request in each turn of the event loop.

    A token is the version of the weights that drew it, so that spans can be told from tokens; position p has the
    log-prob -p / 8.  ends: whether a response ends with the token at a position, drawn from its own random numbers, as
    an engine's are (``seed_of``).
    """

    def __init__(self, ends: Ends, name: str = "engine 0") -> None:
        self.name, self.ends = name, ends
        self.version, self.asleep, self.frozen = 0, False, False
        self.death: DeadEngineError | None = None
        self.asked: list[Request] = []
        self._under: list[_Under] = []

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._under)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        if self.frozen:
            raise WeightsIncompleteError(f"{self.name} receives weights")
        self.asked += requests
        mine = [_Under(each, random.Random(seed_of(each, sampling)), versions_of(each)) for each in requests]
        self._under += mine
        try:
            while mine:
                await asyncio.sleep(0)
                if self.death is not None:
                    raise self.death
                assert not self.asleep, "it draws on devices that the trainer has"
                for each in [*mine]:
                    if (sample := self._turn(each, sampling)) is not None:
                        mine.remove(each)
                        self._under.remove(each)
                        yield sample
        finally:
            for each in mine:
                self._under.remove(each)

    def _turn(self, each: _Under, sampling: Sampling) -> Sample | None:
        if each.given_back:
            return sample_of(each.request, each.versions, FinishReason.abort)
        if self.frozen:
            return None
        place = len(each.versions)
        each.versions.append(self.version)
        if self.ends(each.request, place, each.random):
            return sample_of(each.request, each.versions, FinishReason.stop)
        cut = len(each.versions) == sampling.max_tokens
        return sample_of(each.request, each.versions, FinishReason.length) if cut else None

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        assert keys is None
        ending = [*self._under]
        for each in ending:
            each.given_back = True
        while self.death is None and any(each in self._under for each in ending):
            await asyncio.sleep(0)

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        assert mode is Pause.keep
        self.frozen = True

    async def finish_update(self, version: int) -> None:
        self.version, self.frozen = version, False


def versions_of(request: Request) -> list[int]:
    """Of the tokens that it comes with, which are these."""
    return [] if request.so_far is None else [int(token) for token in request.so_far.tokens]


def sample_of(request: Request, versions: Sequence[int], finish: FinishReason) -> Sample:
    """A sample whose tokens were drawn by ``versions``; its spans go on from those of ``so_far``."""
    before = () if request.so_far is None else request.so_far.versions
    spans, place = [*before], request.num_done
    for version, tokens in groupby(versions[place:]):
        count = len([*tokens])
        spans.append(VersionSpan(version=version, start=place, end=place + count))
        place += count
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=np.array(versions, dtype=np.int32),
        logprobs=(np.arange(len(versions)) / -8).astype(np.float32),
        versions=tuple(spans),
        finish=finish,
        text=f"{request.prompt.id}#{request.index}",
    )


def lognormal(median: float, sigma: float) -> Ends:
    """Responses whose lengths are lognormal, rounded up: a token ends one that is as long by the hazard there.

    The draw of a token so depends on nothing but how many came before, as a model's does: what is interrupted and goes
    on with other random numbers has the same distribution.
    """

    def beyond(length: int) -> float:
        """The probability of more than ``length`` tokens."""
        return 1.0 if length == 0 else 0.5 * math.erfc(math.log(length / median) / (sigma * math.sqrt(2)))

    def ends(request: Request, place: int, draw: random.Random) -> bool:
        return draw.random() < 1 - beyond(place + 1) / beyond(place)

    return ends
