"""Experts that an engine reports: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import Prompt, Request
from mcore_rl.rollout.routes import checked_routes, continued
from tests.support import models
from tests.support.scripted_rollout import sample

WHOLE = models.moe()
assert WHOLE.moe is not None
MOE = replace(WHOLE.moe, dense_layers=[1])
MODEL = replace(WHOLE, moe=MOE)
PROMPT, RESPONSE = 3, (7, 8)
SHAPE = (PROMPT + len(RESPONSE) - 1, MODEL.num_layers, MOE.top_k)


def routes(dtype: type[np.integer] = np.int64) -> RoutesArray:
    """Different experts for each token and layer."""
    return np.random.default_rng(0).random((*SHAPE[:2], MOE.num_experts)).argsort(-1)[..., : MOE.top_k].astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_sound_experts_come_back_in_a_byte_each(dtype: type[np.integer]) -> None:
    checked = checked_routes(replace(sample(tokens=RESPONSE), experts=routes(dtype)), PROMPT, MODEL)
    assert checked.dtype == np.uint8 and np.array_equal(checked, routes())


def test_of_more_than_256_experts_each_has_two_bytes() -> None:
    wide = replace(MODEL, moe=replace(MOE, num_experts=257))
    experts = routes()
    experts[0, 0, 0] = 256
    checked = checked_routes(replace(sample(tokens=RESPONSE), experts=experts), PROMPT, wide)
    assert checked.dtype == np.int16 and np.array_equal(checked, experts)
    assert replace(MOE, num_experts=256).choice_bytes == 1


def test_what_is_reported_of_a_dense_layer_does_not_matter() -> None:
    experts = routes()
    experts[:, 1] = 0
    checked_routes(replace(sample(tokens=RESPONSE), experts=experts), PROMPT, MODEL)


def changed(token: int, layer: int, choices: list[int]) -> RoutesArray:
    experts = routes()
    experts[token, layer] = choices
    return experts


WRONG = {
    "engine reported no experts": None,
    "as int64 [3, 4, 2], and 4 tokens that it read, 4 layers and 2 experts of each token make": routes()[:-1],
    "as int64 [4, 3, 2]": routes()[:, :-1],
    "as int64 [4, 4, 1]": routes()[..., :1],
    "as float64 [4, 4, 2]": routes().astype(np.float64),
    "token 2 went to the experts [1, 4] of layer 3, and there are 4, from 0": changed(2, 3, [1, 4]),
    "token 0 went to the experts [-1, 0] of layer 0": changed(0, 0, [-1, 0]),
    "token 3 went to the experts [2, 2] of layer 2, one of them twice": changed(3, 2, [2, 2]),
}


@pytest.mark.parametrize("message", WRONG)
def test_unsound_experts_are_refused(message: str) -> None:
    assert MOE.num_experts == 4 and MOE.top_k == 2 and MODEL.num_layers == 4, "as the messages say"
    with pytest.raises(RolloutError) as refused:
        checked_routes(replace(sample("p7", 5, RESPONSE), experts=WRONG[message]), PROMPT, MODEL)
    assert str(refused.value).startswith("prompt p7, sample 5: ") and message in str(refused.value)
    assert "Write actor.router_replay=r2" in str(refused.value)


def test_a_token_keeps_the_experts_that_it_was_drawn_with() -> None:
    """A prompt of three tokens, four tokens until it was aborted, and two more: eight were read in the end."""
    prompt = Prompt(id="p", tokens=(1, 2, 3))
    before, again = np.arange(6)[:, None, None], 100 + np.arange(8)[:, None, None]
    so_far = replace(sample(tokens=(4, 5, 6, 7)), experts=before)
    joined = continued(Request(prompt=prompt, so_far=so_far), again)
    assert joined is not None and joined[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 106, 107]
    assert continued(Request(prompt=prompt), again) is again
    assert continued(Request(prompt=prompt, so_far=replace(so_far, experts=None)), again) is again
    assert continued(Request(prompt=prompt), None) is None


def test_an_abort_before_the_first_token_loses_no_experts() -> None:
    """It was aborted after four tokens, again before another was drawn, and then two more were."""
    prompt = Prompt(id="p", tokens=(1, 2, 3))
    before, again = np.arange(6)[:, None, None], 100 + np.arange(8)[:, None, None]
    first = replace(sample(tokens=(4, 5, 6, 7)), experts=before)
    second = replace(first, experts=continued(Request(prompt=prompt, so_far=first), None))
    joined = continued(Request(prompt=prompt, so_far=second), again)
    assert joined is not None and joined[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 106, 107]


def test_a_continuation_that_is_not_recorded_is_refused() -> None:
    """What is left are the experts of the tokens before it."""
    first = replace(sample("p7", 5, RESPONSE[:1]), experts=routes()[:-1])
    left = continued(Request(prompt=Prompt(id="p7", tokens=(1, 2, 3)), so_far=first), None)
    with pytest.raises(RolloutError, match="and 4 tokens that it read"):
        checked_routes(replace(sample("p7", 5, RESPONSE), experts=left), PROMPT, MODEL)
