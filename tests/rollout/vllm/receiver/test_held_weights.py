"""A running vLLM held against files: against those that it was started with, and against others.

One engine for the file: it takes 15 s to start.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mcore_rl.config.engine import Precision
from mcore_rl.config.rollout import Quantization, RolloutConfig
from mcore_rl.proofs.effective_config import config_differences, unread
from mcore_rl.reports import transformers_config
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.rollout.vllm.worker_methods import HELD_WEIGHTS, HeldWeightsMethods
from tests.support import quantised_engines, tiny_models
from tests.support.forked import start_engine
from tests.support.fp8_on_cpu import put_on_path
from tests.support.vllm_device import VLLM_DEVICE

FILE = "model.safetensors"
BLOCK = "model.layers.1."
# One of each kind that vLLM stores its own way: fused, stacked, packed, padded, plain.
CHANGED = {
    "model.embed_tokens.weight": 0.5,
    "lm_head.weight": 0.25,
    BLOCK + "self_attn.k_proj.weight": 1.0,
    BLOCK + "self_attn.o_proj.weight": 2.0,
    BLOCK + "input_layernorm.weight": 4.0,
    BLOCK + "block_sparse_moe.gate.weight": 8.0,
    BLOCK + "block_sparse_moe.experts.3.w2.weight": 16.0,
    BLOCK + "block_sparse_moe.experts.0.w3.weight": 32.0,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[tuple[EngineProcess, Path]]:
    directory = tmp_path_factory.mktemp("held") / "hf"
    tiny_models.save("mixtral", directory)
    config = RolloutConfig(
        device=VLLM_DEVICE,
        dtype=Precision.float32,
        max_prompt_length=8,
        max_response_length=8,
        kv_cache_memory_bytes=64 << 20,
    )
    with start_engine("held", directory, config, extension=HELD_WEIGHTS) as engine:
        yield engine, directory


def held(engine: EngineProcess, directory: Path) -> list[dict[str, float]]:
    return asyncio.run(engine.call_workers(HeldWeightsMethods.held_differences, str(directory), "tp=1"))


def test_its_own_files(started: tuple[EngineProcess, Path]) -> None:
    engine, directory = started
    assert held(engine, directory) == [{}]


def test_its_configuration(started: tuple[EngineProcess, Path]) -> None:
    """transformers is the oracle, of the same files."""
    engine, directory = started
    reference = transformers_config.effective_config(AutoModelForCausalLM.from_pretrained(directory))
    for of_worker in asyncio.run(engine.call_workers(HeldWeightsMethods.held_config)):
        configs = {"vllm": of_worker, "transformers": reference}
        assert config_differences(configs) == [] and unread(configs) == {}


def test_other_files(started: tuple[EngineProcess, Path], tmp_path: Path) -> None:
    engine, directory = started
    other = shutil.copytree(directory, tmp_path / "other")
    tensors = load_file(other / FILE)
    for name, by in CHANGED.items():
        tensors[name].view(-1)[-1] += by
    save_file(tensors, other / FILE, {"format": "pt"})
    (difference,) = held(engine, other)
    assert difference == pytest.approx(CHANGED, rel=1e-5)


def test_an_engine_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> None:
    """Its bytes and scales stand for the files' numbers after rounding; a block's greatest number moves its scale."""
    put_on_path(monkeypatch)
    directory = quantised_engines.write("qwen3_moe", tmp_path)[0]
    config = quantised_engines.rollout_config(Quantization.fp8_block)
    with start_engine("fp8", directory, config, extension=HELD_WEIGHTS) as engine:

        def differing(files: Path) -> list[dict[str, float]]:
            asked = (str(files), "tp=1", Quantization.fp8_block.value)
            return asyncio.run(engine.call_workers(HeldWeightsMethods.held_differences, *asked))

        assert differing(directory) == [{}]
        other = shutil.copytree(directory, tmp_path / "other")
        tensors = load_file(other / FILE)
        changed = {"input_layernorm.weight": 0.5, "self_attn.o_proj.weight": 8.0, "mlp.experts.2.up_proj.weight": 8.0}
        for name, by in changed.items():
            tensors[BLOCK + name].view(-1)[-1] += by
        save_file(tensors, other / FILE, {"format": "pt"})
        (difference,) = differing(other)
    assert {name.removeprefix(BLOCK): by for name, by in difference.items()} == pytest.approx(changed, rel=0.1)
