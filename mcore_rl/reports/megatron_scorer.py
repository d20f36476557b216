"""Megatron's side of a log-probability report.  It imports Megatron, so it runs in its own processes only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.config.engine import Device, EngineConfig, Precision
from mcore_rl.ground.arrays import Float64Array
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import phase
from mcore_rl.proofs.differences import module_differences
from mcore_rl.reports.question import TIE, Answers, Question, VllmSamples, batch_of, floats
from mcore_rl.training.checkpoint import load_megatron
from mcore_rl.training.effective_config import effective_config
from mcore_rl.training.engine import Engine
from mcore_rl.weights.table import Table

MICROBATCH_TOKENS = 4096
COLD = TIE / 10  # a temperature so low that the log-prob of the likeliest token is near 0, and of others far below
COLD_LOGPROB = -10.0


def score(
    rank: Rank, question: Question, drawn: VllmSamples, routings: Mapping[str, Tensor]
) -> dict[Precision, Answers]:
    """Score on one rank of Megatron: a pass in each precision, equal on every rank but for ``differing``, ``config``.

    routings: the expert choices of other scorers, to replay, [T, L, K] each; empty without experts.
    """
    platform = detect(Device.auto)
    rank.init_process_group(platform)
    layout = Layout.of(question.layout, rank.world_size)
    groups = init_groups(layout, platform, device_of(platform, rank.rank), seed=0)
    passes = {}
    for precision in question.precisions:
        with phase("Megatron", dtype=precision.value):
            passes[precision] = _megatron_pass(groups, platform, precision, question, drawn, routings)
    destroy_groups()
    return passes


def _megatron_pass(
    groups: ProcessGroups,
    platform: Platform,
    precision: Precision,
    question: Question,
    drawn: VllmSamples,
    routings: Mapping[str, Tensor],
) -> Answers:
    batch = batch_of(drawn.samples, drawn.prompts)
    greedy = batch_of(drawn.greedy, drawn.prompts)
    longest = max(*batch.lengths_S, *greedy.lengths_S)
    config = EngineConfig(precision=precision, microbatch_tokens=max(MICROBATCH_TOKENS, 2 * longest))
    checkpoint, plain = open_hf(question.hf)
    table = Table(plain.family, plain.model, question.layout, question.world_size)
    engine = Engine("actor", plain.model, question.layout, config, groups, platform, trainable=False)
    if question.megatron is None:
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=groups.rank))
    else:
        engine.load_weights(partial(load_megatron, directory=question.megatron, model=plain.model))
    scores_of = partial(engine.score, with_entropy=False)
    temperature = question.sampling.temperature
    scores = scores_of(batch, temperature=temperature, record_routing=bool(routings))
    replayed = {}
    for name, routing_TLK in routings.items():
        again = batch_of(drawn.samples, drawn.prompts, routing_TLK)
        replayed[name] = _responses(scores_of(again, temperature=temperature).logprobs_T, again)
    cold = _responses(scores_of(greedy, temperature=COLD).logprobs_T, greedy)
    return Answers(
        logprobs=_responses(scores.logprobs_T, batch),
        is_top1=cold > COLD_LOGPROB,
        sampled_from={},
        routing_TLK=scores.routing_TLK,
        replayed=replayed,
        differing=module_differences(engine.models, table, groups.rank, checkpoint),
        config=effective_config(engine.models, plain.model),
    )


def _responses(logprobs_T: Tensor | None, batch: TrainBatch) -> Float64Array:
    assert logprobs_T is not None, "an actor has log-probs"
    return floats(logprobs_T[batch.mask_T])
