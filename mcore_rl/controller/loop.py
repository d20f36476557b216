"""The loop: one step of reinforcement learning after the other, on one screen.

What a line does is in the module it names.  Everything that lives longer than a step is in ``Run``.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.trainer import is_due
from mcore_rl.controller import updates
from mcore_rl.controller.learning import lesson
from mcore_rl.controller.run import REFERENCE, Run
from mcore_rl.controller.step_metrics import actor_metrics, critic_metrics, memory_metrics, rates, sample_metrics
from mcore_rl.controller.trajectories import assemble
from mcore_rl.controller.utilization import tflop, utilization


async def train(run: Run) -> None:
    """From the step after ``run.progress.step`` to the last, with validation and checkpoints in between.

    Left: it was told to leave, and did after the step that ``run.progress`` says.  AlarmError: a guard stopped it.
    """
    trainer, begin = run.config.trainer, run.progress.step
    await run.handover.to_rollout(begin)
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
        drawn = await run.leaving.unless(run.drawing.step(step, run.next_rows, run.reporting("drawing")))
    groups = assemble(drawn.trajectories, drawn.greedy)
    run.keep_rollouts(step, drawn.trajectories)
    batch = groups.batch

    with clock("sync"):
        await run.handover.to_training()
    run.tracker.now("log-probs")
    with clock("logprobs"):
        sent = updates.send(run.actor, batch)
        old = await updates.score(run.actor, sent, temperature=temperature, with_entropy=True)
        batch = replace(batch, old_logprobs_T=old.logprobs_T)
    if config.needs_reference:
        with clock("reference"):
            reference = await updates.score(run.actor, sent, temperature=temperature, snapshot=REFERENCE)
            batch = replace(batch, ref_logprobs_T=reference.logprobs_T)
    if run.critic is not None:
        with clock("values"):
            if run.critic.layout.dp != run.actor.layout.dp:
                sent = updates.send(run.critic, batch)
            values = await updates.score(run.critic, sent)
            batch = replace(batch, old_values_T=values.values_T)

    run.leaving.unless_asked()  # from here on the step changes what a checkpoint holds
    with clock("advantages"):
        learnt = lesson(groups, batch, config.algorithm, run.kl)
        batch, metrics = learnt.batch, sample_metrics(drawn) | learnt.metrics

    num_prompts, seed = config.data.train_batch_size, config.data.seed + step
    updated = valued = updates.Updated()
    if run.critic is not None:
        run.tracker.now("training the critic")
        with clock("update_critic"):
            parts = updates.minibatches(groups.group_S, config.critic, num_prompts, seed)
            valued = await updates.update(run.critic, batch, critic_loss, parts, temperature=1.0)
            metrics |= critic_metrics(valued)
    if step > config.trainer.critic_warmup:
        run.tracker.now("training the actor")
        with clock("update_actor"):
            parts = updates.minibatches(groups.group_S, config.actor, num_prompts, seed)
            updated = await updates.update(
                run.actor, batch, actor_loss, parts, temperature=temperature, reference=REFERENCE
            )
    assert old.entropy_S is not None
    metrics |= actor_metrics(updated, config.actor, float(old.entropy_S.sum()) / max(1, groups.num_trained))
    metrics |= memory_metrics(await run.actor.all("memory"), run.on_accelerator)
    metrics |= {"perf/balance": updated.imbalance, "progress/epoch": run.epoch}
    metrics |= tflop(batch.lengths_S, run.passes(len(updated.results), len(valued.results)))

    run.tracker.now("weights to the engines")
    with clock("sync"):
        await run.handover.to_rollout(step)
    return metrics
