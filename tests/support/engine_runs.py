"""Runs one case of the gate on the ranks of a process group, and gathers what every layout must agree on."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from mcore_rl.algorithms.outcome_loss import outcome_loss
from mcore_rl.algorithms.policy import ActorLoss, policy_loss
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.algorithms.prime import ProcessRewardConfig
from mcore_rl.config.engine import (
    Device,
    EngineConfig,
    LayerSpec,
    MoeTrainConfig,
    OptimizerConfig,
    OptimizerKind,
    Precision,
    Schedule,
    SharePrompts,
)
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.role import Head
from mcore_rl.data.pairs import units_of
from mcore_rl.ground.types import Denominators, TokenScores, TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import phase
from mcore_rl.training import engine as engine_module
from mcore_rl.training.engine import Engine, Loss
from mcore_rl.training.microbatch import rows_per_context_rank
from mcore_rl.training.offload import Offload, OffloadPart
from tests.invariance.problems import MODELS, Case, Problem
from tests.support import adapters, batches, full_weights, hf_reference, picture_models
from tests.support.full_weights import Weights
from tests.support.late_copies import LateCopies
from tests.support.sabotage import SABOTAGE
from tests.support.settings import actor_config

STEPS = 2
SMALL_BUCKET = 2000  # elements: several buckets of a tiny model


@dataclass
class Result:
    """What one case computed, in the order of the global batch; the same on every rank."""

    scores: dict[str, torch.Tensor]
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    gradients: Weights = field(default_factory=dict)  # of adapters, in the first step


def adapted(problem: Problem) -> LoraConfig:
    """Settings of the adapters of a problem."""
    return replace(adapters.LORA, target_modules=list(problem.adapts))


def starting_weights(problem: Problem) -> Weights:
    """The seeded weights from which all cases of a problem start."""
    model = MODELS[problem.model]
    weights = hf_reference.full_weights(hf_reference.build(model), model)
    if problem.pictured:
        weights |= picture_models.tower_weights(model)
    if problem.head is Head.value:
        weights["output_layer.weight"] = 0.1 * torch.randn(
            1, model.hidden_size, generator=torch.Generator().manual_seed(3)
        )
    if problem.lora:
        of_adapters = adapters.drawn(adapters.adapter_table(model, adapted(problem), head=problem.head))
        of_adapters.pop(adapters.SCORE, None)  # under Megatron's name it is there already
        weights |= of_adapters
    return weights


def engine_config(case: Case, device: Device = Device.cpu) -> EngineConfig:
    """Settings of a case.  A large rate and little epsilon, so that wrong gradients show in the weights at once."""
    problem = case.problem
    return EngineConfig(
        device=device,
        precision=Precision.float32,
        layer_spec=LayerSpec.local,
        recompute=case.recompute,
        microbatch_tokens=case.microbatch_tokens,
        microbatch_sequences=case.microbatch_sequences,
        share_prompts=SharePrompts.auto if case.shared else SharePrompts.off,
        overlap_grad_reduce=case.overlap,
        megatron=dict(case.megatron),
        moe=MoeTrainConfig(
            dispatcher=case.dispatcher,
            aux_loss=problem.aux,
            aux_loss_coeff=0.1 if problem.aux.value != "none" else 0.0,
            z_loss_coeff=problem.z,
        ),
        optim=OptimizerConfig(
            optimizer=OptimizerKind.muon if problem.muon else OptimizerKind.adamw,
            lr=1e-2, eps=1e-5, weight_decay=0.1, clip_grad=0.5,
            lr_schedule=Schedule.cosine, lr_warmup_steps=1, total_steps=5, min_lr_ratio=0.1,
        ),
    )  # fmt: skip


def global_batch(problem: Problem) -> TrainBatch:
    """The one batch of all cases; with replay, experts at random for all tokens but the last of each and a fifth."""
    model = MODELS[problem.model]
    if problem.pictured:
        batch = picture_models.ragged(model)
    else:
        batch = (batches.prompted if problem.prompted else batches.ragged)(model.vocab_size)
    if problem.head is Head.lm:
        # Numbers of a fifth of all tokens are not negative, and of untrained ones as much: nothing may come of these.
        selection_T = torch.rand(batch.tokens_T.numel(), generator=torch.Generator().manual_seed(8)) - 0.8
        batch = replace(batch, selection_T=selection_T)
    if problem.weighed is not None:
        # The log-probs of these weights are about those of an even choice; so some responses weigh more than 1.
        noise_T = torch.randn(batch.tokens_T.numel(), generator=torch.Generator().manual_seed(10))
        batch = replace(batch, rollout_logprobs_T=0.1 * noise_T - math.log(model.vocab_size) - 0.25)
    if problem.paired:
        batch = batches.paired(batch if problem.scores is None else batches.scored(batch))
    if problem.steps:
        batch = batches.with_steps(batch)
    if problem.outcomes:
        batch = batches.with_outcomes(batch)
    if problem.distill is not None:
        batch = batches.taught(batch)
    if not problem.replay:
        return batch
    assert model.moe is not None
    unrouted_T = torch.rand(batch.tokens_T.numel(), generator=torch.Generator().manual_seed(10)) < 0.2
    unrouted_T[torch.tensor(batch.lengths_S).cumsum(0) - 1] = True
    batch = replace(batch, routing_TLK=batches.routes(batch, model), unrouted_T=unrouted_T)
    return batches.routed_alike(batch) if problem.prompted else batch


def members_of(batch: TrainBatch, groups: ProcessGroups) -> list[int]:
    """Sequences of this rank's data-parallel coordinate, whole pairs."""
    units = units_of(batch.pairs_S or [None] * len(batch.lengths_S))
    return sorted(member for unit in units[groups.coords.dp :: groups.layout.dp] for member in unit)


def gather_scores(scores: TokenScores, batch: TrainBatch, groups: ProcessGroups) -> dict[str, torch.Tensor]:
    """Every rank's scores in the order of the global batch; peers must agree bit for bit."""
    named = {"logprobs": scores.logprobs_T, "entropy": scores.entropy_T, "values": scores.values_T}
    mine = {name: tensor for name, tensor in named.items() if tensor is not None}
    pickled = [b""] * dist.get_world_size()
    dist.all_gather_object(pickled, pickle.dumps((members_of(batch, groups), mine)))
    everyone: list[tuple[list[int], dict[str, torch.Tensor]]] = list(map(pickle.loads, pickled))
    whole = {name: torch.full((batch.tokens_T.numel(),), float("nan")) for name in mine}
    starts = batch.offsets_S
    for members, parts in everyone:
        for name, part in parts.items():
            at = 0
            for member in members:
                length = batch.lengths_S[member]
                place = whole[name][starts[member] : starts[member] + length]
                value = part[at : at + length]
                assert place.isnan().all() or torch.equal(place, value), f"peers disagree on {name}"
                place.copy_(value)
                at += length
    return whole


def run_case(case: Case, platform: Platform, start: Weights, rank: int) -> Result:
    """Score, then two optimizer steps; groups are made and destroyed."""
    parallel = parse_layout(case.layout)
    parallel.pipeline_layers = list(case.pipeline_layers) if case.pipeline_layers else None
    groups = init_groups(
        Layout.of(parallel, dist.get_world_size()), platform, device_of(platform, rank), seed=1
    )  # fmt: skip
    try:
        return _run_in_groups(case, parallel, groups, platform, start)
    finally:
        del groups
        destroy_groups()


def _run_in_groups(
    case: Case, parallel: ParallelConfig, groups: ProcessGroups, platform: Platform, start: Weights
) -> Result:
    model, problem = MODELS[case.problem.model], case.problem
    engine_module.BUCKET_ELEMENTS = SMALL_BUCKET if case.overlap else None
    table = None
    if problem.lora:
        table = adapters.adapter_table(model, adapted(problem), parallel, groups.layout.world_size, problem.head)
    engine = Engine(
        "critic" if problem.head is Head.value else "actor",
        model, parallel, engine_config(case, platform.kind), groups, platform, head=problem.head, adapters=table,
        train_tower=not problem.frozen_tower,
    )  # fmt: skip
    engine.fills_microbatches = case.filled
    base = {name: tensor for name, tensor in start.items() if not name.startswith(adapters.PEFT)}
    full_weights.gather_full(engine.models, base)  # fails where ranks start from different weights
    engine.load_weights(lambda models: full_weights.load_full(models, base))
    if table is not None:
        adapters.gather(engine, table)
        of_adapters = start | {adapters.SCORE: start.get("output_layer.weight")}
        engine.load_weights(lambda models: adapters.load(models, table, groups.rank, of_adapters))
    if problem.distill is not None and groups.is_last_stage:
        engine.teacher = batches.teacher(model.vocab_size, tp=groups.layout.tp, rank=groups.coords.tp)
    if case.sabotage is not None:
        SABOTAGE[case.sabotage](engine)
    batch = global_batch(problem)
    mine = batch.select(members_of(batch, groups))
    if case.shared:
        assert any(each.shared for each in engine._microbatches(mine)), f"{case} shares nothing"
    if case.filled:
        full = rows_per_context_rank(case.microbatch_tokens, groups) * groups.layout.cp
        assert {each.width for each in engine._microbatches(mine)} == {full}
    scores = engine.score(mine, temperature=problem.temperature)
    result = Result(scores=gather_scores(scores, batch, groups))
    if problem.weighed is not None:
        mine = batches.weighed(mine, scores, problem.weighed)
    loss, counts = _loss(problem, batches.denominators(batch))
    for number in range(STEPS):
        step = engine.train_step(
            mine,
            loss,
            counts,
            temperature=problem.temperature,
            with_entropy=problem.head is Head.lm,
            distill=loss.distill if isinstance(loss, ActorLoss) else None,
            with_scores=number == 0 and problem.head is Head.lm,
        )
        if step.scores is not None:  # the same weights, microbatches and operations: the same bits
            for name in ("logprobs_T", "entropy_T"):
                own_T, scored_T = getattr(step.scores, name), getattr(scores, name)
                assert torch.equal(own_T, scored_T), f"an update's own {name} are others than its replica of score's"
        assert step.skipped is None
        if table is not None and number == 0:
            result.gradients = adapters.gather_gradients(engine, table)
        if case.overlap and number == 0:
            _leave_and_return(engine)
        result.loss.append(step.loss)
        result.grad_norm.append(step.grad_norm)
        result.metrics.append(step.metrics | step.maxima)
    result.weights = full_weights.gather_full(engine.models, base)
    if table is not None:
        result.weights |= {name: each for name, each in adapters.gather(engine, table).items() if name in start}
    return result


def _loss(problem: Problem, counts: Denominators) -> tuple[Loss, Denominators]:
    """The loss of a problem, and what its sums are divided by.  counts: for a mean over tokens."""
    if problem.paired:
        counts = replace(counts, loss=batches.NUM_PAIRS)
    if problem.preference is not None:
        return batches.preference_loss(problem.preference), counts
    if problem.scores is not None:
        return batches.scores_loss(problem.scores), counts
    if problem.outcomes:
        return outcome_loss(ProcessRewardConfig(beta=0.3)), replace(counts, loss=batches.NUM_RESPONSES)
    if problem.weighed is not None:
        return policy_loss(actor_config()), counts
    if problem.distill is not None:
        return ActorLoss(actor_config(), DistillConfig(coef=0.7, divergence=problem.distill, jsd_beta=0.3)), counts
    return batches.value_loss if problem.head is Head.value else batches.policy_loss, counts


def _leave_and_return(engine: Engine) -> None:
    """Everything goes to host memory and comes back over a slow link, the optimizer's state behind the next step."""
    optimizer = [OffloadPart.optimizer]
    engine.memory = Offload(engine.models, engine.chunks, engine.optimizer, engine.platform, LateCopies())
    engine.memory.offload(behind=optimizer)
    engine.memory.onload(behind=optimizer)


def run_cases(rank: Rank, cases: list[Case], starts: dict[Problem, Weights]) -> list[Result | str | None]:
    """Every case, one after another, in one process group; results from rank 0.

    Ranks that should agree and do not fail the run; of a sabotaged case the message is its result.
    """
    platform = detect(Device.cpu)
    torch.set_num_threads(1)
    rank.init_process_group(platform)
    results: list[Result | str | None] = []
    for case in cases:
        with phase(str(case)):
            try:
                result: Result | str = run_case(case, platform, starts[case.problem], rank.rank)
            except AssertionError as error:
                if case.sabotage is None:
                    raise
                result = str(error)
        results.append(result if rank.rank == 0 else None)
    return results
