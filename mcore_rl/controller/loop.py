"""The loop: one step of reinforcement learning after the other, on one screen.

What a line does is in the module it names.  Everything that lives longer than a step is in ``Run``.
"""

from __future__ import annotations

import gc

from mcore_rl.config.step_plan import reads_outcomes
from mcore_rl.controller.run import Run
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.metrics import (
    memory_metrics,
    own_metrics,
    picture_metrics,
    sample_metrics,
    staleness_metrics,
    update_metrics,
)
from mcore_rl.controller.step.pairing import in_pairs
from mcore_rl.controller.step.stages import StepState, run_stage
from mcore_rl.controller.step.utilization import step_passes, tflop
from mcore_rl.controller.training_run import every_step


async def train(run: Run) -> None:
    """All steps, from engines that hold the weights to begin with.  Raises as ``every_step``."""
    await run.ask_who_shares()
    gc.freeze()  # what is there now stays: Python's collector would walk a million objects in every step, for 0.25 s
    run.tracker.now("weights to the engines")
    await run.devices.to_engines(run.progress.step)
    async with run.elastic, run.rollouts:
        await every_step(run, train_step)


async def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: the engines begin with the weights of the step before, and end with those of this one."""
    config, clock = run.config, run.clock

    run.tracker.now("drawing")
    with clock("generate"):
        rollouts = await run.preemption.cancel_if_asked(run.rollouts.next(step))
    trained = in_pairs(rollouts.episodes, config.algorithm)
    keys, needed = config.algorithm.reward_parts, reads_outcomes(config)
    groups = assemble(
        trained.episodes,
        rollouts.greedy,
        keys,
        with_outcomes=needed,
        teachers=config.teachers,
        pictures=config.sees_pictures,
    )
    place = run.keep_rollouts(step, rollouts, sum(groups.batch.lengths_S))

    with clock("sync"):
        await run.devices.to_trainer()
    run.tracker.now("log-probs")
    parts = run.minibatches(groups.group_S, step)
    metrics = sample_metrics(rollouts) | staleness_metrics(rollouts.episodes, step) | trained.metrics
    metrics |= picture_metrics(groups.batch)
    with clock(config.policy.phase):
        sharing = config.policy.name in run.sharing
        seen = await run.pictures_of(trained.episodes)
        parts_of_policy = parts[config.policy.name]
        shared = updates.send(run.policy, groups.batch, parts_of_policy, seen, share_prompts=sharing)
    state = StepState(step=step, shared=shared, groups=groups, minibatches=parts, episodes=trained.episodes)
    for stage in run.plan(step):
        metrics |= await run_stage(run, stage, state)

    updated = {role.name: state.updated.get(role.name, updates.Updated()) for role in config.trained_rows}
    for role in config.trained_rows:
        metrics |= update_metrics(role, run.losses[role.name], updated[role.name])
    of_policy = updated[config.policy.name]
    if of_policy.own is not None:
        metrics |= own_metrics(config.policy.name, of_policy.own, of_policy.trained[0])
    metrics |= memory_metrics(of_policy.memories, run.on_accelerator)
    metrics |= {"perf/balance": of_policy.imbalance, "progress/epoch": run.epoch}
    if sharing:
        metrics["perf/shared_prompts"] = of_policy.shared
    counts = {name: len(each.results) for name, each in updated.items()}
    passes = step_passes(
        config, run.plan(step), run.prepared.models, counts, in_context=state.in_context, sharing=run.sharing
    )
    metrics |= tflop(shared.lengths_S, passes, shared.stems, shared.images_S)

    with clock("generate"):
        await run.rollouts.settle(run.preemption)
    assert state.advantages is not None, "every step estimates advantages"
    tokens = trained.of_drawn(state.advantages.trained_S, len(rollouts.episodes))
    await run.keep_order(step, rollouts, place, tokens, counts)
    run.tracker.now("weights to the engines")
    with clock("sync"):
        await run.devices.to_engines(step)
    return metrics
