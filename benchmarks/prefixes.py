"""What it brings that turns go to the engine that has their prefix, against the engine with the least load.

    python benchmarks/prefixes.py [--sessions 12] [--turns 6] [--rounds 2]

Simulated, 8 engines and 64 sessions of 6 turns with the real pool, in virtual time: the share of later turns whose
engine drew the turn before, for the pool as it is, by load alone, and by a hash.

Real: two vLLM engines on the CPU, of half of the cores each, with a llama of 5 million parameters; a session begins
with 400 tokens, and each turn adds 400 of a tool that takes up to a second.  Both ways draw the same tokens; the caches
are emptied before each; rounds alternate, and the median of their ratios counts, of the engines' processor time, which
other work on the machine changes less than the clock.  Exits with 1 where the pool takes more of it than by load alone,
or finds less than 0.9 of what it could.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from agents import write_model  # stands beside this file

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Prompt, Request, Sampling
from mcore_rl.rollout.vllm.engine.admission import admit
from mcore_rl.rollout.vllm.engine.environment import usable_cores
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.engine.process_group import group_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests
from tests.rollout.test_pool_prefixes import ByHash, ByLoad, play

OPENING = 400
ADDED = 400
RESPONSE = 16
SEATS = 16
BLOCK = 128  # tokens of a block of the CPU engine's cache
HIT_SHARE = 0.9


class Round:
    """One way of drawing all sessions on ``engines``.

    cpu_s: their processor time.  found, possible: cached tokens of later turns, and those of whole blocks.
    """

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self._engines = engines
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.found = 0
        self.possible = 0

    async def play(self, source: EnginePool, num_sessions: int, num_turns: int, vocab_size: int) -> list[list[int]]:
        """Draws the sessions; returns the drawn tokens of each."""
        begun = time.perf_counter()
        cpu_s = processor_s(self._engines)
        drawn = await asyncio.gather(
            *(self._session(source, number, num_turns, vocab_size) for number in range(num_sessions))
        )
        self.seconds = time.perf_counter() - begun
        self.cpu_s = processor_s(self._engines) - cpu_s
        return list(drawn)

    async def _session(self, source: EnginePool, number: int, num_turns: int, vocab_size: int) -> list[int]:
        rng = np.random.default_rng(number)
        tokens = rng.integers(3, vocab_size, OPENING).tolist()
        drawn = list[int]()
        before = 0
        for turn in range(num_turns):
            name = f"p{number}/turn{turn}" if turn else f"p{number}"
            request = Request(prompt=Prompt(id=name, tokens=tuple(tokens), opening=f"p{number}"))
            async for sample in source.generate([request], Sampling(max_tokens=RESPONSE, ignore_eos=True, seed=1)):
                drawn += sample.tokens.tolist()
                tokens += sample.tokens.tolist()
                self.found += sample.cached_tokens if turn else 0
            self.possible += max(0, before - 1) // BLOCK * BLOCK
            before = len(tokens)
            tokens += rng.integers(3, vocab_size, ADDED).tolist()
            await asyncio.sleep(rng.random())
        return drawn


def processor_s(engines: Sequence[EngineProcess]) -> float:
    """The processor time of the engines' processes so far."""
    times = [each.cpu_times() for engine in engines for each in group_of(engine.pid)]
    return sum(each.user + each.system for each in times)


async def cold(engines: Sequence[EngineProcess]) -> None:
    """Empties the prefix caches, as an update of weights does."""
    for engine in engines:
        await engine.start_update()
        await engine.finish_update(1)


async def measured(engines: Sequence[EngineProcess], vocab_size: int, given: argparse.Namespace) -> list[float]:
    """Processor time by load alone over that of the pool, in the median; the least found share of what could be."""
    ratios = list[float]()
    shares = list[float]()
    for number in range(-1, given.rounds):
        rounds = list[Round]()
        drawn = list[list[list[int]]]()
        for kind in (EnginePool, ByLoad):
            await cold(engines)
            rounds.append(Round(engines))
            drawn.append(await rounds[-1].play(kind(engines, SEATS), given.sessions, given.turns, vocab_size))
        assert drawn[0] == drawn[1], "draws do not depend on where turns go"
        if number < 0:
            continue  # the first round compiles
        own, by_load = rounds
        ratios.append(by_load.cpu_s / own.cpu_s)
        shares.append(own.found / own.possible)
        print(
            f"round {number + 1} of {given.rounds}: {own.cpu_s:.1f} s of processor, {own.seconds:.1f} of clock, "
            f"{own.found:,} of {own.possible:,} tokens found; by load alone {by_load.cpu_s:.1f} and "
            f"{by_load.seconds:.1f} s, {by_load.found:,} found",
            flush=True,
        )
    return [statistics.median(ratios), min(shares)]


def main() -> int:
    """Exit status: 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for name, kind in (("the pool", EnginePool), ("by load alone", ByLoad), ("by a hash", ByHash)):
        outcome = play(kind)
        print(
            f"simulated, {name}: {outcome.hit_share:.1%} of later turns met their prefix; an engine that got one was "
            f"busier than the least busy by at most {outcome.excess:.1f} requests of its size"
        )
    length = OPENING + given.turns * (ADDED + RESPONSE)
    rollout = RolloutConfig(
        device=Device.cpu,
        dtype=Precision.float32,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        max_prompt_length=length,
        max_response_length=RESPONSE,
        max_num_seqs=SEATS,
    )
    cores = usable_cores()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_model(folder, max_length=length + RESPONSE)
        admit(folder, rollout, detect(Device.cpu))
        engines = [
            start_engine(f"rollout-{index}", folder, rollout, cores=share or cores)
            for index, share in enumerate((cores[: len(cores) // 2], cores[len(cores) // 2 :]))
        ]
        try:
            ratio, share = asyncio.run(measured(engines, len(tokenizer), given))
        finally:
            for engine in engines:
                engine.close()
    print(f"real: by load alone {ratio:.2f} of the pool's processor time (at least 1)")
    print(f"the pool found {share:.3f} of what it could (at least {HIT_SHARE})")
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    return int(ratio < 1 or share < HIT_SHARE)


if __name__ == "__main__":
    sys.exit(main())
