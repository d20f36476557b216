"""Real vLLM engines that stand still: which of their processes, in what, with whose stacks; and the same samples after.

One engine, started again after each of its hangs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import ray

from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Sample, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.process_group import group_of
from mcore_rl.runtime.engine_client import EngineClient, PartSpec
from mcore_rl.runtime.engine_watch import WORK
from mcore_rl.runtime.rollout_worker import RolloutWorker
from mcore_rl.runtime.watchdog import Watchdog
from tests.support import rollouts
from tests.support.rollouts import assert_same, collect, prompts, until_running
from tests.support.run_task import still_alive

LONG = Sampling(max_tokens=64, ignore_eos=True, seed=11)
REQUESTS = requests_of(prompts(12), 4)
ENGINE = "engine 0"
SERVER, CORE = "its server", "vLLM's process below it"


class Impatient(Watchdog):
    """Of an engine that is meant to hang in ``verb``: all else may take its time."""

    def __init__(self) -> None:
        super().__init__(WatchdogConfig())
        self.verb = ""

    def limit_s(self, method: str) -> float:
        return 5.0 if method == self.verb else float("inf")


@dataclass
class Subject:
    """client: of a real engine.  dog: its watchdog.  log: its output.  expected: what it draws."""

    client: EngineClient
    dog: Impatient
    log: Path
    expected: dict[tuple[str, int], Sample] = field(default_factory=dict)

    def processes(self) -> list[psutil.Process]:
        """The actor, the server, and vLLM's processes below it."""
        (place,) = self.client.hang_watch.places
        assert place.leader is not None
        group = sorted(group_of(place.leader), key=lambda each: each.pid != place.leader)
        return [psutil.Process(place.actor.pid), *group]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("hung")
    rollouts.write("llama", folder)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    dog = Impatient()
    part = PartSpec(lambda: ray.remote(RolloutWorker).options(num_cpus=0).remote(ENGINE), folder / "engine-0.log")
    client = EngineClient(ENGINE, [part], dog)
    made = Subject(client, dog, folder / "engine-0.log")

    async def begin() -> None:
        await client.start(folder, rollouts.config(max_num_seqs=8))
        made.expected = await collect(client, REQUESTS, LONG)

    try:
        asyncio.run(begin())
        yield made
    finally:
        asyncio.run(client.shutdown())
        ray.shutdown()


def stop(subject: Subject, place: int) -> psutil.Process:
    """Process number ``place`` of the engine stands still from now on."""
    victim = subject.processes()[place]
    victim.send_signal(signal.SIGSTOP)
    return victim


async def draw(subject: Subject, place: int) -> psutil.Process:
    """It hangs while it draws."""
    drawing = asyncio.ensure_future(collect(subject.client, REQUESTS, LONG))
    await until_running(subject.client)
    victim = stop(subject, place)
    subject.dog.verb = WORK
    await drawing
    return victim


def asked(verb: str) -> Callable[..., object]:
    async def ask(subject: Subject, place: int) -> None:
        stop(subject, place)
        subject.dog.verb = verb
        await getattr(subject.client, verb)()

    return ask


CASES = {
    "drawing": (draw, 2, rf"{ENGINE} hangs while generating \d+ samples: no progress for \d+ s", CORE),
    "its server, drawing": (draw, 1, rf"{ENGINE} hangs while generating \d+ samples: no progress for \d+ s", SERVER),
    "going to sleep": (asked("sleep"), 2, f"{ENGINE} hangs while going to sleep: no answer for 5 s", CORE),
    "waking up": (asked("wake"), 1, f"{ENGINE} hangs while waking up: no answer for 5 s", SERVER),
    "its actor, waking up": (asked("wake"), 0, f"{ENGINE} hangs while waking up: no answer for 5 s", "its Ray actor"),
}


@pytest.mark.timeout(900)
@pytest.mark.tier("full")
@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_stands_still_is_told_of_killed_and_draws_alike_when_it_was_started_again(
    case: str, subject: Subject
) -> None:
    hang, place, words, name = CASES[case]
    before, reports = subject.processes(), set(subject.log.parent.glob("hang_*"))
    victim = before[place]

    async def run() -> None:
        with pytest.raises(DeadEngineError, match=words) as error:
            await hang(subject, place)  # type: ignore[misc]
        said = str(error.value).splitlines()
        assert said[1] == f"  {name}, process {victim.pid}: stopped (state T): somebody sent it SIGSTOP"
        (report,) = set(subject.log.parent.glob("hang_*")) - reports
        assert said[-1] == f"The stacks of its processes are in {report}"
        for each in before:
            part = report.read_text().partition(f"process {each.pid}: ")[2].split("\n\n")[0]
            can = each.pid != victim.pid
            assert ("most recent call first" in part) is can and ("no stacks: a stopped" in part) is not can, part
        assert not still_alive(before)
        subject.dog.verb = ""
        await subject.client.restart()
        assert_same(await collect(subject.client, REQUESTS, LONG), subject.expected, 1e-5)

    asyncio.run(run())
    assert not list(Path("/dev/shm").glob("vllm_*")) or len(before) < 4
