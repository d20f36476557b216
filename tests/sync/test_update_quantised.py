"""Real Megatron to real vLLM that quantises: every update has the bits of a fresh engine, and the check finds one.

The fresh engine reads the same checkpoint and quantises while it loads: vLLM's own way, which knows no plan.  Products
are computed by a plugin (``tests.support.fp8_on_cpu``); what is quantised, when and where it lies is vLLM's code.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.ground.errors import SyncError
from mcore_rl.rollout.protocol import Request
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.update import WeightUpdater
from tests.support import quantised_engines
from tests.support.fp8_on_cpu import put_on_path
from tests.support.live_trainers import LiveTrainers
from tests.support.quantised_engines import MODELS, ProbedReceiver
from tests.support.sync_cases import GREEDY, PROMPTS

Held = list[dict[str, tuple[str, int]]]
pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3600)]
CASES = [
    ("qwen2", "tp=1", "tp=2", Quantization.fp8_block),
    ("qwen3_moe", "tp=2", "tp=2,ep=2,etp=1", Quantization.fp8_block),
    ("qwen2", "tp=2", "pp=2", Quantization.fp8_block),
    ("qwen2", "tp=2", "tp=2", Quantization.mxfp8),
    ("qwen2", "tp=1", "tp=2", Quantization.fp8_channel),
    ("qwen2", "tp=1", "pp=2", Quantization.fp8_tensor),
    ("qwen3_moe", "tp=1", "tp=2", Quantization.mxfp8),
    ("qwen3_moe", "tp=1", "tp=2,ep=2,etp=1", Quantization.fp8_channel),
    ("qwen3_moe", "tp=1", "ep=2", Quantization.fp8_tensor),
]


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a CPU."""
    put_on_path(monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(each, "value", each)) for each in case))
def test_updates_in_a_row_have_the_bits_of_a_fresh_engine(
    trainers: LiveTrainers, tmp_path: Path, case: tuple[str, str, str, Quantization]
) -> None:
    asyncio.run(_updates(trainers, tmp_path, *case))


async def _updates(
    trainers: LiveTrainers, tmp_path: Path, name: str, rollout: str, layout: str, scheme: Quantization
) -> None:
    a, b, c = quantised_engines.write(name, tmp_path)
    fresh = {}
    for weights in (b, c):
        with quantised_engines.engine(weights, scheme, rollout, awaits_weights=False) as engine:
            fresh[weights] = await _state(engine)
    with quantised_engines.engine(a, scheme, rollout, awaits_weights=True) as engine:
        await trainers.build(name, MODELS[name], layout, a, rollout, quantization=scheme)
        sync = WeightUpdater([engine], parse_rollout_layout(rollout), trainers)
        begun: Held = await engine.call_workers(ProbedReceiver.held)
        for version, weights in enumerate((b, a, c, b), start=1):
            await trainers.order("load", weights)
            await sync.update(version)
            await sync.check()
            held, samples = await _state(engine)
            assert [_addresses(each) for each in held] == [_addresses(each) for each in begun], "graphs would break"
            if weights in fresh:
                assert [_hashes(each) for each in held] == [_hashes(each) for each in fresh[weights][0]]
                assert samples == fresh[weights][1]
        assert fresh[b][1] != fresh[c][1], "both weights say the same: nothing is proven"
        await _flips(sync, engine, len(held))


async def _flips(sync: WeightUpdater, engine: EngineProcess, ranks: int) -> None:
    """One bit of each kind of quantised tensor and of its scales, on the last rank."""
    dtypes: list[dict[str, str]] = await engine.call_workers(ProbedReceiver.dtypes)
    layer = {name: dtype for name, dtype in dtypes[0].items() if ".layers.1." in name}
    in_fp8 = [name for name, dtype in layer.items() if "float8" in dtype]
    scales = [name for name in layer if "weight_scale" in name]
    assert len(in_fp8) == len(scales) == 4
    assert not any("float8" in dtype for name, dtype in dtypes[0].items() if "gate.weight" in name or "embed" in name)
    for name in (*in_fp8, *scales):
        await engine.call_workers(ProbedReceiver.flip, name, ranks - 1)
        with pytest.raises(SyncError, match=r"1 tensors of the rollout ranks are not the trainer's") as caught:
            await sync.check()
        weight, is_scale, _ = name.partition("_scale")
        assert f"rollout rank {ranks - 1}: {weight}{' (scales)' if is_scale else ''}" in str(caught.value)
        await engine.call_workers(ProbedReceiver.flip, name, ranks - 1)
        await sync.check()


async def _state(engine: EngineProcess) -> tuple[Held, list[Any]]:
    """What ranks hold, and greedy responses, one after another: a batch cut otherwise rounds otherwise."""
    samples = [sample for prompt in PROMPTS async for sample in engine.generate([Request(prompt=prompt)], GREEDY)]
    return await engine.call_workers(ProbedReceiver.held), [
        (sample.tokens.tolist(), sample.logprobs.tolist()) for sample in samples
    ]


def _addresses(held: dict[str, tuple[str, int]]) -> dict[str, int]:
    return {name: address for name, (_, address) in held.items()}


def _hashes(held: dict[str, tuple[str, int]]) -> dict[str, str]:
    return {name: each for name, (each, _) in held.items()}
