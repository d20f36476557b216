"""The loop: one step of reinforcement learning after the other, on one screen.

What a line does is in the module it names.  Everything that lives longer than a step is in ``Run``.
"""

from __future__ import annotations

import gc

from mcore_rl.controller.run import Run
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.advantages import estimate_step
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.metrics import (
    memory_metrics,
    own_metrics,
    sample_metrics,
    score_metrics,
    staleness_metrics,
    update_metrics,
)
from mcore_rl.controller.step.pairing import in_pairs
from mcore_rl.controller.step.utilization import tflop
from mcore_rl.controller.training_run import every_step


async def train(run: Run) -> None:
    """All steps, from engines that hold the weights to begin with.  Raises as ``every_step``."""
    gc.freeze()  # what is there now stays: Python's collector would walk a million objects in every step, for 0.25 s
    await run.devices.to_engines(run.progress.step)
    async with run.elastic, run.rollouts:
        await every_step(run, train_step)


async def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: the engines begin with the weights of the step before, and end with those of this one."""
    config, clock = run.config, run.clock

    with clock("generate"):
        rollouts = await run.preemption.cancel_if_asked(run.rollouts.next(step))
    trained = in_pairs(rollouts.episodes, config.algorithm)
    keys, with_outcomes = config.algorithm.gdpo_reward_keys, bool(config.outcome_rows)
    groups = assemble(trained.episodes, rollouts.greedy, keys, with_outcomes=with_outcomes, teachers=config.teachers)
    place = run.keep_rollouts(step, rollouts, sum(groups.batch.lengths_S))

    with clock("sync"):
        await run.devices.to_trainer()
    run.tracker.now("log-probs")
    parts = run.minibatches(groups.group_S, step)
    metrics = sample_metrics(rollouts) | staleness_metrics(rollouts.episodes, step) | trained.metrics
    with clock(config.policy.phase):
        shared = updates.send(run.policy, groups.batch, parts[config.policy.name])
    for role in config.role_rows:
        if role.on_outcomes or (role.publishes and not run.scores_first(step)):
            continue
        with clock(role.phase):
            scores = await run.score(role, shared)
            await run.score_copy(role, shared)
        metrics |= score_metrics(role, scores, groups.num_trained)

    run.preemption.raise_if_asked()  # from here on the step changes what a checkpoint holds
    updated = {role.name: updates.Updated() for role in config.trained_rows}
    for role in config.outcome_rows:
        updated[role.name] = await run.learn_outcomes(role, shared, parts[role.name], groups, step)
    with clock("advantages"):
        advantages = await estimate_step(run.policy, shared, groups, config.algorithm, run.kl, run.process_reward)
        metrics |= advantages.metrics

    for role in config.trained_rows:
        if role.on_outcomes or (role.publishes and not run.updates_policy(step)):
            continue
        run.tracker.now(f"training the {role.name}")
        with clock(role.update_phase):
            updated[role.name] = await run.update(role, shared, parts[role.name], advantages, step)
            await run.move_snapshots(role, step)
    for role in config.trained_rows:
        metrics |= update_metrics(role, run.losses[role.name], updated[role.name])
    of_policy = updated[config.policy.name]
    if of_policy.own is not None:
        metrics |= own_metrics(config.policy, of_policy.own, of_policy.trained[0])
    metrics |= memory_metrics(of_policy.memories, run.on_accelerator)
    metrics |= {"perf/balance": of_policy.imbalance, "progress/epoch": run.epoch}
    metrics |= tflop(shared.lengths_S, run.passes({name: len(each.results) for name, each in updated.items()}, step))

    with clock("generate"):
        await run.rollouts.settle(run.preemption)
    counts = trained.of_drawn(advantages.trained_S, len(rollouts.episodes))
    await run.keep_order(step, rollouts, place, counts, updated)
    run.tracker.now("weights to the engines")
    with clock("sync"):
        await run.devices.to_engines(step)
    return metrics
