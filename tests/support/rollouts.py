"""Tiny models that vLLM's CPU build runs, engines of them, and what transformers says of the same tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mcore_rl.config.engine import Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.rollout.protocol import Prompt, Request, RolloutEngine, Sample, SampleSource, Sampling
from mcore_rl.rollout.vllm.engine.process_group import group_of, is_alive
from tests.support.vllm_device import VLLM_DEVICE

VOCAB, EOS = 101, 2
SIZES = dict(
    num_hidden_layers=2,
    hidden_size=128,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    initializer_range=0.1,
    eos_token_id=EOS,
    pad_token_id=None,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES | dict(tie_word_embeddings=True)),
    "qwen3": Qwen3Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
}
TINY = dict(device=VLLM_DEVICE, dtype=Precision.float32, kv_cache_memory_bytes=64 * 2**20, max_num_seqs=64)


def config(**changes: object) -> RolloutConfig:
    """float32, a small KV cache, prompts of 200 tokens and responses of 64."""
    return RolloutConfig(**(TINY | dict(max_prompt_length=200, max_response_length=64) | changes))  # type: ignore[arg-type]


def write(family: str, directory: Path, *, tokenizer: bool = False, seed: int = 0) -> PreTrainedModel:
    """Save a checkpoint of ``family``; with ``tokenizer``, one whose token 17 is the word "w17"."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(directory)
    if tokenizer:
        words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}").save_pretrained(directory)
    return model


def prompts(count: int, shortest: int = 4) -> list[Prompt]:
    """Of different lengths and tokens."""
    generator = np.random.default_rng(7)
    return [
        Prompt(id=f"p{index}", tokens=tuple(generator.integers(3, VOCAB, shortest + 5 * index).tolist()))
        for index in range(count)
    ]


async def collect(
    engine: SampleSource, requests: Iterable[Request], sampling: Sampling
) -> dict[tuple[str, int], Sample]:
    """All samples by key, whatever order they came in."""
    samples: dict[tuple[str, int], Sample] = {}
    async for sample in engine.generate(list(requests), sampling):
        key = (sample.prompt_id, sample.index)
        assert key not in samples
        samples[key] = sample
    return samples


async def until_running(engine: RolloutEngine, count: int = 1) -> None:
    """Return once so many samples are under way, each with a token at least."""
    while (await engine.statistics()).running < count:
        await asyncio.sleep(0.001)


def generate(engine: SampleSource, requests: Iterable[Request], sampling: Sampling) -> dict[tuple[str, int], Sample]:
    """``collect`` for a test without an event loop."""
    return asyncio.run(collect(engine, requests, sampling))


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """[N, V]: transformers' log-softmax of logits / temperature at every response token, in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def chosen(logprobs: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
    """[N]: of the tokens that were drawn."""
    return logprobs[np.arange(len(tokens)), np.asarray(tokens)]


def assert_same(samples: dict[tuple[str, int], Sample], expected: dict[tuple[str, int], Sample], atol: float) -> float:
    """Equal tokens, and log-probs to ``atol``; the largest difference."""
    assert samples.keys() == expected.keys()
    worst = 0.0
    for key, sample in samples.items():
        np.testing.assert_array_equal(sample.tokens, expected[key].tokens, err_msg=str(key))
        np.testing.assert_allclose(sample.logprobs, expected[key].logprobs, rtol=0, atol=atol)
        worst = max(worst, float(np.abs(sample.logprobs - expected[key].logprobs).max(initial=0)))
    return worst


def wait_until_gone(leader: int, limit_s: float = 30.0) -> None:
    """Return when no process of the group that ``leader`` led is alive."""
    deadline = time.monotonic() + limit_s
    while any(map(is_alive, group_of(leader))):
        assert time.monotonic() < deadline, f"alive: {group_of(leader)}"
        time.sleep(0.05)


def check_health(worker: object) -> None:
    """A method of vLLM's own workers, for ``call_workers``."""
