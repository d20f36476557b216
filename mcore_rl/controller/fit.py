"""Whether a checkpoint's model can be trained and sampled as a configuration says: layouts, lengths, batches."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import context_violations, rollout_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.errors import Violation
from mcore_rl.parallel.layout import Layout, layout_violations


def model_run_violations(run: RunConfig, model: ModelConfig, critic: ModelConfig | None = None) -> list[Violation]:
    """Everything that keeps ``model`` from being trained and sampled as ``run`` says; critic: its model, if any."""
    found = [*context_violations(model, run.rollout), *rollout_violations(model, run.rollout.layout)]
    world = run.trainer.world_size
    roles = {"actor": (model, run.actor.parallel)}
    if critic is not None:
        roles["critic"] = (critic, run.critic.parallel)
    for name, (each, parallel) in roles.items():
        for violation in layout_violations(each, parallel, world):
            key = violation.key.removeprefix("parallel.")
            where = f"{name}.parallel.{key}"
            found.append(Violation(where, violation.value, violation.problem, violation.remedy))
    if not found:
        found += _share_violations(run, Layout.of(run.actor.parallel, world).dp, "actor")
        if critic is not None:
            found += _share_violations(run, Layout.of(run.critic.parallel, world).dp, "critic")
    return found


def _share_violations(run: RunConfig, dp: int, role: str) -> list[Violation]:
    size = (run.actor if role == "actor" else run.critic).ppo_mini_batch_size
    sequences = size * run.rollout.n
    if sequences >= dp:
        return []
    problem = f"makes {sequences} sequences a step, fewer than the {dp} data-parallel ranks of the {role}"
    return [Violation(f"{role}.ppo_mini_batch_size", size, problem, f"Write {-(-dp // run.rollout.n)} or more")]


def model_sft_violations(config: SftConfig, model: ModelConfig) -> list[Violation]:
    """Everything that keeps ``model`` from being trained as ``config`` says."""
    parallel, world = config.actor.parallel, config.trainer.world_size
    found = [
        replace(each, key=f"actor.parallel.{each.key.removeprefix('parallel.')}")
        for each in layout_violations(model, parallel, world)
    ]
    if config.data.max_length > model.max_position_embeddings:
        problem = f"exceeds the model's {model.max_position_embeddings} tokens"
        remedy = f"Write {model.max_position_embeddings} or less"
        found.append(Violation("data.max_length", config.data.max_length, problem, remedy))
    if not found and config.data.train_batch_size < (dp := Layout.of(parallel, world).dp):
        problem = f"is fewer than the {dp} data-parallel ranks"
        found.append(Violation("data.train_batch_size", config.data.train_batch_size, problem, f"Write {dp} or more"))
    return found
