"""Engines that see pictures draw as transformers computes, in float32, sample by sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.rollout.protocol import Sampling, requests_of
from tests.support import picture_models, rollouts, seen_prompts
from tests.support.forked import start_engine
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
    with start_engine(family, tmp_path / "hf", rollouts.config(max_response_length=8), pictures=True) as engine:
        for _ in range(2):
            drawn = generate(engine, requests_of(given, 2), Sampling(max_tokens=8, ignore_eos=True, seed=1))
            for prompt in given:
                for index in range(2):
                    sample = drawn[prompt.id, index]
                    expected = seen_prompts.whole_logprobs(whole, vision, prompt, sample.tokens.tolist())
                    print(family, prompt.id, np.abs(sample.logprobs - expected).max(), sample.cached_tokens)
                    np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL, err_msg=prompt.id)
