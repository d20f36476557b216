"""Prompts whose pictures an engine cannot take are refused before anything is drawn, each with its mistake."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import MadePatches, Prompt, PromptPicture, Request, Sampling
from mcore_rl.rollout.vllm.engine.request_checks import Limits, demand_requests
from tests.rollout.vllm.engine.test_patch_files import PROMPT, VISION

LIMITS = Limits(
    name="engine 0", max_prompt_length=60, max_response_length=8, vocab_size=200, has_tokenizer=False, tower=VISION
)


def refused(prompt: Prompt, limits: Limits = LIMITS, max_tokens: int = 8) -> str:
    with pytest.raises(RolloutError) as caught:
        demand_requests([Request(prompt=prompt)], Sampling(max_tokens=max_tokens), limits)
    return str(caught.value)


def with_first(**changes: object) -> Prompt:
    first = PROMPT.pictures[0]
    made = PromptPicture(
        replace(first.placed, **{name: value for name, value in changes.items() if name == "first"}),  # type: ignore[arg-type]
        MadePatches(changes.get("patches", first.read())),  # type: ignore[arg-type]
    )
    return replace(PROMPT, pictures=(made, *PROMPT.pictures[1:]))


def test_sound_pictures_are_taken_and_their_tokens_count() -> None:
    demand_requests([Request(prompt=PROMPT)], Sampling(max_tokens=8), LIMITS)
    short = replace(LIMITS, max_prompt_length=len(PROMPT.tokens) - 1)
    assert f"has {len(PROMPT.tokens)} tokens" in refused(PROMPT, short)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (with_first(patches=PROMPT.pictures[0].read().astype(np.float32) / 255), "float32 of (16, 1536)"),
        (with_first(patches=PROMPT.pictures[0].read()[:12]), "uint8 of (12, 1536)"),
        (with_first(patches=PROMPT.pictures[0].read()[:, :1176]), "takes uint8 of 1536 a patch"),
        (with_first(first=1), "picture 0 stands on tokens of several ids"),
    ],
)
def test_pictures_that_are_none_of_the_model_are_refused(prompt: Prompt, problem: str) -> None:
    assert problem in refused(prompt)


def test_an_engine_of_text_takes_no_pictures() -> None:
    assert "has pictures, and the engine's model reads text" in refused(PROMPT, replace(LIMITS, tower=None))
