"""The index tracer against real vLLM: what the copy plan delivers is what vLLM's own loaders make of a checkpoint.

One process of vLLM for the file: its import takes 7 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.registry import model_of
from mcore_rl.proofs.tracer import NumberedCheckpoint, Tracer, reduced_config
from mcore_rl.rollout.parameters import VllmProcess
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support.published import FACTS, TINY

EXACT = 2**24  # integers in float32
HEAD_DIM = 32  # vLLM's attention on the CPU knows few


@pytest.fixture(scope="module")
def vllm(processes: None) -> Iterator[VllmProcess]:
    with VllmProcess() as process:
        yield process


def write(config: dict, checkpoint: NumberedCheckpoint, directory: Path) -> None:
    assert checkpoint.num_elements < EXACT
    tensors = {name: torch.from_numpy(checkpoint.read(name)).float() for name in checkpoint}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))


def engine(layout: RolloutLayout) -> dict[str, object]:
    """The arguments of vLLM that a layout means."""
    return {"tp": layout.tp, "dp": layout.engine_dp, "expert_parallel": layout.ep > 1}


CASES = [(model_type, "tp=2,pp=2", 4, rollout) for model_type in TINY for rollout in ("tp=2", "tp=4")]
CASES += [
    (model_type, training, world_size, rollout)
    for model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v2", "glm4_moe", "olmoe")
    for training, world_size, rollout in (
        ("tp=2,pp=2,ep=2,etp=2", 8, "tp=2,dp=2,ep=2"),
        ("tp=4,pp=2,ep=4", 8, "tp=2,dp=2,ep=4"),
    )
]


@pytest.mark.parametrize(("model_type", "training", "world_size", "rollout"), CASES)
def test_the_plan_delivers_what_vllm_loads(
    vllm: VllmProcess, tmp_path: Path, model_type: str, training: str, world_size: int, rollout: str
) -> None:
    check(vllm, tmp_path, model_type, (training, world_size, rollout))


def test_latent_attention_can_be_off(vllm: VllmProcess, tmp_path: Path) -> None:
    """As small models need it on a CPU: vLLM then keeps the two down projections apart."""
    check(vllm, tmp_path, "deepseek_v3", ("tp=2,pp=2", 4, "tp=2"), latent_attention=False)


def check(
    vllm: VllmProcess, tmp_path: Path, model_type: str, layouts: tuple[str, int, str], *, latent_attention: bool = True
) -> None:
    training, world_size, rollout = layouts
    parallel, layout = parse_layout(training), parse_rollout_layout(rollout)
    config = reduced_config(TINY[model_type], parallel, layout, HEAD_DIM)
    family, model = model_of(config)
    stored = RolloutTable(family, model, layout, latent_attention=latent_attention)
    tracer = Tracer(plan_reshard(Table(family, model, parallel, world_size), stored))
    write(config, tracer.checkpoint, tmp_path)
    loaded = vllm.load_directly(tmp_path, latent_attention=latent_attention, **engine(layout))  # type: ignore[arg-type]

    def direct(rank: int) -> dict[str, np.ndarray]:
        return {name: array.astype(np.int64) for name, array in loaded[rank % len(loaded)].items()}

    assert list(tracer.failures(range(layout.world_size), direct)) == []


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "tp=8"),
        ("Qwen/Qwen2.5-72B-Instruct", "tp=16"),
        ("Qwen/Qwen3-235B-A22B", "tp=4,dp=2,ep=8"),
        ("deepseek-ai/DeepSeek-V3", "tp=8,dp=2,ep=16"),
        ("deepseek-ai/DeepSeek-V2", "tp=8"),
        ("moonshotai/Moonlight-16B-A3B", "tp=2,dp=2,ep=4"),
        ("moonshotai/Kimi-K2-Instruct", "tp=16,ep=16"),
        ("zai-org/GLM-4.5", "tp=16"),
        ("zai-org/GLM-4.5-Air", "tp=4,dp=2,ep=8"),
        ("google/gemma-2-2b-it", "tp=4"),
        ("google/gemma-3-1b-it", "tp=4"),
        ("microsoft/phi-4", "tp=2"),
        ("microsoft/Phi-4-mini-instruct", "tp=8"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "tp=8"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "tp=4"),
    ],
)
def test_full_size_shapes_are_those_of_vllm(vllm: VllmProcess, name: str, rollout: str) -> None:
    """Of the first and the last rank: vLLM's own model classes on the meta device."""
    config = {key: value for key, value in FACTS[name].items() if key != "quantization_config"}
    layout, (family, model) = parse_rollout_layout(rollout), model_of(FACTS[name])
    table = RolloutTable(family, model, layout)
    ranks = [0, layout.tp * layout.engine_dp - 1]
    for rank, held in zip(ranks, vllm.rollout_parameters(config, ranks=ranks, **engine(layout)), strict=True):  # type: ignore[arg-type]
        stored = {tensor.name: tensor for tensor in table.tensors(rank)}
        assert {name: table.shape(tensor) for name, tensor in stored.items()} == {
            name: parameter.shape for name, parameter in held.items()
        }
        assert all(tuple(stored[name].experts) == parameter.experts for name, parameter in held.items())
        dtypes = {name: tensor.rule.dtype or "bfloat16" for name, tensor in stored.items()}
        assert dtypes == {name: parameter.dtype for name, parameter in held.items()}
