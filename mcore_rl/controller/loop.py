"""The loop: one step of reinforcement learning after the other, on one screen.

What a line does is in the module it names.  Everything that lives longer than a step is in ``Run``.
"""

from __future__ import annotations

import gc

from mcore_rl.config.trainer import is_due
from mcore_rl.controller.run import REFERENCE, Run
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.advantages import estimate_step
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.metrics import actor_metrics, critic_metrics, memory_metrics, rates, sample_metrics
from mcore_rl.controller.step.utilization import tflop, utilization


async def train(run: Run) -> None:
    """From the step after ``run.progress.step`` to the last, with validation and checkpoints in between.

    Preempted: it was told to leave, and did after the step that ``run.progress`` says.  AlarmError: a guard stopped it.
    """
    trainer, begin = run.config.trainer, run.progress.step
    gc.freeze()  # what is there now stays: Python's collector would walk a million objects in every step, for 0.25 s
    async with run.devices.to_engines():
        await run.weights.update(begin)
    if trainer.val_only or (trainer.val_before_train and begin == 0):
        run.tracker.log(begin, await run.validate(begin) | run.clock.step())
    while run.progress.step < run.num_steps:
        step = run.progress.step + 1
        with run.place_kept():
            async with run.profiled(step):
                metrics = await train_step(run, step)
        run.progress.step = step
        if is_due(trainer.test_freq, step, run.num_steps):
            metrics |= await run.validate(step)
        seconds = run.clock.step()
        speed = rates(metrics, seconds, run.num_sequences, run.config.actor.ppo_epochs)
        speed |= utilization(metrics, seconds, trainer.world_size, run.device_peak)
        run.tracker.log(step, metrics | seconds | speed | run.saver.metrics())
        # After the line in metrics.jsonl, which no checkpoint may lack; the time it takes is the next step's.
        if is_due(trainer.save_freq, step, run.num_steps) or run.saver.failed:
            await run.save()
        await run.guard(metrics)
        run.leaving.unless_asked()


async def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: the engines begin with the weights of the step before, and end with those of this one."""
    config, clock = run.config, run.clock
    actor_loss, critic_loss, temperature = run.actor_loss, run.critic_loss, config.rollout.temperature

    with clock("generate"):
        collecting = run.collector.collect(step, run.next_rows, run.reporting("drawing"))
        rollouts = await run.leaving.unless(collecting)
    groups = assemble(rollouts.episodes, rollouts.greedy, config.algorithm.gdpo_reward_keys)
    run.keep_rollouts(step, rollouts.episodes)

    with clock("sync"):
        await run.devices.to_trainer()
    run.tracker.now("log-probs")
    num_prompts, seed = config.data.train_batch_size, config.data.seed + step
    actor_parts = updates.minibatches(groups.group_S, config.actor, num_prompts, seed)
    with clock("logprobs"):
        shared = updates.send(run.actor, groups.batch, actor_parts)
        old = await updates.score(run.actor, shared, "old_logprobs_T", temperature=temperature, with_entropy=True)
    if config.needs_reference:
        with clock("reference"):
            await updates.score(run.actor, shared, "ref_logprobs_T", temperature=temperature, snapshot=REFERENCE)
    if run.critic is not None:
        with clock("values"):
            await updates.score(run.critic, shared, "old_values_T")

    run.leaving.unless_asked()  # from here on the step changes what a checkpoint holds
    with clock("advantages"):
        advantages = await estimate_step(run.actor, shared, groups, config.algorithm, run.kl)
        metrics = sample_metrics(rollouts) | advantages.metrics

    updated = valued = updates.Updated()
    if run.critic is not None:
        run.tracker.now("training the critic")
        with clock("update_critic"):
            critic_parts = updates.minibatches(groups.group_S, config.critic, num_prompts, seed)
            valued = await updates.update(run.critic, shared, critic_loss, critic_parts, advantages, temperature=1.0)
            metrics |= critic_metrics(valued)
    if step > config.trainer.critic_warmup:
        run.tracker.now("training the actor")
        with clock("update_actor"):
            updated = await updates.update(
                run.actor, shared, actor_loss, actor_parts, advantages,
                temperature=temperature, reference=REFERENCE, seed=seed,
            )  # fmt: skip
    assert old.entropy_S is not None
    metrics |= actor_metrics(updated, config.actor, float(old.entropy_S.sum()) / max(1, groups.num_trained))
    metrics |= memory_metrics(updated.memories, run.on_accelerator)
    metrics |= {"perf/balance": updated.imbalance, "progress/epoch": run.epoch}
    metrics |= tflop(shared.lengths_S, run.passes(len(updated.results), len(valued.results)))

    run.tracker.now("weights to the engines")
    with clock("sync"):
        async with run.devices.to_engines():
            await run.weights.update(step)
    return metrics
