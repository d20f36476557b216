"""Runs the stages of a step (``config/step_plan.py``): each reads what earlier ones made, and makes the next thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.config.role import moves_after
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
from mcore_rl.controller.step import contexts, updates
from mcore_rl.controller.step.advantages import StepAdvantages, estimate_step
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.metrics import score_metrics
from mcore_rl.controller.step.updates import Updated
from mcore_rl.episodes import Episode
from mcore_rl.runtime.shared_batch import SharedBatch

if TYPE_CHECKING:
    from mcore_rl.controller.run import Run


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
    group, config = run.groups[stage.group], run.config
    shared, into, metrics = state.shared, None, dict[str, float]()
    with run.clock(stage.phase):
        if stage.context is not None:
            reader = config.role_config(config.row(stage.group))
            positions = run.prepared.models[stage.group].max_position_embeddings
            told = contexts.told(state.episodes, stage.context, run.tokenizer, config, reader, positions)
            into, shared = shared, updates.send_whole(group, assemble(told.episodes).batch)
            state.in_context.append((stage, shared.lengths_S))
            metrics[f"{stage.role}/in_context"] = told.share
        scores = await updates.run_pass(
            group, shared, stage, temperature=run.temperature(stage), teachers=config.teachers, into=into,
            share_prompts=stage.group in run.sharing,
        )  # fmt: skip
        if stage.rests:
            await group.rest()
    return metrics | score_metrics(stage.role, scores, state.groups.num_trained)


async def _on_ranks(run: Run, stage: OnRanks, state: StepState) -> dict[str, float]:
    ranks, shared = state.shared.assignment, state.shared
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
    """The metrics come at the end of the step; see ``controller/loop.py``."""
    if not state.updated:
        run.preemption.raise_if_asked()  # from here on the step changes what a checkpoint holds
    group, config, snapshots = run.groups[stage.role], run.config, run.config.snapshots_of(stage.role)
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
            temperature=run.temperature(stage),
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
