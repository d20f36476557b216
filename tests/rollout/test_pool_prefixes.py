"""Turns go to the engine that has their prefix, and no engine is busier for it than the bound says.

The real pool over simulated engines, in virtual time: every run of a case is the same.  Engines count by themselves
what they hold and whose prefix they have.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout import pool
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.pool import PATIENCE, STAYS, EngineLoad, EnginePool, PrefixHits, _Homes, _Waiter
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, aborted
from tests.support.virtual_time import run_virtually

SEATS, RESPONSE = 32, 64
SAMPLING = Sampling(max_tokens=RESPONSE)


class Engine:
    """Takes a millisecond for each token that it draws, and a tenth for each that it has not cached.

    arrivals: of each later turn, whether the engine drew the turn before.
    excess: of each request that came where another sample or turn had been, by how many requests of its size the engine
        was busier then than the least busy.
    """

    def __init__(self, name: str, others: list[Engine]) -> None:
        self.name = name
        self.others = others
        self.held = 0
        self.has = dict[tuple[str, int], int]()
        self.arrivals = list[bool]()
        self.excess = list[float]()
        self.dead = asyncio.Event()
        self.frozen = False

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        (request,) = requests
        opening = request.prompt.opening or request.prompt.id
        size = len(request.tokens) + RESPONSE
        cached = self.has.get((opening, request.index), 0)
        if request.prompt.id != opening:
            self.arrivals.append(cached == max(each.has.get((opening, request.index), 0) for each in self.others))
        if cached:
            least = min(each.held for each in self.others if not each.dead.is_set() and not each.frozen)
            self.excess.append((self.held - least) / size)
        self.held += size
        drawing = asyncio.create_task(asyncio.sleep(1e-3 * RESPONSE + 1e-4 * (len(request.tokens) - cached)))
        death = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait([drawing, death], return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise DeadEngineError(f"{self.name} was killed")
        finally:
            self.held -= size
            drawing.cancel()
            death.cancel()
        self.has[opening, request.index] = size
        yield Sample(
            prompt_id=request.prompt.id,
            index=request.index,
            tokens=np.full(RESPONSE, zlib.crc32(request.prompt.id.encode()) % 97, dtype=np.int32),
            logprobs=np.zeros(RESPONSE, dtype=np.float32),
            versions=(),
            finish=FinishReason.length,
            cached_tokens=cached,
        )


class ByHash(EnginePool):
    """A conversation is bound to an engine by the hash of its name, whatever that has to do."""

    def _home(self, waiter: _Waiter, tokens: Mapping[EngineLoad, float]) -> EngineLoad | None:
        request = waiter.group[0]
        key = f"{request.prompt.opening or request.prompt.id}/{request.index}"
        return [*tokens][zlib.crc32(key.encode()) % len(tokens)]


class Unbounded(EnginePool):
    """A turn goes to the engine of the turn before, however busy."""

    def _home(self, waiter: _Waiter, tokens: Mapping[EngineLoad, float]) -> EngineLoad | None:
        home = self._homes.of(waiter.group[0])
        return home if home in tokens else None


class ByLoad(EnginePool):
    """Every turn goes to the engine with the least load, as if nothing were cached."""

    def _home(self, waiter: _Waiter, tokens: Mapping[EngineLoad, float]) -> EngineLoad | None:
        return None


class Outcome:
    """What the engines saw.  hit_share: of later turns, those whose engine drew the turn before."""

    def __init__(self, engines: Sequence[Engine], tokens: dict[str, list[int]], drawn_by: EnginePool) -> None:
        arrivals = [hit for engine in engines for hit in engine.arrivals]
        self.hit_share = sum(arrivals) / len(arrivals)
        self.excess = max(each for engine in engines for each in engine.excess)
        self.num_turns = [len(engine.arrivals) for engine in engines]
        self.tokens = tokens
        self.metric = drawn_by.hits.take()["rollout/prefix_hit_share"]


def play(
    kind: type[EnginePool] = EnginePool,
    num_engines: int = 8,
    num_sessions: int = 64,
    *,
    joining: int = 0,
    one_prompt: bool = False,
    dies: bool = False,
    leaves: bool = False,
    seats: int = SEATS,
) -> Outcome:
    """Sessions of six turns, between which tools take up to 0.2 s.

    joining: engines that join when every session has begun.  one_prompt: all sessions are samples of a long one.
    dies, leaves: so does the first engine in the middle.
    """

    async def run() -> Outcome:
        engines = list[Engine]()
        engines += [Engine(f"{number}", engines) for number in range(num_engines)]
        drawn_by = kind(engines, seats, goes_on=True)  # type: ignore[arg-type]
        tokens = dict[str, list[int]]()

        async def session(number: int) -> None:
            rng = random.Random(number)
            await asyncio.sleep(rng.random())
            opening, index = ("p", number) if one_prompt else (f"p{number}", 0)
            length = 2000 if one_prompt else rng.randint(80, 120)
            drawn = tokens.setdefault(f"p{number}", [])
            for turn in range(6):
                name = opening if turn == 0 else f"{opening}/turn{turn}"
                request = Request(prompt=Prompt(id=name, tokens=(1,) * length, opening=opening), index=index)
                async for sample in drawn_by.generate([request], SAMPLING):
                    drawn += sample.tokens.tolist()
                length += RESPONSE + rng.randint(100, 200)
                await asyncio.sleep(0.2 * rng.random())

        async def change() -> None:
            await asyncio.sleep(1.0)
            if joining:
                engines.extend(Engine(f"new {number}", engines) for number in range(joining))
                for engine in engines[-joining:]:
                    drawn_by.add(engine)  # type: ignore[arg-type]
                async with drawn_by.held():  # all receive weights, which empties their caches
                    for engine in engines:
                        engine.has.clear()
            if dies:
                engines[0].dead.set()
            if leaves:
                drawn_by.retire(engines[0])  # type: ignore[arg-type]
                engines[0].frozen = True

        await asyncio.gather(change(), *(session(number) for number in range(num_sessions)))
        assert drawn_by.num_unfinished == 0
        return Outcome(engines, tokens, drawn_by)

    return run_virtually(run())


def test_turns_find_their_prefix_at_even_load() -> None:
    outcome = play()
    assert outcome.hit_share > 0.9
    assert max(outcome.num_turns) < 1.5 * 64 * 5 / 8
    assert play(ByLoad).hit_share < 0.3, "else nothing is proven"


@pytest.mark.parametrize("changes", [dict(), dict(one_prompt=True), dict(dies=True), dict(leaves=True)])
def test_no_engine_is_busier_for_it_than_the_bound(changes: dict[str, int]) -> None:
    assert play(**changes).excess <= STAYS * SEATS  # type: ignore[arg-type]


def test_neither_a_hash_nor_the_prefix_alone_keeps_the_bound() -> None:
    assert play(ByHash).excess > STAYS * SEATS
    assert play(Unbounded, one_prompt=True).excess > 3 * STAYS * SEATS


def test_engines_that_join_take_their_share_of_sessions_that_began_elsewhere() -> None:
    outcome = play(num_engines=1, joining=7)
    assert min(outcome.num_turns) > 5 and outcome.hit_share > 0.8


@pytest.mark.parametrize(("updated", "engines_that_draw"), [(False, 1), (True, 2)])
def test_an_update_frees_turns_from_the_engine_whose_cache_it_emptied(updated: bool, engines_that_draw: int) -> None:
    async def run() -> int:
        engines = list[Engine]()
        engines += [Engine(f"{number}", engines) for number in range(2)]
        two = EnginePool(engines, SEATS)  # type: ignore[arg-type]

        async def draw(opening: str, turn: int) -> None:
            name = f"{opening}/turn{turn}" if turn else opening
            request = Request(prompt=Prompt(id=name, tokens=(1,) * 50, opening=opening))
            async for _ in two.generate([request], SAMPLING):
                pass

        await draw("a", 0)
        await draw("b", 0)  # on the same engine: both had nothing to do
        if updated:
            async with two.held():
                for engine in engines:
                    engine.has.clear()
        await asyncio.gather(draw("a", 1), draw("b", 1))
        return sum(bool(engine.arrivals) for engine in engines)

    assert run_virtually(run()) == engines_that_draw


@pytest.mark.parametrize("changes", [dict(dies=True), dict(leaves=True)])
def test_sessions_of_an_engine_that_dies_or_leaves_go_on_elsewhere(changes: dict[str, bool]) -> None:
    outcome = play(**changes)  # type: ignore[arg-type]
    assert outcome.hit_share > 0.9 and outcome.tokens == play().tokens
    assert outcome.num_turns[0] < min(outcome.num_turns[1:])


def test_turns_find_their_prefix_where_more_sessions_wait_than_engines_can_run() -> None:
    assert play(num_sessions=256, seats=8).hit_share > 0.8


def test_the_metric_is_the_share_of_tokens_that_engines_had_cached() -> None:
    assert play().metric > 0.7 > 0.3 > play(ByLoad).metric


def where_samples_go(num_groups: int, length: int) -> list[dict[str, int]]:
    """How many of the eight samples of each group, asked for one by one, each of four engines draws."""

    async def run() -> list[dict[str, int]]:
        engines = list[Engine]()
        engines += [Engine(f"{number}", engines) for number in range(4)]
        four = EnginePool(engines, SEATS)  # type: ignore[arg-type]

        async def sample(group: int, index: int) -> None:
            await asyncio.sleep(0.0001 * (num_groups * index + group))
            prompt = Prompt(id=f"p{group}", tokens=(1,) * length)
            async for _ in four.generate([Request(prompt=prompt, index=index)], SAMPLING):
                """It is drawn."""

        await asyncio.gather(*(sample(group, index) for group in range(num_groups) for index in range(8)))
        return [
            {e.name: count for e in engines if (count := sum(name == f"p{group}" for name, _ in e.has))}
            for group in range(num_groups)
        ]

    return run_virtually(run())


def test_samples_of_a_long_prompt_that_are_asked_for_one_by_one_share_an_engine() -> None:
    where = where_samples_go(num_groups=8, length=1000)
    assert all(len(counts) == 1 for counts in where)
    assert sorted(name for counts in where for name in counts) == sorted("0123" * 2)


def test_samples_of_a_short_prompt_are_spread() -> None:
    """An engine that had them all would leave three idle for the sake of twenty tokens."""
    assert where_samples_go(num_groups=1, length=20) == [{"0": 2, "1": 2, "2": 2, "3": 2}]


def test_a_request_is_overtaken_by_few() -> None:
    """One engine with one seat; its own turns would go on before a stranger for ever."""

    async def run() -> int:
        engines = list[Engine]()
        engines.append(Engine("0", engines))
        one = EnginePool(engines, 1)  # type: ignore[arg-type]
        drawn = list[str]()

        async def turn(name: str, opening: str = "") -> None:
            prompt = Prompt(id=name, tokens=(1,) * 20, opening=opening)
            async for sample in one.generate([Request(prompt=prompt)], SAMPLING):
                drawn.append(sample.prompt_id)

        await turn("own")
        running = asyncio.create_task(turn("own/turn1", "own"))
        await asyncio.sleep(0)
        stranger = asyncio.create_task(turn("stranger"))
        others = [asyncio.create_task(turn(f"own/turn{number}", "own")) for number in range(2, 40)]
        await asyncio.gather(running, stranger, *others)
        return drawn.index("stranger") - 2

    assert run_virtually(run()) == PATIENCE


def test_conversations_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REMEMBERED", 4)
    homes, load = _Homes(), EngineLoad(engine=Engine("0", []))  # type: ignore[arg-type]
    requests = [Request(prompt=Prompt(id=name, tokens=(1,))) for name in "abc"]
    for request in requests:
        homes.remember(request, load)
    assert [homes.of(each) is load for each in requests] == [False, True, True]


def test_only_what_was_drawn_counts_as_a_hit_or_a_miss() -> None:
    hits = PrefixHits()
    request = Request(prompt=Prompt(id="p", tokens=(1,) * 30))
    hits.add(request, aborted(request))
    assert hits.take() == {}
    hits.add(request, replace(aborted(request), tokens=np.ones(3, dtype=np.int32), cached_tokens=16))
    hits.add(request, replace(aborted(request), tokens=np.ones(3, dtype=np.int32)))
    assert hits.take() == {"rollout/prefix_hit_share": 16 / 60}
    assert hits.take() == {}
