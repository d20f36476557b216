"""The numbers of a step, by hand, under names that the tracker knows."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.algorithms.value import value_loss
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import CriticConfig
from mcore_rl.controller.step.metrics import (
    agent_metrics,
    memory_metrics,
    rates,
    sample_metrics,
    score_metrics,
    staleness_metrics,
    update_metrics,
)
from mcore_rl.controller.step.rollout_collection import FILTERED, DroppedGroup, RolloutBatch
from mcore_rl.controller.step.updates import Updated
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.types import SequenceScores, StepResult
from mcore_rl.parallel.device import Memory
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, Segment, VersionSpan
from mcore_rl.tracking.metrics import metric_of
from tests.support.scripted_rollout import answered, conversation, lost_episode, turn
from tests.support.settings import actor_config


def known(metrics: dict[str, float]) -> dict[str, float]:
    for key in metrics:
        metric_of(key)
    return metrics


def test_agents_are_counted() -> None:
    turns = [turn(Author.model, (1, 2, 3), reward=0.5), turn(Author.tool, (4,)), turn(Author.model, (5, 6))]
    counts = AgentCounts(reason="answered", turns=2, calls=3, failed_calls=1, tool_s=2.0, cached_tokens=32)
    one = replace(conversation(1, turns, Score(1.0)), agent=counts)
    counts = AgentCounts(reason="max_turns", turns=4, calls=1, failed_calls=0, tool_s=4.0)
    other = replace(answered(2, Score(1.0), response=(7, 8)), agent=counts)
    assert known(agent_metrics([one, other, answered(3, Score(1.0))])) == pytest.approx(
        {
            "agent/turns_mean": 3.0, "agent/turns_max": 4.0, "agent/calls_mean": 2.0, "agent/failed_call_share": 0.25,
            "agent/tool_s_mean": 3.0, "agent/tool_s_max": 4.0, "agent/trained_share": 7 / 8,
            "agent/cached_tokens_mean": 16.0, "agent/turn_reward_mean": 0.25,
            "agent/end/answered": 0.5, "agent/end/max_turns": 0.5, "agent/lost": 0.0,
        }
    )  # fmt: skip
    assert agent_metrics([answered(3, Score(1.0))]) == {}


def test_reasons_of_ones_own_are_one_metric() -> None:
    ends = [AgentCounts(reason=reason, turns=1) for reason in ("answered", "row 1 gave up", "row 2 gave up", "done")]
    metrics = known(agent_metrics([replace(answered(1, Score(1.0)), agent=each) for each in ends]))
    assert {key: value for key, value in metrics.items() if key.startswith("agent/end/")} == {
        "agent/end/answered": 0.25, "agent/end/other": 0.75,
    }  # fmt: skip


def test_lost_episodes_are_counted_and_no_reward() -> None:
    lost = lost_episode(2, Score(0.0))
    batch = RolloutBatch(episodes=[answered(1, Score(3.0, correct=1.0)), lost], greedy=None, num_batches=1, seconds=1.0)
    metrics = known(sample_metrics(batch))
    assert (metrics["reward/mean"], metrics["reward/accuracy"], metrics["agent/lost"]) == (3.0, 1.0, 1.0)


def test_samples_are_counted() -> None:
    def episode(length: int, score: Score, cut: bool = False) -> Episode:
        return answered(1, score, (1,) * length, (7,) * length, cut=cut)

    episodes = [
        episode(2, Score(1.0, {"format": 1.0, "rare": 3.0}, correct=1.0)),
        episode(4, Score(0.0, {"format": 0.0}, correct=0.0), cut=True),
        episode(6, Score(-1.0, error="timeout: x")),
    ]
    dropped = tuple(DroppedGroup(number, 0, f"file:{number}", FILTERED) for number in range(5))
    collected = RolloutBatch(episodes=episodes, greedy=None, num_batches=2, seconds=1.5, dropped=dropped)
    assert known(sample_metrics(collected)) == pytest.approx(
        {
            "reward/mean": 0.0, "reward/std": (2 / 3) ** 0.5, "reward/min": -1.0, "reward/max": 1.0,
            "reward/accuracy": 0.5, "reward/part/format": 0.5, "reward/part/rare": 3.0,
            "response/length_mean": 4.0, "response/length_min": 2.0, "response/length_max": 6.0,
            "response/clip_share": 1 / 3, "prompt/length_mean": 4.0, "prompt/length_max": 6.0,
            "dropped/groups": 5.0, "dropped/generation_batches": 2.0, "dropped/grader_errors": 1.0,
            "perf/draw_s": 1.5,
        }
    )  # fmt: skip


def test_staleness_is_of_trained_tokens_from_their_version_to_the_step_s() -> None:
    def segment(author: Author, *counts: tuple[int, int]) -> Segment:
        """counts: (version, tokens)."""
        ends = [sum(count for _, count in counts[: place + 1]) for place in range(len(counts))]
        spans = tuple(
            VersionSpan(version=version, start=end - count, end=end)
            for end, (version, count) in zip(ends, counts, strict=True)
        )
        return replace(turn(author, (7,) * ends[-1]), versions=spans)

    mixed = conversation(1, [segment(Author.model, (4, 3), (6, 1)), turn(Author.tool, (8, 8))])
    untrained = conversation(1, [replace(segment(Author.model, (0, 9)), trained=False)])
    unnamed = conversation(1, [replace(segment(Author.model, (0, 2)), versions=())])
    assert known(staleness_metrics([mixed, untrained, unnamed], 7)) == {
        "rollout/staleness_mean": 1.5, "rollout/staleness_max": 2.0, "rollout/stale_token_share": 0.75,
        "rollout/resumed_share": 1.0, "rollout/versions_max": 2.0,
    }  # fmt: skip
    assert staleness_metrics([unnamed], 7) == {}


MAXIMA = ("actor/log_ratio_rise", "actor/log_ratio_fall")


def result(loss: float = 0.0, skipped: str | None = None, **metrics: float) -> StepResult:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    maxima = {name: named.pop(name) for name in MAXIMA if name in named}
    return StepResult(loss=loss, grad_norm=2 * loss, lr=loss / 10, skipped=skipped, metrics=named, maxima=maxima)


def test_the_actor_s_updates_are_counted() -> None:
    updated = Updated(
        results=[
            result(1.0, actor__ratio=4.0, actor__approx_kl=1.0, actor__approx_kl_k1=2.0, actor__kl_loss=8.0,
                   actor__clip_fraction_low=1.0, router__load_max=1.5,
                   actor__log_ratio_rise=0.5, actor__log_ratio_fall=0.25),
            result(3.0, "not finite", actor__ratio=9.0, actor__approx_kl=5.0, actor__approx_kl_k1=4.0,
                   actor__kl_loss=1.0, actor__clip_fraction_low=2.0, router__load_max=2.5,
                   actor__log_ratio_rise=0.25, actor__log_ratio_fall=2.0),
        ],
        trained=[4, 2],
    )  # fmt: skip
    metrics = update_metrics(ROLES["actor"], policy_loss(actor_config(use_kl_loss=True, kl_loss_coef=0.5)), updated)
    assert known(metrics) == pytest.approx(
        {
            "actor/ratio_first": 1.0, "actor/ratio_mean": 13 / 6,
            "actor/ratio_max": math.exp(0.5), "actor/ratio_min": math.exp(-2),
            "actor/kl_k3": 1.0, "actor/kl_k1": 1.0, "kl/loss": 1.5,
            "kl/coef": 0.5, "actor/clip_fraction_low": 0.5, "router/load_max": 2.0, "actor/loss": 2.0,
            "actor/grad_norm": 4.0, "actor/lr": 0.3, "actor/skipped_updates": 1.0,
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", ["hinge", "actor/lr", "critics/hinge/2", "my-role/hinge"])
def test_a_loss_that_reports_what_is_no_metric_s_name_is_refused(name: str) -> None:
    """In one line, instead of losing the number or the run."""
    updated = Updated(results=[replace(result(1.0), metrics={name: 4.0})], trained=[4])
    said = f"the loss of actor={name}: cannot be reported by this name. Call it actor/NAME"
    with pytest.raises(ConfigError, match=re.escape(said)):
        update_metrics(ROLES["actor"], policy_loss(actor_config()), updated)


def test_a_step_without_updates_tells_of_entropy_alone() -> None:
    scores = SequenceScores(sums_S=torch.zeros(2), entropy_S=torch.tensor([2.0, 4.0]))
    assert known(score_metrics("actor", scores, 2)) == {"actor/entropy": 3.0}
    assert score_metrics("critic", SequenceScores(sums_S=torch.zeros(2), entropy_S=None), 2) == {}
    assert update_metrics(ROLES["actor"], policy_loss(actor_config()), Updated()) == {}
    assert update_metrics(ROLES["critic"], value_loss(CriticConfig()), Updated()) == {}


def test_the_critic_s_updates_are_counted() -> None:
    # Returns 0 and 2 in the first minibatch, 4 in the second; errors 1, 1 and 1: all variance is explained.
    sums = [
        dict(critic__returns=2.0, critic__returns_squared=4.0, critic__errors=2.0, critic__errors_squared=2.0),
        dict(critic__returns=4.0, critic__returns_squared=16.0, critic__errors=1.0, critic__errors_squared=1.0),
    ]
    updated = Updated(results=[result(1.0, critic__vf_clip_fraction=3.0, **each) for each in sums], trained=[2, 1])
    assert known(update_metrics(ROLES["critic"], value_loss(CriticConfig()), updated)) == pytest.approx(
        {
            "value/explained_variance": 1.0, "critic/clip_fraction": 2.0, "critic/loss": 1.0, "critic/grad_norm": 2.0,
            "critic/lr": 0.1, "critic/skipped_updates": 0.0,
        }
    )  # fmt: skip


def test_memory_is_of_the_device_or_of_all_processes() -> None:
    rest = dict(reserved_bytes=0, free_bytes=0, total_bytes=0)
    sizes = ((1 << 30, 3 << 30), (2 << 30, 2 << 30))
    memories = [Memory(allocated_bytes=size, peak_bytes=peak, **rest) for size, peak in sizes]
    assert known(memory_metrics(memories, accelerator=True)) == {"perf/memory_device_gib": 3.0}
    assert known(memory_metrics(memories, accelerator=False)) == {"perf/memory_host_gib": 3.0}
    assert memory_metrics([], accelerator=True) == {}, "the actor was not trained"


def test_rates_are_tokens_by_the_seconds_of_their_phase() -> None:
    metrics = {"response/length_mean": 10.0, "prompt/length_mean": 5.0, "perf/draw_s": 4.0}
    seconds = {"time/generate": 1.0, "time/update_actor": 2.0}
    assert known(rates(metrics, seconds, 8, 3 * 8 * (10 + 5))) == {
        "perf/generated_tokens_per_s": 20.0, "perf/trained_tokens_per_s": 180.0
    }  # fmt: skip
    assert rates(metrics | {"perf/draw_s": 0.0}, {}, 8, 1) == {}
