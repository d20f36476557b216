"""The numbers of one step, under the names of ``tracking.metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from mcore_rl.algorithms.value import explained_variance
from mcore_rl.config.roles import ActorConfig
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.controller.step.updates import Updated
from mcore_rl.episodes import Episode
from mcore_rl.parallel.device import Memory

GIB = 2**30


def sample_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Of episodes and their rewards."""
    episodes = rollouts.episodes
    rewards = [each.reward for each in episodes]
    lengths = [each.num_response_tokens for each in episodes]
    prompts = [each.num_prompt_tokens for each in episodes]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "response/length_mean": fmean(lengths),
        "response/length_min": float(min(lengths)),
        "response/length_max": float(max(lengths)),
        "response/clip_share": fmean(each.truncated for each in episodes),
        "prompt/length_mean": fmean(prompts),
        "prompt/length_max": float(max(prompts)),
        "dropped/groups": float(rollouts.num_dropped),
        "dropped/generation_batches": float(rollouts.num_batches),
        "dropped/grader_errors": float(sum(each.graded.error is not None for each in episodes)),
    }
    correct = [each.graded.correct for each in episodes if each.graded.correct is not None]
    if correct:
        metrics["reward/accuracy"] = fmean(correct)
    return metrics | _reward_parts(episodes)


def _reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    parts = [each.graded.parts for each in episodes]
    names = sorted({name for of_one in parts for name in of_one})
    return {f"reward/part/{name}": fmean(of_one[name] for of_one in parts if name in of_one) for name in names}


def actor_metrics(updated: Updated, config: ActorConfig, entropy: float) -> dict[str, float]:
    """Of the actor's updates.  entropy: mean over the responses' tokens, before them."""
    metrics = {"actor/entropy": entropy}
    if not updated.results:
        return metrics
    wanted = {
        "actor/kl_k1": "actor/approx_kl_k1",
        "actor/kl_k3": "actor/approx_kl",
        "actor/clip_fraction_low": "actor/clip_fraction_low",
        "actor/clip_fraction_high": "actor/clip_fraction_high",
        "actor/clip_fraction_dual": "actor/clip_fraction_dual",
        "actor/selected_fraction": "actor/selected_fraction",
        "kl/loss": "actor/kl_loss",
    }
    found = {key: updated.mean(name) for key, name in wanted.items()}
    found["actor/ratio_first"] = updated.mean("actor/ratio", first=True)
    metrics |= {key: value for key, value in found.items() if value is not None}
    if config.use_kl_loss:
        metrics["kl/coef"] = config.kl_loss_coef
    routers = {name for result in updated.results for name in result.metrics if name.startswith("router/")}
    for name in routers:
        metrics[name] = fmean(result.metrics[name] for result in updated.results if name in result.metrics)
    return metrics | _optimizer_metrics("actor", updated)


def critic_metrics(updated: Updated) -> dict[str, float]:
    """Of the critic's updates."""
    if not updated.results:
        return {}
    metrics = {"value/explained_variance": explained_variance(updated.sums(), sum(updated.trained))}
    clipped = updated.mean("critic/vf_clip_fraction")
    assert clipped is not None
    return metrics | {"critic/clip_fraction": clipped} | _optimizer_metrics("critic", updated)


def _optimizer_metrics(role: str, updated: Updated) -> dict[str, float]:
    return {
        f"{role}/loss": fmean(result.loss for result in updated.results),
        f"{role}/grad_norm": fmean(result.grad_norm for result in updated.results),
        f"{role}/lr": updated.results[-1].lr,
        f"{role}/skipped_updates": float(sum(result.skipped is not None for result in updated.results)),
    }


def memory_metrics(memories: Sequence[Memory], accelerator: bool) -> dict[str, float]:
    """Of the actor's processes: the highest peak of a device, or on CPU what they hold together."""
    if not memories:
        return {}
    if accelerator:
        return {"perf/memory_device_gib": max(memory.peak_bytes for memory in memories) / GIB}
    return {"perf/memory_host_gib": sum(memory.allocated_bytes for memory in memories) / GIB}


def rates(
    metrics: Mapping[str, float], seconds: Mapping[str, float], num_sequences: int, epochs: int
) -> dict[str, float]:
    """Tokens a second.  seconds: ``time/*`` of the step.  epochs: passes of the actor over the sequences."""
    found, responses = {}, metrics["response/length_mean"] * num_sequences
    prompts = metrics["prompt/length_mean"] * num_sequences
    if seconds.get("time/generate"):
        found["perf/generated_tokens_per_s"] = responses / seconds["time/generate"]
    if seconds.get("time/update_actor"):
        found["perf/trained_tokens_per_s"] = epochs * (prompts + responses) / seconds["time/update_actor"]
    return found
