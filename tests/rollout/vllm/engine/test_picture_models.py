"""Engines that see pictures draw as transformers computes, in float32, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.rollout.episodes import VersionSpan
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, aborted, requests_of
from tests.support import picture_models, rollouts, seen_prompts
from tests.support.forked import start_engine
from tests.support.picture_models import PICTURE
from tests.support.rollouts import generate

ATOL = 5e-6


@pytest.mark.parametrize("family", picture_models.ARCHITECTURES)
def test_log_probs_of_rows_with_pictures_are_those_of_transformers(
    family: str, tmp_path: Path, processes: None
) -> None:
    picture_models.write(family, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    vision = model_of(read_config(tmp_path / "hf"), pictures=True)[1].vision
    assert vision is not None
    whole, given = seen_prompts.whole_model(tmp_path / "hf"), seen_prompts.prompts(vision)
    (one,) = seen_prompts.prompts(vision, ["one"])
    with start_engine(family, tmp_path / "hf", rollouts.config(max_response_length=8), pictures=True) as engine:
        sampling = Sampling(max_tokens=8, ignore_eos=True, seed=1)
        for _ in range(2):  # the second time from the prefix cache, as far as it goes
            drawn = generate(engine, requests_of(given, 2), sampling)
            for prompt in given:
                for index in range(2):
                    tokens = drawn[prompt.id, index].tokens.tolist()
                    expected = seen_prompts.whole_logprobs(whole, vision, prompt, tokens)
                    np.testing.assert_allclose(drawn[prompt.id, index].logprobs, expected, rtol=0, atol=ATOL)
        (continued,) = generate(engine, [Request(prompt=one, so_far=_drew_a_placeholder(one))], sampling).values()
    expected = seen_prompts.whole_logprobs(whole, vision, one, continued.tokens.tolist())
    np.testing.assert_allclose(continued.logprobs[2:], expected[2:], rtol=0, atol=ATOL)


def _drew_a_placeholder(prompt: Prompt) -> Sample:
    """A sample that was given up behind two tokens, of which the first is that of pictures."""
    return replace(
        aborted(Request(prompt=prompt)),
        tokens=np.array([PICTURE, 20], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        versions=(VersionSpan(version=0, start=0, end=2),),
    )
