"""The question that the three scorers of a log-probability report get, and the results that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.config.engine import Precision
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import Quantization, RolloutLayout
from mcore_rl.ground.arrays import Float64Array
from mcore_rl.ground.errors import Violation
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.proofs.differences import Differences
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.rollout.protocol import Prompt, Sample, Sampling

ALL = "all"  # groups of layers together
TIE = 1e-4  # logits this close to the largest count as largest: in bfloat16 many are equal


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to compare.

    hf: the directory of vLLM's and transformers' weights.  megatron: a checkpoint for Megatron; None: ``hf`` too.
    layout, rollout: of Megatron and of vLLM.  dtype: of all three.  n: responses per prompt.
    quantization: of vLLM's matrices.
    """

    hf: Path
    megatron: Path | None = None
    layout: ParallelConfig
    rollout: RolloutLayout
    dtype: Precision = Precision.float32
    sampling: Sampling
    n: int = 1
    quantization: Quantization = Quantization.none

    @property
    def world_size(self) -> int:
        """Number of Megatron's processes: one replica."""
        p = self.layout
        return lcm(p.tp * p.cp * p.pp, p.etp * p.ep * p.pp)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of transformers and Megatron: the dtype, and float32."""
        return tuple(dict.fromkeys((self.dtype, Precision.float32)))


@dataclass(frozen=True, kw_only=True)
class VllmSamples:
    """vLLM's results.

    samples: drawn as the question asks.  greedy: one greedy sample per prompt.  differing: differences between its
    weights and the files.  config: what its model computes with.
    """

    prompts: Mapping[str, Prompt]
    samples: tuple[Sample, ...]
    greedy: tuple[Sample, ...]
    differing: Differences
    config: EffectiveConfig


@dataclass(frozen=True, kw_only=True)
class RoundedScores:
    """transformers' log-probs in float32, with the matrices of some layers as an engine in fp8 has them.

    weights: those are dequantised.  activations: besides, what they multiply is rounded as in the engine.
    """

    weights: Float64Array
    activations: Float64Array


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one model says in one precision: float32 values of the response tokens, sequence after sequence.

    logprobs: of the samples.  sampled_from: the same under other distributions, by description.
    is_top1: whether each token of the greedy samples is the likeliest here too.
    routing_TLK: expert choices for the samples' tokens, prompts too, int16; None without experts.
    replayed: log-probs with the expert choices of other scorers, by scorer.
    rounded: log-probs after the rounding of vLLM's quantisation, by group of layers.
    differing: differences between the weights and the files.  config: what the model, or this rank's part of it,
    computes with.
    """

    logprobs: Float64Array
    is_top1: NDArray[np.bool_]
    sampled_from: dict[str, Float64Array]
    routing_TLK: Tensor | None = None
    replayed: dict[str, Float64Array] = field(default_factory=dict)
    rounded: dict[str, RoundedScores] = field(default_factory=dict)
    differing: Differences | None = None
    config: EffectiveConfig = field(default_factory=dict)


def question_violations(question: Question, num_prompts: int) -> list[Violation]:
    """The violations of ``question`` that can be known before anything starts."""
    _, table = open_hf(question.hf)
    violations = layout_violations(table.model, question.layout, question.world_size)
    if question.rollout.dp != 1:
        remedy = "Write rollout.dp=1; other replicas hold the same"
        violations.append(Violation("rollout.dp", question.rollout.dp, "one engine answers", remedy))
    if question.sampling.temperature <= 0:
        problem = "greedy tokens have no distribution to compare"
        violations.append(Violation("temperature", question.sampling.temperature, problem, "Write 1.0"))
    if question.n < 1 or num_prompts < 1:
        violations.append(Violation("samples", question.n, "must be positive", "Write 1 or more"))
    return violations


def batch_of(samples: Sequence[Sample], prompts: Mapping[str, Prompt], routing_TLK: Tensor | None = None) -> TrainBatch:
    """Prompts and responses end to end; the mask is True for responses."""
    sequences = [[*prompts[sample.prompt_id].tokens, *sample.tokens.tolist()] for sample in samples]
    mask = [[False] * len(prompts[s.prompt_id].tokens) + [True] * len(s.tokens) for s in samples]
    return TrainBatch(
        lengths_S=tuple(map(len, sequences)),
        tokens_T=torch.tensor(list(chain.from_iterable(sequences))),
        mask_T=torch.tensor(list(chain.from_iterable(mask))),
        routing_TLK=routing_TLK,
    )


def recorded_routing(drawn: VllmSamples, other_TLK: Tensor | None) -> Tensor | None:
    """The experts that vLLM chose for the samples' tokens, prompts too, [T, L, K]; None where it recorded none.

    It never processes the last token of a response, whose choices change no log-prob: those are ``other_TLK``'s.
    """
    if other_TLK is None or any(sample.experts is None for sample in drawn.samples):
        return None
    routing_TLK = other_TLK.clone()
    begin = 0
    for sample in drawn.samples:
        assert sample.experts is not None
        end = begin + len(drawn.prompts[sample.prompt_id].tokens) + len(sample.tokens)
        routing_TLK[begin : end - 1] = torch.from_numpy(sample.experts.astype(np.int16))
        begin = end
    return routing_TLK


def floats(values: Tensor) -> Float64Array:
    """``values`` as float64 on the host."""
    return values.double().cpu().numpy()


def settings_of(question: Question) -> dict[str, Any]:
    """The question as a dictionary for the report's JSON."""
    sampling = asdict(question.sampling)
    return {
        "hf": str(question.hf),
        "megatron": None if question.megatron is None else str(question.megatron),
        "layout": str(question.layout),
        "rollout": str(question.rollout),
        "dtype": question.dtype.value,
        "quantization": question.quantization.value,
        "samples": question.n,
        **{key: value for key, value in sampling.items() if value not in ((), False)},
    }
