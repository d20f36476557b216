"""Whether a checkpoint's model can be trained and sampled as a configuration says: layouts, lengths, batches."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import BYTES, context_violations, rollout_violations
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
        found += _full_kl_violations(run, model)
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


def _full_kl_violations(run: RunConfig, model: ModelConfig) -> list[Violation]:
    """Whether the reference's logits at the trained tokens of a minibatch fit into the host memory that they may take.

    At most: ranks train equally many sequences, but for one, and a context rank has so much of each.
    """
    actor = run.actor
    if not (actor.use_kl_loss and actor.kl_loss_type is KlPenalty.full):
        return []
    layout = Layout.of(actor.parallel, run.trainer.world_size)
    longest = -(-(run.data.max_prompt_length + run.data.max_response_length) // layout.cp)
    sequences = -(-actor.ppo_mini_batch_size * run.rollout.n // layout.dp)
    tokens = sequences * min(run.data.max_response_length, longest)
    columns, size = -(-model.vocab_size // layout.tp), BYTES[actor.precision]
    gib = tokens * columns * size / 2**30
    if gib <= actor.full_kl_gib:
        return []
    problem = (
        f"a process keeps the reference's logits of a minibatch in host memory, {tokens:,} tokens x {columns:,} "
        f"columns x {size} bytes = {gib:.1f} GiB, which exceeds actor.full_kl_gib={actor.full_kl_gib:g}"
    )
    remedy = (
        "Write a smaller actor.ppo_mini_batch_size, a larger actor.parallel.tp or actor.full_kl_gib, or "
        "actor.kl_loss_type=k3, which estimates the same KL from one number a token"
    )
    return [Violation("actor.kl_loss_type", "full", problem, remedy)]


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
