"""Lets vLLM draw responses, and transformers and Megatron score them, one after another, each in its own processes.

``measure`` does all of it; ``report`` interprets the numbers.  One machine, one model replica: every data-parallel
coordinate of Megatron scores every sequence.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from mcore_rl.checkpoints.convert import HF, open_hf, open_megatron
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.rollout import RolloutConfig, sequence_bytes
from mcore_rl.families.config_json import CONFIG
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.proofs.differences import worst
from mcore_rl.proofs.effective_config import joined
from mcore_rl.reports.question import (
    Answers,
    Question,
    VllmSamples,
    question_violations,
    recorded_routing,
    settings_of,
)
from mcore_rl.reports.report import (
    LIMITS,
    MEGATRON,
    PAIRS,
    TRANSFORMERS,
    VLLM,
    DifferenceLimits,
    Evidence,
    LogprobReport,
    Replay,
    Scored,
    Top1,
    WorstToken,
    exceeded,
    findings,
    largest_differences,
    rounding_report,
    statistics,
    verdict,
)
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.worker_methods import HELD_WEIGHTS, HeldWeightsMethods

CONTEXT_BEFORE = 12  # tokens shown before a worst token
CONTEXT_AFTER = 4
KV_CACHE_BYTES = 256 << 20  # lower limit
NUM_SEQS = 8  # sequences that the KV cache holds at once

UNLIMITED = DifferenceLimits(max_abs=math.inf, mean_abs=math.inf)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The input of ``report``, and the samples behind its rows."""

    scored: Scored
    evidence: Evidence
    top1: Top1
    samples: tuple[Sample, ...]


def measure(question: Question, prompts: Sequence[Prompt], notice: Callable[[str], object]) -> Measured:
    """Draw, score, and compare routing and weights.  notice: called with each step before it begins.

    Raises ConfigError, CheckpointError and RolloutError for what a user can mend, WorkerError if a process dies.
    """
    refuse_if_any(question_violations(question, len(prompts)))
    if question.megatron is not None:
        open_megatron(question.megatron, question.hf).stored.close()  # raises before anything starts
    notice("vLLM draws")
    drawn = draw(question, prompts)
    notice("transformers scores")
    (theirs,) = run_ranks(_transformers, 1, (question, drawn))
    notice(f"Megatron scores as {question.layout}")
    routings = _routings(drawn, theirs[question.dtype].routing_TLK)
    layout = Layout.of(question.layout, question.world_size)
    ranks = run_ranks(_megatron, question.world_size, (question, drawn, routings), layout=layout)
    return _joined(question, drawn, theirs, ranks, routings)


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


def report(
    question: Question,
    measured: Measured,
    tokenizer: Any | None = None,
    *,
    max_abs: float | None = None,
    mean_abs: float | None = None,
) -> LogprobReport:
    """The report on ``measured``.  tokenizer: decodes tokens.  max_abs, mean_abs: other limits than ``LIMITS``."""
    limits = _limits(LIMITS[question.dtype], max_abs, mean_abs)
    evidence = replace(measured.evidence, **_retokenised(measured.samples, tokenizer))
    scored = measured.scored
    pairs = tuple(statistics(first, second, scored) for first, second in PAIRS)
    rounding = rounding_report(scored, evidence)
    causes = findings(scored, evidence, question.dtype.value, rounding)
    # Of vLLM in fp8 no more is demanded than was asked for: what rounding explains is no failure.
    of_vllm = limits if rounding is None else _limits(UNLIMITED, max_abs, mean_abs)
    beyond = tuple(
        message
        for pair in pairs
        for message in exceeded([pair], of_vllm if VLLM in (pair.first, pair.second) else limits)
    )
    if rounding is not None and not rounding.is_explained:
        words = f"more than twice the {rounding.expected_mean:.2e} that rounding makes in {TRANSFORMERS}"
        beyond += (f"{VLLM} and {TRANSFORMERS} in float32: mean {rounding.whole_mean:.2e} is {words}",)
    return LogprobReport(
        settings=settings_of(question) | {"limits": asdict(limits)},
        num_tokens=len(scored.token_N),
        verdict=verdict(pairs, causes),
        findings=causes,
        pairs=pairs,
        top1=measured.top1,
        worst=_worst(measured, tokenizer),
        exceeded=beyond,
        rounding=rounding,
    )


def _limits(usual: DifferenceLimits, max_abs: float | None, mean_abs: float | None) -> DifferenceLimits:
    """``usual``, but for those that were asked for."""
    return DifferenceLimits(
        max_abs=usual.max_abs if max_abs is None else max_abs,
        mean_abs=usual.mean_abs if mean_abs is None else mean_abs,
    )


def _retokenised(samples: Sequence[Sample], tokenizer: Any | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    # Keep special tokens: the token that ends a response is part of it.
    texts = [tokenizer.decode(sample.tokens, skip_special_tokens=False) for sample in samples]
    again = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    differs = sum(tokens != sample.tokens.tolist() for tokens, sample in zip(again, samples, strict=True))
    return {"num_responses": len(samples), "retokenised": differs}


def _worst(measured: Measured, tokenizer: Any | None) -> tuple[WorstToken, ...]:
    scored = measured.scored
    tokens = []
    for row in largest_differences(scored).tolist():
        sample = measured.samples[scored.sample_N[row]]
        position = int(scored.position_N[row])
        logprobs = {name: float(values[row]) for name, values in scored.logprobs.items()}
        tokens.append(
            WorstToken(
                prompt=sample.prompt_id,
                sample=sample.index,
                position=position,
                token=int(scored.token_N[row]),
                text=_around(sample, position, tokenizer),
                difference=max(logprobs.values()) - min(logprobs.values()),
                logprobs=logprobs,
            )
        )
    return tuple(tokens)


def _around(sample: Sample, position: int, tokenizer: Any | None) -> str:
    """The response around a token, with the token in brackets; token ids without a tokenizer."""
    before = sample.tokens[max(0, position - CONTEXT_BEFORE) : position]
    at = sample.tokens[position : position + 1]
    after = sample.tokens[position + 1 : position + 1 + CONTEXT_AFTER]
    if tokenizer is None:
        return " ".join([*map(str, before), f"[{at[0]}]", *map(str, after)])
    return f"{tokenizer.decode(before)}[{tokenizer.decode(at)}]{tokenizer.decode(after)}"


def _routings(drawn: VllmSamples, theirs_TLK: Tensor | None) -> dict[str, Tensor]:
    """The experts that transformers, and vLLM where it records them, chose."""
    if theirs_TLK is None:
        return {}
    recorded_TLK = recorded_routing(drawn, theirs_TLK)
    return {TRANSFORMERS: theirs_TLK} | ({} if recorded_TLK is None else {VLLM: recorded_TLK})


def _share_elsewhere(one_TLK: Tensor, other_TLK: Tensor) -> float:
    """The share of (token, layer) with another set of experts."""
    one, other = (each.long().sort(-1).values for each in (one_TLK, other_TLK))
    return float((one != other).any(-1).double().mean())


def _joined(
    question: Question,
    drawn: VllmSamples,
    theirs: dict[Precision, Answers],
    ranks: list[dict[Precision, Answers]],
    routings: dict[str, Tensor],
) -> Measured:
    reference = theirs[question.dtype]
    ours = ranks[0][question.dtype]
    drawn_logprobs = np.concatenate([sample.logprobs for sample in drawn.samples]).astype(np.float64)
    lengths = [len(sample.tokens) for sample in drawn.samples]
    scored = Scored(
        sample_N=np.repeat(np.arange(len(lengths)), lengths),
        position_N=np.concatenate([np.arange(length) for length in lengths]),
        token_N=np.concatenate([sample.tokens for sample in drawn.samples]).astype(np.int64),
        logprobs={VLLM: drawn_logprobs, TRANSFORMERS: reference.logprobs, MEGATRON: ours.logprobs},
    )
    replays = {}
    if ours.routing_TLK is not None:
        for name, routing_TLK in routings.items():
            share = _share_elsewhere(ours.routing_TLK, routing_TLK)
            replays[name] = Replay(differs=share, logprobs=ours.replayed[name])
    configs = {
        VLLM: drawn.config,
        TRANSFORMERS: reference.config,
        MEGATRON: joined([rank[question.dtype].config for rank in ranks]),
    }
    float32 = {}
    if question.dtype is not Precision.float32:
        whole = Precision.float32
        float32 = {TRANSFORMERS: theirs[whole].logprobs, MEGATRON: ranks[0][whole].logprobs}
    held = worst(rank[question.dtype].differing or {} for rank in ranks)
    evidence = Evidence(
        differing_weights={VLLM: drawn.differing, MEGATRON: held},
        float32=float32,
        sampled_from=reference.sampled_from,
        rounded=theirs[Precision.float32].rounded,
        truncated=question.sampling.truncated,
        replays=replays,
        configs=configs,
        unstated=question.megatron is not None and not (question.megatron / HF / CONFIG).exists(),
    )
    agreement = {TRANSFORMERS: float(reference.is_top1.mean()), MEGATRON: float(ours.is_top1.mean())}
    top1 = Top1(count=len(ours.is_top1), agreement=agreement)
    return Measured(scored=scored, evidence=evidence, top1=top1, samples=drawn.samples)


def _transformers(rank: Rank, question: Question, drawn: VllmSamples) -> dict[Precision, Answers]:
    from mcore_rl.reports import transformers_scorer  # here, so that the parent does not import transformers

    return transformers_scorer.score(question, drawn)


def _megatron(
    rank: Rank, question: Question, drawn: VllmSamples, routings: dict[str, Tensor]
) -> dict[Precision, Answers]:
    warnings.simplefilter("ignore")  # Megatron warns of optional packages
    from mcore_rl.reports import megatron_scorer  # here, so that the parent does not import Megatron

    return megatron_scorer.score(rank, question, drawn, routings)
