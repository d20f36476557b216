"""Real Megatron to real vLLM, for every family and layout axis: what is generated after an update, and what is held.

An engine starts from weights a, as training ranks exported them, and updates go to b, to a, ...: after each return to a
it must do what it did when it was fresh, and with b what transformers does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.errors import SyncError
from mcore_rl.rollout.engine.process import EngineProcess
from mcore_rl.rollout.protocol import Pause, Request, Sampling, VersionSpan
from mcore_rl.rollout.weight_channel import Mode
from mcore_rl.sync.directory import DirectoryTransport
from mcore_rl.sync.members import Address
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.update import WeightSync
from tests.support.live_trainers import LiveTrainers
from tests.support.sync_cases import MODELS, PROMPTS, distance_from_transformers, greedy, same
from tests.sync.conftest import Running

DENSE = ("tp=2", "pp=2")
EXPERTS = (*DENSE, "ep=2", "tp=2,ep=2,etp=1")
TOLERANCE = 1e-5  # float32, another order of sums
GROWTH = 8 << 20  # bytes that a process may differ by between two moments


# What one family and one layout can prove, from tp=2,ep=2.  First, for the families begin with it too.
mixtral = pytest.mark.parametrize("running", [("mixtral", "tp=1", "a")], indirect=True, ids=["mixtral"])


def _resident(engine: EngineProcess) -> int:
    process = psutil.Process(engine.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


@mixtral
def test_many_updates_keep_nothing_and_checks_name_what_is_wrong(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_checks(trainers, running.engine, running.a, running.b))


async def _checks(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> None:
    await trainers.build("mixtral", MODELS["mixtral"], "tp=2,ep=2,etp=1", a, "tp=1")
    sync = WeightSync([engine], parse_rollout_layout("tp=1"), trainers)
    after = []
    for version in range(1, 8):
        await trainers.order("load", (a, b)[version % 2])
        await sync.update(version, Mode.direct if version % 3 else Mode.names)
        after.append((_resident(engine), sum(await trainers.order("resident"))))
    assert after[-1][0] - after[1][0] < GROWTH
    assert after[-1][1] - after[1][1] < GROWTH
    await sync.check()  # so that it knows version 7

    layer = "model.layers.1.block_sparse_moe.experts.routed_experts.w13_weight"
    await trainers.order("hold_back", "decoder.layers.2.self_attention.linear_proj.weight")
    await trainers.order("swap", *(f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in (0, 1)))
    await trainers.order("skip", "decoder.layers.0.mlp.router.weight")
    await trainers.order("load", a)
    await sync.update(8)
    await trainers.order("mend")
    with pytest.raises(SyncError) as caught:
        await sync.check()
    message = str(caught.value)
    assert message.startswith("6 tensors of the rollout ranks are not the trainer's, version 8:")
    assert "o_proj.weight is stale: version 7's, not version 8's" in message
    assert "rollout rank 0: model.layers.0.block_sparse_moe.gate.weight is wrong: neither" in message
    for expert, other in ((0, 1), (1, 0), (2, 3), (3, 2)):  # both expert-parallel ranks swapped theirs
        assert f"{layer} expert {expert} is wrong: it holds expert {other}" in message
    await sync.update(9)
    await sync.check()


@mixtral
def test_other_ways_for_the_same_weights(trainers: LiveTrainers, running: Running, tmp_path: Path) -> None:
    asyncio.run(_other_ways(trainers, tmp_path, running.engine, running.a, running.b))


async def _other_ways(trainers: LiveTrainers, folder: Path, engine: EngineProcess, a: Path, b: Path) -> None:
    """Shared memory in both modes, a directory by names; each goes to b and back to a."""

    def over_memory(address: Address) -> SharedMemoryTransport:
        return SharedMemoryTransport(address=address)

    def over_files(address: Address) -> DirectoryTransport:
        return DirectoryTransport(address=address, root=folder / "versions")

    version = 30
    for over, modes in ((over_memory, (Mode.direct, Mode.names)), (over_files, (Mode.names,))):
        await trainers.build("mixtral", MODELS["mixtral"], "tp=2,ep=2,etp=1", a, "tp=1", over)
        sync = WeightSync([engine], parse_rollout_layout("tp=1"), trainers)
        for mode in modes:
            for weights in (b, a):
                version += 1
                await trainers.order("load", weights)
                await sync.update(version, mode)
                assert distance_from_transformers(await greedy(engine), weights) < TOLERANCE, (over, mode)
            await sync.check()
    left = [path for path in folder.rglob("*") if path.is_dir() and path.name.startswith("version-")]
    assert [path.name for path in left] == [f"version-{version}"], "versions before the last are removed"
    with pytest.raises(SyncError, match="write mode=names"):
        await sync.update(version + 1, Mode.direct)
    await trainers.build("mixtral", MODELS["mixtral"], "pp=2", a, "tp=1")
    await WeightSync([engine], parse_rollout_layout("tp=1"), trainers).update(version + 2)


@mixtral
def test_an_update_in_the_middle_of_samples(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_in_the_middle(trainers, running.engine, running.a, running.b))


async def _in_the_middle(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> None:
    await trainers.build("mixtral", MODELS["mixtral"], "pp=2", a, "tp=1")
    sync = WeightSync([engine], parse_rollout_layout("tp=1"), trainers)
    await sync.update(50)
    long = Sampling(max_tokens=90, temperature=0, ignore_eos=True)
    started, parts = asyncio.Event(), []

    async def stream() -> None:
        async for part in engine.stream(Request(prompt=PROMPTS[0]), long):
            parts.append(part)
            if len(parts) == 3:
                started.set()

    sampling = asyncio.create_task(stream())
    await started.wait()
    await trainers.order("load", b)
    await sync.update(51, pause=Pause.keep)
    await sampling
    sample = parts[-1]
    assert [span.version for span in sample.versions] == [50, 51]
    assert sample.versions[0].end == sample.versions[1].start > 2
    assert sample.versions[1].end == len(sample.tokens) == 90
    assert await engine.version() == 51


@pytest.mark.parametrize(
    "running",
    [
        ("mixtral", "tp=1", "a"),
        ("llama", "tp=1", "a"),
        ("qwen2", "tp=1", "a"),
        ("qwen3", "tp=1", "a"),
        ("gemma2", "tp=1", "a"),
        ("qwen3_moe", "tp=1", "a"),
        ("qwen3_moe", "tp=2", "a"),
        ("qwen2", "tp=2", "a"),
    ],
    indirect=True,
    ids="-".join,
)
def test_engines_generate_with_the_trainers_weights(
    trainers: LiveTrainers, running: Running, request: pytest.FixtureRequest
) -> None:
    name, rollout, _ = request.node.callspec.params["running"]
    asyncio.run(_updates(trainers, running, name, rollout))


async def _updates(trainers: LiveTrainers, running: Running, name: str, rollout: str) -> None:
    """By each layout in both modes to both weights, but that every second layout begins with the other mode."""
    model, version, engine = MODELS[name], 100, running.engine
    assert distance_from_transformers(running.fresh, running.a) < TOLERANCE
    outcomes = {running.a: running.fresh}
    for number, layout in enumerate(EXPERTS if model.moe is not None else DENSE):
        await trainers.build(name, model, layout, running.a, rollout)
        sync = WeightSync([engine], parse_rollout_layout(rollout), trainers)
        modes = (Mode.direct, Mode.names)[:: 1 - 2 * (number % 2)]
        for mode, weights in zip(modes, (running.b, running.a), strict=True):
            version += 1
            await trainers.order("load", weights)
            published = await sync.update(version, mode)
            if mode is Mode.direct:
                assert published[0].bytes_over_bound == 1.0
            samples = await greedy(engine)
            assert all(sample.versions == (VersionSpan(version=version, start=0, end=10),) for sample in samples)
            if weights in outcomes:
                assert same(samples, outcomes[weights]), (layout, mode)
            else:
                assert distance_from_transformers(samples, weights) < TOLERANCE, (layout, mode)
                assert not same(samples, running.fresh), "both weights say the same: nothing is proven"
                outcomes[weights] = samples
            await sync.check()
