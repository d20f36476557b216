"""Rewards of turns and of the whole, from episodes to advantages, against a calculation by hand.

    sequence 0   prompt 5 6 | model 10 11, earned 0.25 | tool 20 21 22 | model 12 | whole: 1.0
    sequence 1   prompt 5 6 | model 13 14                                        | whole: 0.5

Rewards of tokens are therefore 0, 0.25 and 1 at 10, 11 and 12; 0 and 0.5 at 13 and 14.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.config.algorithm import AlgorithmConfig, KlControlConfig
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author
from tests.controller.step.test_advantages import Found, over_ranks
from tests.support.scripted_rollout import answered, conversation, turn
from tests.support.settings import algorithm_config

TRAINED = [2, 3, 7, 10, 11]
EPISODES = [
    conversation(
        0,
        [turn(Author.model, (10, 11), reward=0.25), turn(Author.tool, (20, 21, 22)), turn(Author.model, (12,))],
        Score(1.0),
    ),
    answered(0, Score(0.5), response=(13, 14), index=1),
]
VALUES = [0.2, 0.4, 0.1, 0.3, 0.2]  # of the trained tokens


def groups(far_from_reference: float) -> StepBatch:
    """As a step has them once they are scored.  far_from_reference: log-ratio at the last token of sequence 0."""
    assembled = assemble(EPISODES, greedy=[0.25])
    rollout_T = assembled.batch.rollout_logprobs_T
    assert rollout_T is not None
    old_T, ref_T = rollout_T.clone(), rollout_T.clone()
    ref_T[7] -= far_from_reference
    ref_T[~assembled.batch.mask_T] = -50.0  # of nobody's choice
    values_T = torch.full_like(old_T, 9.0)
    values_T[TRAINED] = torch.tensor(VALUES)
    scored = replace(assembled.batch, old_logprobs_T=old_T, ref_logprobs_T=ref_T, old_values_T=values_T)
    return replace(assembled, batch=scored)


def learnt(algorithm: AlgorithmConfig, far_from_reference: float = 0.0) -> Found:
    one, two = (over_ranks(groups(far_from_reference), algorithm, KlController(algorithm.kl_ctrl), dp) for dp in (1, 2))
    assert one.batch.advantages_T is not None and two.batch.advantages_T is not None
    assert torch.equal(one.batch.advantages_T, two.batch.advantages_T)
    untrained_T = torch.ones(12, dtype=torch.bool)
    untrained_T[TRAINED] = False
    assert not one.batch.advantages_T[untrained_T].any() and not one.batch.mask_T[untrained_T].any()
    return one


def advantages(algorithm: AlgorithmConfig, **changes: float) -> list[float]:
    found_T = learnt(algorithm, **changes).batch.advantages_T
    assert found_T is not None
    return found_T[TRAINED].tolist()


def whitened(raw: list[float]) -> list[float]:
    mean = sum(raw) / len(raw)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / (len(raw) - 1))
    return [(x - mean) / deviation for x in raw]


def test_each_token_is_paid_for_what_follows_it() -> None:
    """ReMax: rewards to go, less the greedy response's 0.25."""
    assert advantages(algorithm_config(adv_estimator="remax")) == [1.0, 1.0, 0.75, 0.25, 0.25]


def test_rewards_are_discounted_by_trained_tokens() -> None:
    algorithm = algorithm_config(adv_estimator="reinforce_plus_plus", gamma=0.5)
    raw = [0.5 * 0.75, 0.25 + 0.5 * 1.0, 1.0, 0.5 * 0.5, 0.5]
    assert advantages(algorithm) == pytest.approx(whitened(raw), rel=1e-5)


def test_gae_over_turns() -> None:
    algorithm = algorithm_config(adv_estimator="gae", gamma=0.5, lam=0.5)
    deltas = [0.5 * 0.4 - 0.2, 0.25 + 0.5 * 0.1 - 0.4, 1.0 - 0.1, 0.5 * 0.2 - 0.3, 0.5 - 0.2]
    raw = [deltas[0] + 0.25 * deltas[1] + 0.0625 * deltas[2], deltas[1] + 0.25 * deltas[2], deltas[2],
           deltas[3] + 0.25 * deltas[4], deltas[4]]  # fmt: skip
    batch = learnt(algorithm).batch
    assert batch.advantages_T is not None and batch.returns_T is not None
    assert batch.advantages_T[TRAINED].tolist() == pytest.approx(whitened(raw), rel=1e-5)
    returns = [advantage + value for advantage, value in zip(raw, VALUES, strict=True)]
    assert batch.returns_T[TRAINED].tolist() == pytest.approx(returns, rel=1e-5)


def test_groups_are_compared_by_all_that_an_episode_earned() -> None:
    """RLOO: 1.25 against 0.5, at every trained token, also of the turn that earned nothing by itself."""
    assert advantages(algorithm_config(adv_estimator="rloo")) == [0.75, 0.75, 0.75, -0.75, -0.75]


def test_the_kl_is_taken_beside_the_turns_rewards() -> None:
    algorithm = algorithm_config(adv_estimator="remax", use_kl_in_reward=True, kl_ctrl=KlControlConfig(kl_coef=0.1))
    assert advantages(algorithm, far_from_reference=2.0) == pytest.approx([0.8, 0.8, 0.55, 0.25, 0.25])
