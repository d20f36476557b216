"""Tiny models that vLLM's CPU kernels can run, two sets of weights for each, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import EngineAdapters
from mcore_rl.config.model import LinearAttentionConfig, MlaConfig, ModelConfig, MoeConfig, RopeConfig
from mcore_rl.config.rollout import RolloutConfig, parse_rollout_layout
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling
from mcore_rl.rollout.vllm.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.rollout.vllm.worker_methods import WEIGHT_RECEIVER
from tests.support import hf_reference, models
from tests.support.forked import start_engine
from tests.support.vllm_device import VLLM_DEVICE

SIZES = dict(hidden_size=64, head_dim=32)
# Heads and taps that vLLM's CPU kernels know.
CPU_DELTA_NET = LinearAttentionConfig(
    layers=[0, 1, 3], num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64, conv_kernel_dim=4
)
MODELS: dict[str, ModelConfig] = {
    "llama": models.dense(**SIZES),
    # One key/value head: two ranks share it, in training as in vLLM.
    "qwen2": models.dense(tie_output=True, qkv_bias=True, hidden_size=128, head_dim=32, num_query_groups=1),
    "qwen3": models.dense(qk_norm=True, **SIZES),
    "mixtral": models.moe(ffn_hidden_size=64, max_position_embeddings=256, **SIZES),  # a prompt over a block of vLLM's
    "gemma2": models.gemma2(embedding_scale=8.0, **SIZES),
    "gemma3_text": models.gemma3(embedding_scale=8.0, **SIZES),
    "phi3": models.phi3(hidden_size=128, head_dim=32, rope=models.phi3_rope(32)),
    "olmoe": models.olmoe(hidden_size=128, head_dim=32),
    # Its experts are of an odd width on each of two ranks, and of no whole 16 bytes on one.
    "qwen3_moe": models.moe(norm_topk_prob=False, qk_norm=True, ffn_hidden_size=34, **SIZES),
    "glm4_moe": models.glm4_moe(**SIZES),
    # Widths that vLLM's attention on the CPU knows, as below.
    "glm4_moe_lite": models.glm4_moe_lite(
        mla=MlaConfig(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        head_dim=48,
        hidden_size=64,
    ),
    "seed_oss": models.seed_oss(**SIZES),
    "smollm3": models.smollm3(hidden_size=128, head_dim=32),
    "ernie4_5": models.ernie4_5(**SIZES),
    "gpt_oss": models.gpt_oss(**SIZES),
    # A token has all experts: of some, bfloat16 would choose others than
    # float32 (transformers by itself: log-probs 0.8 apart), and what is compared here are weights.
    "qwen3_next": models.qwen3_next(
        moe=MoeConfig(num_experts=8, top_k=8, ffn_hidden_size=32, shared_ffn_hidden_size=56, shared_gate=True),
        linear_attention=CPU_DELTA_NET,
        **SIZES,
    ),
    "qwen3_5_text": models.qwen3_5(linear_attention=CPU_DELTA_NET, **SIZES),
    "qwen3_5_moe_text": models.qwen3_5_moe(
        moe=MoeConfig(num_experts=8, top_k=8, ffn_hidden_size=32, shared_ffn_hidden_size=56, shared_gate=True),
        linear_attention=replace(CPU_DELTA_NET, layers=[0, 1, 2]),
        **SIZES,
    ),
    # Widths that vLLM's attention on the CPU knows.
    "deepseek_v2": models.deepseek_v2(
        mla=MlaConfig(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        head_dim=48,
        hidden_size=64,
        rope=RopeConfig(),
        softmax_scale=None,
    ),
}
# Families of which vLLM's CPU build has kernels of bfloat16 alone; all others run in float32.
BFLOAT16 = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
PROMPTS = [Prompt(id=str(n), tokens=tuple(range(3 + n, 9 + 2 * n))) for n in range(4)]
RESPONSE = 96  # tokens, the longest
GREEDY = Sampling(max_tokens=10, temperature=0, ignore_eos=True)


def precision_of(name: str) -> Precision:
    """In which the engine of ``MODELS[name]`` runs."""
    return Precision.bfloat16 if name in BFLOAT16 else Precision.float32


def write(name: str, root: Path) -> tuple[Path, Path]:
    """Two checkpoints of the same architecture, a and b."""
    for seed, directory in enumerate((root / "a", root / "b")):
        hf_reference.build(MODELS[name], seed=seed).save_pretrained(directory)
    return root / "a", root / "b"


def engine(
    directory: Path,
    rollout: str = "tp=1",
    *,
    awaits_weights: bool = False,
    dtype: Precision = Precision.float32,
    wait: bool = True,
    cores: Sequence[int] | None = None,
    node: EngineNode = ONE_NODE,
    adapters: EngineAdapters | None = None,
) -> EngineProcess:
    """A real vLLM in a process of its own, in ``dtype``; or its part on ``node``."""
    layout = parse_rollout_layout(rollout)
    config = RolloutConfig(
        tp=layout.tp,
        ep=layout.ep,
        device=VLLM_DEVICE,
        dtype=dtype,
        max_prompt_length=model_of(read_config(directory))[1].max_position_embeddings - RESPONSE,
        max_response_length=RESPONSE,
        kv_cache_memory_bytes=1 << 26,
    )
    return start_engine(
        "engine" if node == ONE_NODE else f"engine (node {node.node_rank})",
        directory,
        config,
        cores=cores,
        extension=WEIGHT_RECEIVER,
        awaits_weights=awaits_weights,
        adapters=adapters,
        node=node,
        wait=wait,
    )


async def greedy(engine: EngineProcess) -> list[Sample]:
    """A greedy sample for each of ``PROMPTS``, in order."""
    requests = [Request(prompt=prompt) for prompt in PROMPTS]
    return sorted([sample async for sample in engine.generate(requests, GREEDY)], key=lambda sample: sample.prompt_id)


def distance_from_transformers(samples: Sequence[Sample], directory: Path) -> float:
    """The largest of: difference of log-probs; how much likelier another token than the one taken was."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    worst = 0.0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.tokens, *sample.tokens]])).logits[0, len(prompt.tokens) - 1 : -1]
        scores = torch.log_softmax(logits.double(), dim=-1)
        taken = scores[torch.arange(len(sample.tokens)), torch.from_numpy(sample.tokens).long()]
        worst = max(worst, (scores.max(-1).values - taken).max().item())
        worst = max(worst, (taken - torch.from_numpy(sample.logprobs).double()).abs().max().item())
    return worst


def same(ours: Sequence[Sample], theirs: Sequence[Sample], tolerance: float = 1e-6) -> bool:
    """Equal tokens, and log-probs within ``tolerance``: batches may be cut another way, and kernels round."""
    return all(
        np.array_equal(one.tokens, other.tokens) and np.allclose(one.logprobs, other.logprobs, rtol=0, atol=tolerance)
        for one, other in zip(ours, theirs, strict=True)
    )
