"""The loop: one step of reinforcement learning after the other; ``train_step`` is a step on one screen.

Below it are the stages of a step (``config/step_plan.py``): each reads what earlier ones made, and makes the next
thing.  Everything that lives longer than a step is in ``Run``.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.config.engine import SharePrompts
from mcore_rl.config.role import moves_after
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import (
    ADVANTAGES,
    OUTCOMES,
    Estimate,
    OnController,
    OnRanks,
    Pass,
    StepStage,
    Update,
    is_field,
    load_function,
)
from mcore_rl.config.step_plan import reads_outcomes
from mcore_rl.controller.rollouts.recording import scheduled_step
from mcore_rl.controller.run import Run
from mcore_rl.controller.step import contexts, updates
from mcore_rl.controller.step.advantages import StepAdvantages, estimate_step
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.metrics import (
    memory_metrics,
    own_metrics,
    picture_metrics,
    sample_metrics,
    score_metrics,
    staleness_metrics,
    update_metrics,
)
from mcore_rl.controller.step.pairing import in_pairs
from mcore_rl.controller.step.pixels import StepPictures, step_pictures
from mcore_rl.controller.step.updates import Updated
from mcore_rl.controller.step.utilization import step_passes, tflop
from mcore_rl.controller.training_run import every_step
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.rows import named
from mcore_rl.ground.errors import DataError
from mcore_rl.rollout.episodes import Episode
from mcore_rl.runtime.shared_batch import SharedBatch


async def train(run: Run) -> None:
    """All steps, from engines that hold the weights to begin with.  Raises as ``every_step``."""
    run.sharing = await _who_shares(run)
    gc.freeze()  # what is there now stays: Python's collector would walk a million objects in every step, for 0.25 s
    run.tracker.now("weights to the engines")
    await run.devices.to_engines(run.progress.step)
    async with run.elastic, run.rollouts:
        await every_step(run, train_step)


async def _who_shares(run: Run) -> frozenset[str]:
    """The roles whose engines share prompts; those of ``share_prompts=auto`` say so."""
    configs = {role.name: run.config.role_config(role) for role in run.config.group_rows}
    asked = [name for name, each in configs.items() if each.share_prompts is not SharePrompts.off]
    return frozenset([name for name in asked if await run.groups[name].shares_prompts()])


async def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: the engines begin with the weights of the step before, and end with those of this one."""
    config = run.config
    clock = run.clock

    run.tracker.now("drawing")
    with clock("generate"):
        rollouts = await run.preemption.cancel_if_asked(run.rollouts.next(step))
    trained = in_pairs(rollouts.episodes, config.algorithm)
    groups = assemble(
        trained.episodes,
        rollouts.greedy,
        config.algorithm.reward_parts,
        with_outcomes=reads_outcomes(config),
        teachers=config.teachers,
        pictures=config.sees_pictures,
    )
    place = run.keep_rollouts(step, rollouts, sum(groups.batch.lengths_S))

    with clock("sync"):
        await run.devices.to_trainer()
    run.tracker.now("log-probs")
    prompts = config.data.train_batch_size
    seed = config.data.seed + step
    minibatches = {
        role.name: updates.minibatches(groups.group_S, config.trained_config(role), prompts, seed)
        for role in config.trained_rows
    }
    metrics = sample_metrics(rollouts) | staleness_metrics(rollouts.episodes, step) | trained.metrics
    metrics |= picture_metrics(groups.batch)
    policy = config.policy.name
    shares = policy in run.sharing
    with clock(config.policy.phase):
        seen = await _pictures(run, trained.episodes) if config.sees_pictures else None
        shared = updates.send(run.groups[policy], groups.batch, minibatches[policy], seen, share_prompts=shares)
    state = StepState(step=step, shared=shared, groups=groups, minibatches=minibatches, episodes=trained.episodes)
    plan = run.plan(step)
    for stage in plan:
        metrics |= await run_stage(run, stage, state)

    updated = {role.name: state.updated.get(role.name, Updated()) for role in config.trained_rows}
    for role in config.trained_rows:
        metrics |= update_metrics(role, run.losses[role.name], updated[role.name])
    of_policy = updated[policy]
    if of_policy.own is not None:
        metrics |= own_metrics(policy, of_policy.own, of_policy.trained[0])
    metrics |= memory_metrics(of_policy.memories, run.on_accelerator)
    metrics |= {"perf/balance": of_policy.imbalance, "progress/epoch": run.epoch}
    if shares:
        metrics["perf/shared_prompts"] = of_policy.shared
    counts = {name: len(each.results) for name, each in updated.items()}
    passes = step_passes(config, plan, run.prepared.models, counts, in_context=state.in_context, sharing=run.sharing)
    metrics |= tflop(shared.lengths_S, passes, shared.stems, shared.images_S)

    with clock("generate"):
        await run.rollouts.settle(run.preemption)
    assert state.advantages is not None, "every step estimates advantages"
    tokens = trained.of_drawn(state.advantages.trained_S, len(rollouts.episodes))
    await run.recorder.end(step)  # before the line of the ledger, which promises the record
    run.tracker.schedule(scheduled_step(config, step, rollouts, place, tokens, counts, run.prepared.settings_sum))
    run.tracker.now("weights to the engines")
    with clock("sync"):
        await run.devices.to_engines(step)
    return metrics


async def _pictures(run: Run, episodes: Sequence[Episode]) -> StepPictures:
    """The pictures of the episodes' rows, in Ray's store.

    DataError: a picture cannot be read, or is another one than was drawn with.
    """
    train = run.prepared.train
    shelf = run.prepared.shelf
    assert train is not None and shelf is not None, "a step trains rows"
    media = {each.row.number: each.row.media for each in episodes}
    changed = [each.row.id for each in episodes if not _keys(each.media) <= _keys(each.row.media)]
    if changed:
        problem = f"{named(list(dict.fromkeys(changed)))}: drawn with other pictures than the files hold now"
        raise DataError(train.title, [f"{problem}. Bring back the files of then, or begin the run anew"])
    policy = run.config.policy.name

    def read(number: int, place: int) -> NDArray[np.uint8]:
        return shelf.patches(media[number][place].image.sha256)

    learns = run.config.actor.trains_tower
    return await step_pictures(run.groups[policy], read, media, run.prepared.models[policy], trained=learns)


def _keys(media: Sequence[Placed]) -> set[str]:
    return {each.image.sha256 for each in media}


@dataclass(kw_only=True)
class StepState:
    """What the stages of one step share.

    shared: the fields of the batch, in the store.  groups: what the controller knows of its sequences.
    minibatches: the sequences of each optimizer step, by trained role.
    episodes: the sequences of the batch, in its order.
    values: what stages made on the controller, by name.
    updated: the updates so far, by role.
    in_context: each pass so far behind other prompts, with the tokens of its sequences.
    """

    step: int
    shared: SharedBatch
    groups: StepBatch
    minibatches: Mapping[str, Sequence[Sequence[int]]]
    episodes: Sequence[Episode] = ()
    values: dict[str, Any] = field(default_factory=dict)
    updated: dict[str, Updated] = field(default_factory=dict)
    in_context: list[tuple[Pass, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values.setdefault(OUTCOMES, self.groups.outcomes)

    @property
    def advantages(self) -> StepAdvantages | None:
        """What updates are weighed with; None before they are estimated."""
        return self.values.get(ADVANTAGES)


async def run_stage(run: Run, stage: StepStage, state: StepState) -> dict[str, float]:
    """Runs one stage, in the phase of ``time/*`` that it names; returns its metrics."""
    match stage:
        case Pass():
            return await _score(run, stage, state)
        case OnRanks():
            with run.clock(stage.phase):
                return await _on_ranks(run, stage, state)
        case OnController():
            with run.clock(stage.phase):
                return _on_controller(run, stage, state)
        case Estimate():
            with run.clock(stage.phase):
                return await _estimate(run, state)
        case Update():
            return await _update(run, stage, state)


async def _score(run: Run, stage: Pass, state: StepState) -> dict[str, float]:
    group = run.groups[stage.group]
    config = run.config
    shared = state.shared
    into = None
    metrics = dict[str, float]()
    with run.clock(stage.phase):
        if stage.context is not None:
            reader = config.role_config(config.row(stage.group))
            positions = run.prepared.models[stage.group].max_position_embeddings
            told = contexts.told(state.episodes, stage.context, run.tokenizer, config, reader, positions)
            into = shared
            shared = updates.send_whole(group, assemble(told.episodes).batch)
            state.in_context.append((stage, shared.lengths_S))
            metrics[f"{stage.role}/in_context"] = told.share
        scores = await updates.run_pass(
            group,
            shared,
            stage,
            temperature=_temperature(config, stage),
            teachers=config.teachers,
            into=into,
            share_prompts=stage.group in run.sharing,
        )
        if stage.rests:
            await group.rest()
    return metrics | score_metrics(stage.role, scores, state.groups.num_trained)


async def _on_ranks(run: Run, stage: OnRanks, state: StepState) -> dict[str, float]:
    ranks = state.shared.assignment
    shared = state.shared
    values = {name: state.values[name] for name in stage.reads if name in state.values}
    payloads = [{name: value[members] for name, value in values.items()} for members in ranks]
    inputs = shared.shard_refs([[members] for members in ranks], stage.reads, payloads)
    made, shards = await run.policy.on_ranks(inputs, load_function(stage.function), run.config)
    if fields := [name for name in stage.makes if is_field(name)]:
        shared.add(ranks, shards, fields)
    for name in stage.makes:
        if not is_field(name):
            state.values[name] = shared.in_order(ranks, [each[name] for each in made])
    return {}


def _on_controller(run: Run, stage: OnController, state: StepState) -> dict[str, float]:
    made, metrics = load_function(stage.function)(state.values, state.groups, run.config)
    state.values |= made
    return dict(metrics)


async def _estimate(run: Run, state: StepState) -> dict[str, float]:
    advantages = await estimate_step(
        run.policy, state.shared, state.groups, state.values[OUTCOMES], run.config.algorithm, run.kl
    )
    state.values[ADVANTAGES] = advantages
    return advantages.metrics


async def _update(run: Run, stage: Update, state: StepState) -> dict[str, float]:
    """Its metrics come at the end of the step, in ``train_step``."""
    if not state.updated:
        run.preemption.raise_if_asked()  # from here on the step changes what a checkpoint holds
    group = run.groups[stage.role]
    config = run.config
    snapshots = run.config.snapshots_of(stage.role)
    advantages = state.advantages if ADVANTAGES in stage.reads else None
    run.tracker.now(f"training the {stage.role}")
    with run.clock(stage.phase):
        state.updated[stage.role] = await updates.update(
            group,
            state.shared,
            run.losses[stage.role],
            config.trained_config(config.row(stage.role)),
            state.minibatches[stage.role],
            advantages or StepAdvantages.without(state.groups),
            reads=stage.reads,
            temperature=_temperature(config, stage),
            reference=snapshots[0].snapshot if snapshots else None,
            seed=config.data.seed + state.step,
            with_scores=stage.scores,
            share_prompts=stage.role in run.sharing,
        )
        for frozen in snapshots:
            if moves_after(frozen.moves, state.step):
                assert frozen.snapshot is not None
                await group.move_snapshot(frozen.snapshot)
    return {}


def _temperature(config: RunConfig, stage: Pass | Update) -> float:
    """At which the log-probs of ``stage`` are: that of the sampling, but for models that reward."""
    return config.rollout.temperature if stage.sampled else 1.0
