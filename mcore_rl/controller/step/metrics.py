"""Computes the metrics of one step, under the names of ``tracking.metrics``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from mcore_rl.agents.conversations import REWRITTEN
from mcore_rl.agents.session import END_REASONS
from mcore_rl.algorithms.correction import MEASURE, correction_metrics
from mcore_rl.algorithms.own_scores import OwnScores
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.role import Role
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.controller.step.updates import Updated
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.ground.types import SequenceScores, TrainBatch
from mcore_rl.parallel.device import Memory
from mcore_rl.rollout.episodes import Episode
from mcore_rl.tracking.metrics import is_metric

GIB = 2**30
OTHER_REASON = "other"  # of loops of users' own: as many metrics as they can think of would be too many


def sample_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """The metrics of episodes and their rewards."""
    episodes = rollouts.episodes
    samples = [each for each in episodes if not each.part]  # a user's program counts once, with all its conversations
    rewards = [each.reward for each in samples if not each.lost]
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
        "perf/draw_s": rollouts.seconds,
        "dropped/groups": float(rollouts.num_dropped),
        "dropped/generation_batches": float(rollouts.num_batches),
        "dropped/grader_errors": float(sum(each.graded.error is not None for each in samples)),
    }
    correct = [each.graded.correct for each in samples if each.graded.correct is not None]
    if correct:
        metrics["reward/accuracy"] = fmean(correct)
    return metrics | _reward_parts(samples) | agent_metrics(episodes) | dict(rollouts.metrics)


def picture_metrics(batch: TrainBatch) -> dict[str, float]:
    """The metrics of the pictures that a step trains with; {} if models are given none."""
    if batch.images_S is None:
        return {}
    shown = [image for images in batch.images_S for image in images]
    return {
        "pictures/count": float(len(shown)),
        "pictures/different": float(len({image.key for image in shown})),
        "pictures/patches": float(sum(batch.patches_S)),
        "pictures/token_share": sum(image.tokens for image in shown) / sum(batch.lengths_S),
    }


def agent_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of the episodes that agents ran; {} if there are none."""
    by_agents = [(each, each.agent) for each in episodes if each.agent is not None]
    if not by_agents:
        return {}
    counts = [agent for _, agent in by_agents]
    calls = sum(each.calls for each in counts)
    tokens = sum(each.num_response_tokens for each, _ in by_agents)
    trained = sum(len(segment.tokens) for each, _ in by_agents for segment in each.segments if segment.trained)
    reasons = Counter(each.reason if each.reason in END_REASONS else OTHER_REASON for each in counts)
    return {
        "agent/turns_mean": fmean(each.turns for each in counts),
        "agent/turns_max": float(max(each.turns for each in counts)),
        "agent/calls_mean": calls / len(counts),
        "agent/failed_call_share": sum(each.failed_calls for each in counts) / max(1, calls),
        "agent/tool_s_mean": fmean(each.agent.tool_s for each in episodes if each.agent is not None and not each.part),
        "agent/tool_s_max": max(each.tool_s for each in counts),
        "agent/trained_share": trained / max(1, tokens),
        "agent/cached_tokens_mean": fmean(each.cached_tokens for each in counts),
        "agent/turn_reward_mean": fmean(math.fsum(each.turn_rewards) for each, _ in by_agents),
        "agent/lost": float(sum(each.lost for each, _ in by_agents)),
        **_program_metrics(episodes),
        **{f"agent/end/{reason}": count / len(counts) for reason, count in sorted(reasons.items())},
    }


def _program_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of the conversations of users' programs; {} if there are none."""
    begins = [each.agent.begins for each in episodes if each.agent is not None and each.agent.begins]
    if not begins:
        return {}
    runs = sum(each.agent is not None and bool(each.agent.begins) and not each.part for each in episodes)
    return {
        "agent/conversations_mean": len(begins) / runs,
        "agent/rewritten_share": fmean(each == REWRITTEN for each in begins),
    }


def _reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    parts = [each.graded.parts for each in episodes]
    names = sorted({name for of_one in parts for name in of_one})
    return {f"reward/part/{name}": fmean(of_one[name] for of_one in parts if name in of_one) for name in names}


def staleness_metrics(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """How many versions older than the weights that ``step`` begins with (its number less 1) those of its tokens are.

    And how many responses were under way when weights changed.  An empty dict where the engine names no versions.
    """
    spans = [
        [span for part in each.segments if part.trained for span in part.versions if span.end > span.start]
        for each in episodes
    ]
    ages = [(step - 1 - span.version, span.end - span.start) for of_one in spans for span in of_one]
    if not ages:
        return {}
    total = sum(count for _, count in ages)
    versions = [len({span.version for span in of_one}) for of_one in spans if of_one]
    return {
        "rollout/staleness_mean": sum(age * count for age, count in ages) / total,
        "rollout/staleness_max": float(max(age for age, _ in ages)),
        "rollout/stale_token_share": sum(count for age, count in ages if age) / total,
        "rollout/resumed_share": fmean(count > 1 for count in versions),
        "rollout/versions_max": float(max(versions)),
    }


def score_metrics(role: str, scores: SequenceScores | None, num_tokens: int) -> dict[str, float]:
    """The metrics of a pass of ``role``: the mean entropy over ``num_tokens`` trained tokens."""
    if scores is None or scores.entropy_S is None:
        return {}
    return {f"{role}/entropy": float(scores.entropy_S.sum()) / max(1, num_tokens)}


def own_metrics(role: str, own: OwnScores, num_tokens: int) -> dict[str, float]:
    """The metrics of the scoring pass of ``role`` and of its agreement with the sampler, where the update scored.

    num_tokens: the trained tokens of what it scored.
    """
    return score_metrics(role, own.scores, num_tokens) | correction_metrics(own.correction, MEASURE, weighs=False)


def update_metrics(role: Role, loss: RoleLoss, updated: Updated) -> dict[str, float]:
    """The metrics of the updates of ``role``; only the policy's include those of its routers.

    Raises ConfigError if the loss, of a user's file, reports a name that is no metric's, or the optimizer's.
    """
    if not updated.results:
        return {}
    told = loss.metrics(updated.sums)
    optimizer = _optimizer_metrics(role.name, updated)
    refuse_if_any(
        [
            Violation(f"the loss of {role.name}", name, "cannot be reported by this name", f"Call it {role.name}/NAME")
            for name in told
            if name in optimizer or not is_metric(name)
        ]
    )
    routers = {name for result in updated.results for name in result.metrics if name.startswith("router/")}
    of_routers = {
        name: fmean(result.metrics[name] for result in updated.results if name in result.metrics)
        for name in (routers if role.publishes else ())
    }
    return told | of_routers | optimizer


def _optimizer_metrics(role: str, updated: Updated) -> dict[str, float]:
    return {
        f"{role}/loss": fmean(result.loss for result in updated.results),
        f"{role}/grad_norm": fmean(result.grad_norm for result in updated.results),
        f"{role}/lr": updated.results[-1].lr,
        f"{role}/skipped_updates": float(sum(result.skipped is not None for result in updated.results)),
    }


def memory_metrics(memories: Sequence[Memory], accelerator: bool) -> dict[str, float]:
    """The memory of the policy's processes: the highest peak of a device, or on CPU their memory together."""
    if not memories:
        return {}
    if accelerator:
        return {"perf/memory_device_gib": max(memory.peak_bytes for memory in memories) / GIB}
    return {"perf/memory_host_gib": sum(memory.allocated_bytes for memory in memories) / GIB}


def rates(
    metrics: Mapping[str, float], seconds: Mapping[str, float], num_drawn: int, num_tokens: int
) -> dict[str, float]:
    """Tokens per second.

    seconds: ``time/*`` of the step.  num_drawn: its responses.  num_tokens: that the policy's updates process.
    """
    per_second = {}
    if metrics["perf/draw_s"]:
        per_second["perf/generated_tokens_per_s"] = metrics["response/length_mean"] * num_drawn / metrics["perf/draw_s"]
    if seconds.get("time/update_actor"):
        per_second["perf/trained_tokens_per_s"] = num_tokens / seconds["time/update_actor"]
    return per_second
