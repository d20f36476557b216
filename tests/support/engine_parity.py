"""The engine and transformers on one batch with the same weights: log-probs, entropies, loss, gradients of both sides.

Under tests/gpu, which bounds the differences, and under benchmarks/gpu.py, which writes them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mcore_rl.config.engine import Device, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.types import LossInputs, TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.training.layers import transformer_engine_lacks
from tests.invariance.problems import MODELS, Case, Problem
from tests.support import batches, full_weights, hf_reference
from tests.support.engine_runs import engine_config
from tests.support.full_weights import Weights


@dataclass(frozen=True)
class Setting:
    """How the engine computes, and how far that may be from the reference.

    score: mean error of log-probs and entropies in nats.  worst: their largest error.  loss: relative error.
    gradient: error of each parameter's gradient, relative to its norm.
    """

    precision: Precision
    layer_spec: LayerSpec
    score: float
    worst: float
    loss: float
    gradient: float

    def __str__(self) -> str:
        return f"{self.precision.value}-{self.layer_spec.value}"


FLOAT32 = Setting(Precision.float32, LayerSpec.local, score=1e-5, worst=1e-4, loss=1e-4, gradient=1e-4)
# The loss is a small difference of large terms: 0.03 for gpt_oss, whose error of 4e-4 is 1.2 %, where 0.09 is usual.
# transformers' own bfloat16 is 0.005 nats from its float32 on the dense model, and 0.07 on gpt_oss.
BFLOAT16 = Setting(Precision.bfloat16, LayerSpec.local, score=0.015, worst=0.06, loss=0.02, gradient=0.07)
SETTINGS = (FLOAT32, BFLOAT16, replace(BFLOAT16, layer_spec=LayerSpec.transformer_engine))


@dataclass(frozen=True)
class Found:
    """What one side computed; gradients under Megatron's checkpoint keys."""

    logprobs_T: Tensor
    entropy_T: Tensor
    loss: float
    gradients: Weights


def rounded(name: str, precision: Precision) -> hf_reference.PreTrainedModel:
    """The reference with weights that ``precision`` holds exactly.  Its rotary frequencies stay as they are."""
    reference = hf_reference.build(MODELS[name])
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(getattr(torch, precision.value)))
    return reference


def build_engine(platform: Platform, setting: Setting, name: str, start: Weights, groups: ProcessGroups) -> Engine:
    """An engine whose step leaves weights and gradients as they are: rate 0, no clipping."""
    config = replace(
        engine_config(Case(problem=Problem(model=name)), platform.kind),
        precision=setting.precision,
        layer_spec=setting.layer_spec,
        optim=OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0),
    )
    engine = Engine("actor", MODELS[name], ParallelConfig(), config, groups, platform)
    engine.load_weights(lambda models: full_weights.load_full(models, start))
    return engine


def joined(rank: Rank, platform: Platform) -> ProcessGroups:
    """The groups of a process that runs engines by itself, products in full float32."""
    torch.set_float32_matmul_precision("highest")
    rank.init_process_group(platform)
    return init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)


def engine_side(rank: Rank, kind: Device, setting: Setting, names: Sequence[str]) -> dict[str, Found]:
    """One process: every model, one after another."""
    platform = detect(kind)
    groups = joined(rank, platform)
    results = {name: engine_found(platform, setting, name, groups) for name in names}
    destroy_groups()
    return results


def engine_found(platform: Platform, setting: Setting, name: str, groups: ProcessGroups) -> Found:
    """What the engine computes: a pass of scores, then a step."""
    start = hf_reference.full_weights(rounded(name, setting.precision), MODELS[name])
    batch = batches.ragged(MODELS[name].vocab_size)
    if MODELS[name].moe is not None and setting.precision is not Precision.float32:
        chooser = build_engine(platform, FLOAT32, name, start, groups)
        batch = replace(batch, routing_TLK=chooser.score(batch, record_routing=True).routing_TLK)
    engine = build_engine(platform, setting, name, start, groups)
    scores = engine.score(batch)
    step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
    assert step.skipped is None and scores.logprobs_T is not None and scores.entropy_T is not None
    return Found(scores.logprobs_T, scores.entropy_T, step.loss, gradients_of(engine, start))


def gradients_of(engine: Engine, like: Weights) -> Weights:
    """The float32 gradients of the last step, on the CPU.  The engine is of no use afterwards."""
    for parameter in engine.models[0].parameters():
        parameter.data = parameter.main_grad.float().cpu()
    return full_weights.gather_full(engine.models, like)


@lru_cache
def reference_found(name: str, precision: Precision) -> Found:
    """transformers, one sequence at a time, under autograd."""
    model, reference = MODELS[name], rounded(name, precision)
    batch = batches.ragged(model.vocab_size)
    logprobs, entropies = [], []
    for tokens in batch.tokens_T.split(batch.lengths_S):
        log_p = torch.log_softmax(reference(tokens[None]).logits[0].float(), dim=-1)
        logprobs.append(torch.cat([torch.zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]]))
    logprobs_T, entropy_T = torch.cat(logprobs), torch.cat(entropies)
    loss = batches.policy_loss(loss_inputs(batch, logprobs_T, entropy_T)).total / batches.denominators(batch).loss
    loss.backward()
    gradients = hf_reference.full_weights(reference, model, gradients=True)
    return Found(logprobs_T.detach(), entropy_T.detach(), loss.item(), gradients)


def loss_inputs(batch: TrainBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossInputs:
    """The whole batch as one microbatch of one rank, with a row for each token."""
    return LossInputs(
        mask_N=batch.mask_T,
        sequence_N=torch.arange(len(batch.lengths_S)).repeat_interleave(torch.tensor(batch.lengths_S)),
        num_sequences=len(batch.lengths_S),
        sum_over_context=lambda sums_S: sums_S,
        logprobs_N=logprobs_T,
        entropy_N=entropy_T,
        old_logprobs_N=batch.old_logprobs_T,
        advantages_N=batch.advantages_T,
    )


def models_for(is_accelerator: bool, setting: Setting) -> tuple[str, ...]:
    """All on an accelerator that the layers can be.

    On the CPU, where tests/parity has them all, one of each kind, and none with layers that it cannot run.
    """
    if not is_accelerator:
        return ("dense", "moe", "gemma2") if setting.layer_spec is LayerSpec.local else ()
    if setting.layer_spec is LayerSpec.local:
        return tuple(MODELS)
    return tuple(name for name, model in MODELS.items() if not transformer_engine_lacks(model, ParallelConfig()))


def gradient_errors(ours: Found, theirs: Found) -> dict[str, float]:
    """The error of each gradient of ``ours``, relative to the norm of that of ``theirs``."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    return {key: float((ours.gradients[key] - true).norm() / true.norm()) for key, true in theirs.gradients.items()}
