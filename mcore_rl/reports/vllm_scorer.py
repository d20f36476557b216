"""vLLM's side of a log-probability report: it draws responses and reports their log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.config.engine import Device
from mcore_rl.config.rollout import RolloutConfig, sequence_bytes
from mcore_rl.parallel.device import detect
from mcore_rl.proofs.differences import worst
from mcore_rl.proofs.effective_config import joined
from mcore_rl.reports.question import Question, VllmSamples
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.worker_methods import HELD_WEIGHTS, HeldWeightsMethods

KV_CACHE_BYTES = 256 << 20  # lower limit
NUM_SEQS = 8  # sequences that the KV cache holds at once


def draw(question: Question, prompts: Sequence[Prompt]) -> VllmSamples:
    """vLLM's responses, and the differences between its weights and the files.  Starts and stops an engine."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    _, table = open_hf(question.hf)
    rollout = RolloutConfig(
        tp=question.rollout.tp,
        ep=question.rollout.ep,
        dtype=question.dtype,
        quantization=question.quantization,
        max_prompt_length=longest,
        max_response_length=question.sampling.max_tokens,
        enforce_eager=True,  # a few hundred tokens: capturing graphs takes longer
        enable_sleep_mode=False,
        # vLLM's CPU build records none (engine/admission.py).
        return_routed_experts=table.model.moe is not None and detect(Device.auto).is_accelerator,
    )
    # Enough for some sequences at once, without taking all memory.
    sequence = sequence_bytes(table.model, rollout, rollout.max_model_len)
    rollout.kv_cache_memory_bytes = max(KV_CACHE_BYTES, NUM_SEQS * sequence)
    with start_engine("vllm", question.hf, rollout, extension=HELD_WEIGHTS) as engine:
        return asyncio.run(_draw(engine, question, prompts))


async def _draw(engine: EngineProcess, question: Question, prompts: Sequence[Prompt]) -> VllmSamples:
    differences_by_rank = await engine.call_workers(
        HeldWeightsMethods.held_differences,
        str(question.hf.resolve()),
        str(question.rollout),
        question.quantization.value,
    )
    greedy = Sampling(max_tokens=question.sampling.max_tokens, temperature=0.0)
    return VllmSamples(
        prompts={prompt.id: prompt for prompt in prompts},
        samples=await _samples(engine, requests_of(prompts, question.n), question.sampling),
        greedy=await _samples(engine, requests_of(prompts, 1), greedy),
        differing=worst(differences_by_rank),
        config=joined(await engine.call_workers(HeldWeightsMethods.held_config)),
    )


async def _samples(engine: EngineProcess, requests: list[Request], sampling: Sampling) -> tuple[Sample, ...]:
    by_key = {(sample.prompt_id, sample.index): sample async for sample in engine.generate(requests, sampling)}
    return tuple(by_key[request.key] for request in requests)
