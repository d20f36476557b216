"""A run with adapters and its engines: merged weights and adapters that vLLM applies give what PEFT computes.

PEFT reads the adapters that the training ranks wrote, and the base that they began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mcore_rl.config.lora import LoraConfig, PublishedLora
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import SyncError
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.update import WeightUpdater
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support import sync_cases
from tests.support.live_trainers import LiveTrainers, in_two_stages, over_gloo
from tests.support.rollouts import chosen, reference_logprobs
from tests.support.sync_cases import MODELS
from tests.sync.test_update import over_memory

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.tier("full"), pytest.mark.timeout(1200)]
# Log-probs in float32: another order of sums.
TOLERANCE = 1e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# A block of vLLM's cache on the CPU is 128 tokens: of shorter prompts nothing is cached.
PROMPTS = [
    Prompt(id="short", tokens=tuple(range(3, 9))),
    Prompt(id="long", tokens=tuple(3 + 7 * n % 50 for n in range(140))),
]
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)


def _model(name: str) -> ModelConfig:
    return replace(MODELS[name], max_position_embeddings=256)


def _lora(name: str) -> LoraConfig:
    return LoraConfig(rank=3, alpha=6.0, **({} if MODELS[name].moe is None else {"target_modules": ATTENTION}))


def _engine(name: str, lora: LoraConfig, directory: Path, rollout: str) -> EngineProcess:
    table = RolloutTable(FAMILIES[name], _model(name), parse_rollout_layout(rollout), latent_attention=False)
    held = RolloutAdapterTable(table, AdapterTable(Table(FAMILIES[name], _model(name)), lora))
    return sync_cases.engine(directory, rollout, awaits_weights=True, adapters=held.engine_adapters)


async def _drawn(engine: EngineProcess) -> list[Sample]:
    requests = [Request(prompt=prompt) for prompt in PROMPTS]
    return sorted([each async for each in engine.generate(requests, GREEDY)], key=lambda each: each.prompt_id)


def _distance(samples: Sequence[Sample], base: Path, adapter: Path | None) -> float:
    """Of the samples' log-probs from those of PEFT, at most."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32).eval()
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    tokens = {prompt.id: prompt.tokens for prompt in PROMPTS}
    return max(
        float(
            np.abs(
                each.logprobs - chosen(reference_logprobs(model, tokens[each.prompt_id], each.tokens), each.tokens)
            ).max()
        )
        for each in samples
    )


@pytest.mark.parametrize(
    ("name", "rollout", "layout", "over"),
    [
        ("llama", "tp=1", "tp=2", over_memory),
        pytest.param("qwen2", "tp=2", "pp=2", over_gloo, marks=pytest.mark.tier("full")),
        pytest.param("qwen2", "tp=2", "tp=2", in_two_stages),
        pytest.param("qwen3_moe", "tp=1", "tp=2,ep=2,etp=1", over_memory),
    ],
)
def test_both_forms_give_what_peft_computes(
    trainers: LiveTrainers, tmp_path: Path, name: str, rollout: str, layout: str, over: object
) -> None:
    asyncio.run(_forms(trainers, tmp_path, name, rollout, layout, over))


async def _forms(trainers: LiveTrainers, folder: Path, name: str, rollout: str, layout: str, over: object) -> None:
    """Five updates in a row in which vLLM applies the adapters, then two of merged weights into another engine."""
    base, lora = folder / "base", _lora(name)
    sync_cases.hf_reference.build(_model(name), seed=0).save_pretrained(base)
    engines = {
        PublishedLora.adapter: _engine(name, lora, base, rollout),
        PublishedLora.merged: sync_cases.engine(base, rollout, awaits_weights=True),
    }
    try:
        for form, engine in engines.items():
            await trainers.build(name, _model(name), layout, base, rollout, over, lora, form)  # type: ignore[arg-type]
            sync = WeightUpdater([engine], parse_rollout_layout(rollout), trainers)
            sent = []
            for version in range(1, 6 if form is PublishedLora.adapter else 3):
                saved = folder / f"{form.value}-{version}"
                await trainers.order("adapt", version, saved, base)
                sent.append(sum(each.num_bytes for each in await sync.update(version)))
                samples = await _drawn(engine)
                assert _distance(samples, base, saved) < TOLERANCE, (form, version)
                assert _distance(samples, base, None) > 100 * TOLERANCE, "nothing is proven"
                await sync.check()
            if form is PublishedLora.adapter:
                assert sent[0] > 5 * sent[1] and len(set(sent[1:])) == 1, "the base is sent once"
                await trainers.order("adapt", 9, folder / "never sent", base)
                with pytest.raises(SyncError) as caught:
                    await sync.check()
                wrong = [line for line in str(caught.value).splitlines() if line.startswith("  - rollout rank ")]
                assert wrong and all(".lora_A." in line or ".lora_B." in line for line in wrong), (
                    "the base is as it was"
                )
    finally:
        for engine in engines.values():
            engine.close()
