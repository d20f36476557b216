"""Real Megatron to real vLLM, for every family and layout axis: what is generated after an update, and what is held.

An engine starts from weights a, as training ranks exported them, and updates go to b, to a, ...: after each return to a
it must do what it did when it was fresh, and with b what transformers does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM

from mcore_rl.config.engine import Precision
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.ground.errors import SyncError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Pause, Prompt, Request, Sampling, VersionSpan, requests_of
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.members import Address
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport
from mcore_rl.sync.update import WeightUpdater
from tests.support.live_trainers import LiveTrainers, in_two_stages
from tests.support.rollouts import chosen, collect, reference_logprobs
from tests.support.sync_cases import MODELS, distance_from_transformers, greedy, precision_of, same
from tests.sync.conftest import Running

DENSE = ("tp=2", "pp=2")
EXPERTS = (*DENSE, "ep=2", "tp=2,ep=2,etp=1")
# Of log-probs.  float32: another order of sums.  bfloat16: eight bits, through 4 layers, beside transformers' float32;
# the two checkpoints of a family are 1 and more apart.
TOLERANCES = {Precision.float32: 1e-5, Precision.bfloat16: 0.15}
TOLERANCE = TOLERANCES[Precision.float32]
GROWTH = 8 << 20  # bytes that a process may differ by between two moments


# What one family and one layout can prove, from tp=2,ep=2.  First, for the families begin with it too.
in_gate = pytest.mark.tier("test")
mixtral = pytest.mark.parametrize("running", [("mixtral", "tp=1", "a")], indirect=True, ids=["mixtral"])


def _resident(engine: EngineProcess) -> int:
    process = psutil.Process(engine.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


@in_gate
@mixtral
def test_many_updates_keep_nothing_and_checks_name_what_is_wrong(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_checks(trainers, running.engine, running.a, running.b))


async def _checks(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> None:
    await trainers.build("mixtral", MODELS["mixtral"], "tp=2,ep=2,etp=1", a, "tp=1")
    sync = WeightUpdater([engine], parse_rollout_layout("tp=1"), trainers)
    after = []
    for version in range(1, 8):
        await trainers.order("load", (a, b)[version % 2])
        await sync.update(version)
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


def over_memory(address: Address) -> SharedMemoryTransport:
    return SharedMemoryTransport(address=address)


@mixtral
@pytest.mark.parametrize("over", [over_memory, in_two_stages])
def test_every_transport_brings_the_same_weights(
    trainers: LiveTrainers, running: Running, over: Callable[[Address], Transport]
) -> None:
    asyncio.run(_over(trainers, running.engine, running.a, running.b, over))


async def _over(
    trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path, over: Callable[[Address], Transport]
) -> None:
    """To b and back to a, and once more, when memory is used again; then another transport takes over."""
    await trainers.build("mixtral", MODELS["mixtral"], "tp=2,ep=2,etp=1", a, "tp=1", over)
    sync = WeightUpdater([engine], parse_rollout_layout("tp=1"), trainers)
    for version, weights in enumerate((b, a, b, a), start=31):
        await trainers.order("load", weights)
        await sync.update(version)
        assert distance_from_transformers(await greedy(engine), weights) < TOLERANCE, version
        await sync.check()
    await trainers.build("mixtral", MODELS["mixtral"], "pp=2", a, "tp=1")
    await WeightUpdater([engine], parse_rollout_layout("tp=1"), trainers).update(35)


@in_gate
@mixtral
def test_an_update_in_the_middle_of_samples(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_in_the_middle(trainers, running.engine, running.a, running.b))


async def _in_the_middle(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> None:
    """Each token has the log-prob that transformers computes with the weights that drew it, over the whole prefix.

    The prompt fills a block of vLLM's prefix cache; some requests have begun when the update comes, others wait.
    """
    await trainers.build("mixtral", MODELS["mixtral"], "pp=2", a, "tp=1")
    sync, pool = WeightUpdater([engine], parse_rollout_layout("tp=1"), trainers), EnginePool([engine], 64)
    prompt = Prompt(id="long", tokens=tuple(3 + (7 * at) % 50 for at in range(150)))
    first, more = requests_of([prompt], 3), [Request(prompt=prompt, index=index) for index in (3, 4)]
    long = Sampling(max_tokens=90, ignore_eos=True)
    for version in range(51, 71, 2):  # on a busy machine samples may be done before the update comes
        await trainers.order("load", a)
        await sync.update(version)
        await trainers.order("load", b)
        drawn = (await engine.statistics()).generated_tokens
        sampling = asyncio.create_task(collect(pool, first, long))
        while (await engine.statistics()).generated_tokens < drawn + 9:
            await asyncio.sleep(0.001)
        async with pool.held():
            waiting = asyncio.create_task(collect(pool, more, long))
            await sync.update(version + 1, pause=Pause.keep)
        samples, later = await sampling, await waiting
        if all(len(sample.versions) > 1 for sample in samples.values()):
            break
    assert await engine.version() == version + 1
    assert all([span.version for span in sample.versions] == [version + 1] for sample in later.values())
    by_a, by_b = (AutoModelForCausalLM.from_pretrained(each, attn_implementation="eager").eval() for each in (a, b))
    for sample in (*samples.values(), *later.values()):
        old, new = (reference_logprobs(each, prompt.tokens, sample.tokens) for each in (by_a, by_b))
        switch = sample.versions[-1].start
        expected = np.concatenate([chosen(old, sample.tokens)[:switch], chosen(new, sample.tokens)[switch:]])
        assert np.abs(sample.logprobs - expected).max() < TOLERANCE
        assert np.abs(chosen(old, sample.tokens) - chosen(new, sample.tokens))[switch:].max() > 0.1, "nothing is proven"
        assert sample.versions[-1].end == len(sample.tokens) == 90
    for sample in samples.values():
        before, after = sample.versions
        assert (before.version, before.start, after.version) == (version, 0, version + 1)
        assert 2 < before.end == after.start < 90


@pytest.mark.parametrize(
    "running",
    [
        pytest.param(("mixtral", "tp=1", "a"), marks=in_gate),
        pytest.param(("llama", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen2", "tp=1", "a"), marks=in_gate),
        pytest.param(("qwen3", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("gemma2", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_moe", "tp=1", "a"), marks=pytest.mark.tier("full")),
        ("qwen3_moe", "tp=2", "a"),
        pytest.param(("phi3", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("gemma3_text", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_next", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_next", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_5_text", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_5_text", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("qwen3_5_moe_text", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("olmoe", "tp=2", "a"), marks=pytest.mark.tier("full")),
        ("qwen2", "tp=2", "a"),
        pytest.param(("glm4_moe", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("gpt_oss", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("gpt_oss", "tp=1", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("glm4_moe", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("deepseek_v2", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("seed_oss", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("smollm3", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("ernie4_5", "tp=2", "a"), marks=pytest.mark.tier("full")),
        pytest.param(("glm4_moe_lite", "tp=2", "a"), marks=pytest.mark.tier("full")),
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
    """By each layout to b and back to a; what they bring does not depend on the layout that they come from."""
    model, version, engine = MODELS[name], 100, running.engine
    tolerance = TOLERANCES[precision_of(name)]
    assert distance_from_transformers(running.fresh, running.a) < tolerance
    outcomes = {running.a: running.fresh}
    for layout in EXPERTS if model.moe is not None else DENSE:
        await trainers.build(name, model, layout, running.a, rollout)
        sync = WeightUpdater([engine], parse_rollout_layout(rollout), trainers)
        for weights in (running.b, running.a):
            version += 1
            await trainers.order("load", weights)
            published = await sync.update(version)
            assert published[0].bytes_over_bound == 1.0
            samples = await greedy(engine)
            assert all(sample.versions == (VersionSpan(version=version, start=0, end=10),) for sample in samples)
            if weights in outcomes:
                assert same(samples, outcomes[weights]), layout
            else:
                assert distance_from_transformers(samples, weights) < tolerance, layout
                assert distance_from_transformers(samples, running.a) > 4 * tolerance, "nothing is proven"
                assert not same(samples, running.fresh), "both weights say the same: nothing is proven"
                outcomes[weights] = samples
            await sync.check()
