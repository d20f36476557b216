"""Seeds and requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import (
    FinishReason,
    Prompt,
    Request,
    Sample,
    Sampling,
    demand_numbers,
    requests_of,
    seed_of,
)

PROMPT = Prompt(id="p", tokens=(4, 5))
PARTIAL = Sample(
    prompt_id="p",
    index=0,
    tokens=np.array([7, 8, 9], np.int32),
    logprobs=np.zeros(3, np.float32),
    versions=(),
    finish=FinishReason.abort,
)


def test_no_two_samples_share_a_seed_and_every_run_has_the_same() -> None:
    seeds = {
        (name, index, run): seed_of(
            Request(prompt=Prompt(id=name, tokens=(1,)), index=index), Sampling(max_tokens=1, seed=run)
        )
        for name, index, run in itertools.product(("1", "11", "1/1", "a"), range(12), range(12))
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert seeds["a", 3, 5] == 6445644097168393289  # a run that is resumed under a newer version draws the same


def test_a_seed_does_not_depend_on_the_tokens_of_the_prompt_nor_on_the_other_sampling() -> None:
    request, sampling = Request(prompt=PROMPT, index=2), Sampling(max_tokens=9, seed=3)
    same = Request(prompt=Prompt(id="p", tokens=(1,)), index=2)
    assert seed_of(request, sampling) == seed_of(same, Sampling(max_tokens=4, temperature=0.5, seed=3))
    assert seed_of(request, sampling) != seed_of(Request(prompt=PROMPT, index=2, so_far=PARTIAL), sampling)


def test_requests_go_prompt_by_prompt_and_on_from_what_is_there() -> None:
    other = Prompt(id="q", tokens=(6,))
    assert [request.key for request in requests_of([PROMPT, other], 2)] == [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
    going_on = Request(prompt=PROMPT, so_far=PARTIAL)
    assert going_on.tokens == [4, 5, 7, 8, 9] and going_on.num_done == 3
    assert Request(prompt=PROMPT).tokens == [4, 5]


def test_only_a_cut_distribution_is_truncated() -> None:
    assert not Sampling(max_tokens=1).truncated
    assert Sampling(max_tokens=1, top_p=0.9).truncated and Sampling(max_tokens=1, top_k=5).truncated
    assert not Sampling(max_tokens=1, temperature=0, top_p=0.9).truncated  # greedy cuts nothing off what is reported


def test_tokens_that_were_drawn_from_nothing_are_an_error() -> None:
    request = Request(prompt=Prompt(id="p", tokens=(1, 2, 3)), index=4)
    demand_numbers(request, 0, np.array([-0.5, 0.0], np.float32))
    for wrong in (np.nan, -np.inf):
        with pytest.raises(RolloutError, match="prompt p, sample 4: from token 9 of the sequence on"):
            demand_numbers(request, 5, np.array([-0.5, wrong, wrong], np.float32))
