"""A sample of several sequences, one run of a user's program: it counts once in its group, and all have its advantage.

The oracle is the same step where each such sample is one sequence that holds the trained tokens of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.config.algorithm import KlControlConfig
from mcore_rl.config.algorithm_object import NO_REWARD, Scope
from mcore_rl.config.algorithm_registry import estimators
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.rollout_collection import RolloutCollector
from mcore_rl.controller.step.validation import validation_metrics
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode
from tests.controller.step.test_advantages import over_ranks
from tests.support.scripted_rollout import conversation, turn
from tests.support.settings import algorithm_config

# Of each sample of each group: the model's tokens of each of its conversations, and its score.
GROUPS = [
    [([(9, 8), (7, 6, 5)], 1.0), ([(4,)], 0.0), ([(3, 2)], 0.25)],
    [([(9,), (8,), (7,)], 0.5), ([(6, 5), (4,)], 2.0)],
]


def episodes(*, joined: bool) -> list[Episode]:
    """joined: one episode a sample, which holds the tokens of all its conversations."""
    made = []
    for group, samples in enumerate(GROUPS):
        for index, (parts, score) in enumerate(samples):
            tokens = [tuple(token for part in parts for token in part)] if joined else parts
            for part, each in enumerate(tokens):
                segments = [turn(Author.user, (1,)), turn(Author.model, each)]
                episode = conversation(group, segments, Score(score, parts={"a": score, "b": -score}), group=group)
                made.append(replace(episode, index=index, part=part))
    return made


def advantages(groups: StepBatch, **algorithm: Any) -> list[float]:
    """Of the trained tokens, one after the other."""
    drawn = groups.batch.rollout_logprobs_T
    assert drawn is not None
    batch = replace(groups.batch, old_logprobs_T=drawn, ref_logprobs_T=drawn + 0.5, old_values_T=drawn)
    config = algorithm_config(gdpo_reward_keys=["a", "b"], **algorithm)
    step = over_ranks(replace(groups, batch=batch), config, KlController(KlControlConfig(kl_coef=0.1)), 2)
    assert step.batch.advantages_T is not None
    return step.batch.advantages_T[groups.batch.mask_T].tolist()


# Estimators with an advantage for each response, which are not all 0.
COMPARING = [name for name, each in estimators().items() if each.scope is Scope.sequence and name != NO_REWARD]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("in_reward", [False, True])
@pytest.mark.parametrize("name", COMPARING)
def test_a_run_of_a_program_counts_once_and_all_its_conversations_have_its_advantage(
    name: str, in_reward: bool, whiten: bool
) -> None:
    keys = ["a", "b"]
    settings = {"adv_estimator": name, "use_kl_in_reward": in_reward, "whiten_advantages": whiten}
    apart, joined = (assemble(episodes(joined=joined), None, keys) for joined in (False, True))
    assert apart.sample_S is not None and joined.sample_S is None
    assert apart.sample_S.tolist() == [0, 0, 1, 2, 3, 3, 3, 4, 4]
    expected = advantages(joined, **settings)
    assert len(set(expected)) > 1
    assert advantages(apart, **settings) == pytest.approx(expected, abs=1e-6)  # sums of float32 in another order


def test_without_it_each_conversation_would_be_a_member() -> None:
    """Else the test above could not fail."""
    apart = assemble(episodes(joined=False))
    alone = advantages(replace(apart, sample_S=None), adv_estimator="grpo")
    assert advantages(apart, adv_estimator="grpo") != pytest.approx(alone, abs=1e-3)


def test_by_hand() -> None:
    """RLOO of the second group: 0.5 - 2, and 2 - 0.5, of three and two conversations."""
    batch = assemble(episodes(joined=False))
    made = advantages(batch, adv_estimator="rloo", use_kl_in_reward=False)
    assert made[-6:] == pytest.approx([-1.5] * 3 + [1.5] * 3)
    rest = [(1.0, 0.125, 5), (0.0, 0.625, 1), (0.25, 0.5, 2)]
    assert made[:-6] == pytest.approx([score - others for score, others, count in rest for _ in range(count)])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_estimators_of_tokens_give_each_conversation_the_score(name: str) -> None:
    batch = assemble(episodes(joined=False))
    alone = replace(batch, sample_S=None)
    settings = {"adv_estimator": name, "use_kl_in_reward": False}
    assert advantages(batch, **settings) == advantages(alone, **settings)


def test_validation_counts_a_program_once() -> None:
    metrics = validation_metrics(episodes(joined=False))
    assert metrics["val/sums/reward"] == pytest.approx((1 + 0 + 0.25 + 0.5 + 2) / 5)


def test_a_group_has_a_signal_by_its_samples() -> None:
    from mcore_rl.config.algorithm import FilterGroupsConfig
    from mcore_rl.config.run import RunConfig

    run = RunConfig()
    filtering = algorithm_config(adv_estimator="grpo", filter_groups=FilterGroupsConfig(enable=True))
    collector = RolloutCollector(None, None, replace(run, algorithm=filtering))  # type: ignore[arg-type]
    first = [each for each in episodes(joined=False) if each.group == 0]
    same = [replace(each, score=Score(1.0 if each.part == 0 else 0.0)) for each in first]
    assert collector.teaches(first) and not collector.teaches(same)
