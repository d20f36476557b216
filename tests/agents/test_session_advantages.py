"""From a session's tokens to advantages: masks, rewards of turns and GAE over them, against float64 by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.losses.aggregation import loss_denominator, sum_token_losses
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.algorithm import KlControlConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.config.roles import LossAggregation
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.ground.types import LossInputs
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode
from mcore_rl.rollout.protocol import Sampling
from tests.controller.step.test_advantages import over_ranks
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row
from tests.support.settings import algorithm_config

GAMMA, LAM = 0.9, 0.8
CHECK = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "%s"}}</tool_call>'
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'
TURNS = {"one": ["#### 5"], "two": [SUM, "#### 5"], "six": [CHECK % 4, SUM, CHECK % 5, CHECK % 5, "hm", "#### 5"]}


async def episodes() -> list[Episode]:
    tokenizer = style("qwen2.5")
    config = AgentConfig(tools=["calculator", "calc_gsm8k_reward"], tool_reward_coef=2.0, max_turns=6)
    runner = AgentRunner(config, CodeConfig(), tokenizer)
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "5"}}}
    made = []
    for group, turns in enumerate(TURNS.values()):
        row = agent_row(tokenizer, number=group, agent_name="tool_agent", tools_kwargs=kwargs)
        engine = DrawnTurns(tokenizer, turns)
        episode = await runner.run(engine, row, f"p{group}", group, 0, Sampling(max_tokens=3000))
        made.append(episode.with_score(Score(1.0 - group / 4)))
    runner.close()
    return made


def by_hand(episode: Episode, values: np.ndarray, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """(advantages, returns) of the trained tokens, one after the other, as if nothing stood between them."""
    rewards: list[float] = []
    for segment in episode.segments:
        if segment.author is Author.model:
            rewards += [0.0] * (len(segment.tokens) - 1) + [segment.reward or 0.0]
    rewards[-1] += episode.graded.value
    advantages, running, after = [0.0] * len(rewards), 0.0, 0.0
    for place in reversed(range(len(rewards))):
        delta = rewards[place] + gamma * after - float(values[place])
        running = delta + gamma * lam * running
        advantages[place], after = running, float(values[place])
    return advantages, [advantage + float(value) for advantage, value in zip(advantages, values, strict=True)]


def test_rewards_of_turns_are_what_the_tools_said() -> None:
    _, two, six = asyncio.run(episodes())
    assert [segment.reward for segment in two.segments if segment.trained] == [None, None]
    penalty = 2.0 * -0.05
    assert six.agent is not None and six.agent.reason == "answered"
    assert [segment.reward for segment in six.segments if segment.trained] == [penalty, None, 0.0, penalty, None]


def test_gae_passes_over_what_others_wrote() -> None:
    made = asyncio.run(episodes())
    batch = assemble(made)
    tokens_T, mask_T = batch.batch.tokens_T, batch.batch.mask_T
    drawn = [segment.tokens for each in made for segment in each.segments if segment.author is Author.model]
    assert tokens_T[mask_T].tolist() == np.concatenate(drawn).tolist() and 0 < int((~mask_T).sum())
    rng = np.random.default_rng(0)
    values_T = torch.full((len(tokens_T),), 7.0)
    values = rng.normal(size=int(mask_T.sum()))
    values_T[mask_T] = torch.tensor(values, dtype=torch.float32)
    assert batch.batch.rollout_logprobs_T is not None
    scored = replace(batch.batch, old_logprobs_T=batch.batch.rollout_logprobs_T.clone(), old_values_T=values_T)
    algorithm = algorithm_config(adv_estimator="gae", gamma=GAMMA, lam=LAM, use_kl_in_reward=False)
    estimated = over_ranks(replace(batch, batch=scored), algorithm, KlController(KlControlConfig()), 1)
    advantages, returns, start = [], [], 0
    for each in made:
        count = sum(len(segment.tokens) for segment in each.segments if segment.trained)
        of_one = by_hand(each, values[start : start + count], GAMMA, LAM)
        advantages += of_one[0]
        returns += of_one[1]
        start += count
    assert estimated.batch.returns_T is not None and estimated.batch.advantages_T is not None
    assert estimated.batch.returns_T[mask_T].tolist() == pytest.approx(returns, abs=2e-5)  # float32 sums of 600 tokens
    white = (np.array(advantages) - np.mean(advantages)) / np.std(advantages, ddof=1)  # over the batch, as verl and TRL
    assert estimated.batch.advantages_T[mask_T].tolist() == pytest.approx(white.tolist(), abs=5e-5)
    assert not estimated.batch.advantages_T[~mask_T].any()


@pytest.mark.parametrize("mode", list(LossAggregation))
def test_every_aggregation_counts_the_models_tokens_alone(mode: LossAggregation) -> None:
    """Against sums over the drawn segments in float64; rows of prompts, tools and users have losses that would show."""
    made = asyncio.run(episodes())
    batch = assemble(made).batch
    lengths = [each.num_tokens for each in made]
    rng = np.random.default_rng(1)
    loss = rng.normal(size=sum(lengths)) + 3
    sequence = torch.repeat_interleave(torch.arange(len(made)), torch.tensor(lengths))
    inputs = LossInputs(
        mask_N=batch.mask_T, sequence_N=sequence, num_sequences=len(made), sum_over_context=lambda each: each
    )
    total = float(sum_token_losses(torch.tensor(loss), inputs, mode))
    divisor = loss_denominator(sequence_counts(batch.mask_T, lengths), mode, 500.0)

    of_episodes, place = list[list[float]](), 0
    for each in made:
        of_episodes.append([])
        for segment in each.segments:
            if segment.author is Author.model:
                of_episodes[-1] += loss[place : place + len(segment.tokens)].tolist()
            place += len(segment.tokens)
    assert [len(each) for each in of_episodes] != lengths and place == sum(lengths)
    expected = {
        LossAggregation.token_mean: sum(map(sum, of_episodes)) / sum(map(len, of_episodes)),
        LossAggregation.seq_mean_token_sum: sum(map(sum, of_episodes)) / 3,
        LossAggregation.seq_mean_token_mean: sum(sum(each) / len(each) for each in of_episodes) / 3,
        LossAggregation.sum_over_constant: sum(map(sum, of_episodes)) / (3 * 500),
    }
    assert total / divisor == pytest.approx(expected[mode], rel=1e-12)
