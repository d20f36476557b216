"""What the three scorers of a log-probability report are asked, and what each of them answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.arrays import Float64Array
from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.config.engine import Precision
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.errors import Violation
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.proofs.differences import Differences
from mcore_rl.rollout.protocol import Prompt, Sample, Sampling
from mcore_rl.types import TrainBatch

TIE = 1e-4  # logits this close to the largest are the largest: bfloat16 has many that are equal


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compared.

    hf: the directory of vLLM's and transformers' weights, and of Megatron's unless ``megatron``
    names a checkpoint of its own.  dtype: of all three.  n: responses of each prompt.
    """

    hf: Path
    megatron: Path | None = None
    layout: ParallelConfig
    rollout: RolloutLayout
    dtype: Precision = Precision.float32
    sampling: Sampling
    n: int = 1

    @property
    def world_size(self) -> int:
        """Megatron's processes: one replica."""
        p = self.layout
        return lcm(p.tp * p.cp * p.pp, p.etp * p.ep * p.pp)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What transformers and Megatron compute in: the dtype, and float32 beside it."""
        return tuple(dict.fromkeys((self.dtype, Precision.float32)))


@dataclass(frozen=True, kw_only=True)
class VllmSamples:
    """vLLM's side.  samples: as asked for.  greedy: one of each prompt.  differing: of the weights that it held."""

    prompts: Mapping[str, Prompt]
    samples: tuple[Sample, ...]
    greedy: tuple[Sample, ...]
    differing: Differences


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One model in one precision: float32 values of the response tokens, sequence after sequence.

    logprobs, sampled_from: of the drawn samples.  is_top1: of the greedy ones.  routing_TLK: of the samples' tokens,
    prompts too, int16; None without experts.  replayed: log-probs with the other's choices.  differing: weights.
    """

    logprobs: Float64Array
    is_top1: NDArray[np.bool_]
    sampled_from: dict[str, Float64Array]
    routing_TLK: Tensor | None = None
    replayed: Float64Array | None = None
    differing: Differences | None = None


def question_violations(question: Question, num_prompts: int) -> list[Violation]:
    """What keeps the three from answering, as far as it is known before anything starts."""
    _, table = open_hf(question.hf)
    found = layout_violations(table.model, question.layout, question.world_size)
    if question.rollout.dp != 1:
        remedy = "Write rollout.dp=1; other replicas hold the same"
        found.append(Violation("rollout.dp", question.rollout.dp, "one engine answers", remedy))
    if question.sampling.temperature <= 0:
        problem = "greedy tokens have no distribution to compare"
        found.append(Violation("temperature", question.sampling.temperature, problem, "Write 1.0"))
    if question.n < 1 or num_prompts < 1:
        found.append(Violation("samples", question.n, "must be positive", "Write 1 or more"))
    return found


def batch_of(samples: Sequence[Sample], prompts: Mapping[str, Prompt], routing_TLK: Tensor | None = None) -> TrainBatch:
    """Prompts and responses end to end; the responses are what is masked in."""
    sequences = [[*prompts[sample.prompt_id].tokens, *sample.tokens.tolist()] for sample in samples]
    mask = [[False] * len(prompts[s.prompt_id].tokens) + [True] * len(s.tokens) for s in samples]
    return TrainBatch(
        lengths_S=tuple(map(len, sequences)),
        tokens_T=torch.tensor(list(chain.from_iterable(sequences))),
        mask_T=torch.tensor(list(chain.from_iterable(mask))),
        routing_TLK=routing_TLK,
    )


def floats(values: Tensor) -> Float64Array:
    """``values`` as statistics want them: float64 on the host."""
    return values.double().cpu().numpy()


def settings_of(question: Question) -> dict[str, Any]:
    """The question, for the report's JSON."""
    sampling = asdict(question.sampling)
    return {
        "hf": str(question.hf),
        "megatron": None if question.megatron is None else str(question.megatron),
        "layout": str(question.layout),
        "rollout": str(question.rollout),
        "dtype": question.dtype.value,
        "samples": question.n,
        **{key: value for key, value in sampling.items() if value not in ((), False)},
    }
