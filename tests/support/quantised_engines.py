"""Engines in fp8 on a CPU, the models that fit them, and a worker that shows and spoils what it holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.rollout import Quantization, RolloutConfig, parse_rollout_layout
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.receiver import SyncReceiver
from tests.support import hf_reference, models
from tests.support.forked import start_engine
from tests.support.sync_cases import RESPONSE
from tests.support.vllm_device import VLLM_DEVICE

# Two ranks have whole blocks of all matrices; rows of queries, keys and values are not whole blocks.
SIZES = dict(num_layers=2, hidden_size=256, num_attention_heads=8, num_query_groups=2, head_dim=32, ffn_hidden_size=256)
MODELS: dict[str, ModelConfig] = {
    "qwen2": models.dense(qkv_bias=True, tie_output=True, **SIZES),
    "qwen3_moe": models.moe(
        qk_norm=True, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=256, norm_topk_prob=True), **SIZES
    ),
}
PROBED = "tests.support.quantised_engines.ProbedReceiver"


class ProbedReceiver(SyncReceiver):
    """The receiver of a run, with methods that tests call."""

    def held(self) -> dict[str, tuple[str, int]]:
        """(hash of the bytes, address) of every parameter."""
        return {
            name: (
                hashlib.sha256(parameter.data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
                parameter.data.data_ptr(),
            )
            for name, parameter in self.model_runner.get_model().named_parameters()
        }

    def dtypes(self) -> dict[str, str]:
        """The dtype of every parameter."""
        return {name: str(each.dtype) for name, each in self.model_runner.get_model().named_parameters()}

    def flip(self, name: str, rank: int) -> None:
        """Flips the lowest bit of an element of parameter ``name`` on ``rank``."""
        if self.rank == rank:
            whole = dict(self.model_runner.get_model().named_parameters())[name].data
            element = whole[(-1,) * (whole.dim() - 1)][-1:]
            element.view(torch.uint8)[0] ^= 1


def write(name: str, root: Path) -> list[Path]:
    """Three checkpoints of ``MODELS[name]`` in bfloat16, a, b and c, of growing weights."""
    written = []
    for seed, letter in enumerate("abc"):
        model = hf_reference.build(MODELS[name], seed=seed).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1 + seed)
        model.save_pretrained(root / letter)
        written.append(root / letter)
    return written


def rollout_config(scheme: Quantization, rollout: str = "tp=1") -> RolloutConfig:
    """The settings of an engine of ``MODELS`` in ``scheme``."""
    layout = parse_rollout_layout(rollout)
    return RolloutConfig(
        tp=layout.tp,
        device=VLLM_DEVICE,
        dtype=Precision.bfloat16,
        quantization=scheme,
        max_prompt_length=128 - RESPONSE,
        max_response_length=RESPONSE,
        kv_cache_memory_bytes=1 << 26,
    )


def engine(directory: Path, scheme: Quantization, rollout: str, *, awaits_weights: bool) -> EngineProcess:
    """A real vLLM that quantises, in a process of its own."""
    config = rollout_config(scheme, rollout)
    return start_engine("engine", directory, config, extension=PROBED, awaits_weights=awaits_weights)
