"""The other families, one engine each: greedy tokens and sampled log-probs are those of transformers, in float32.

The largest differences measured: qwen2 5.5e-6, qwen3 4.8e-6, mixtral and qwen3_moe 3.3e-6, each at temperature 0.7.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.rollout.protocol import Sampling, requests_of
from tests.support import rollouts, text_parts
from tests.support.forked import start_engine
from tests.support.rollouts import chosen, generate, prompts, reference_logprobs

ATOL = 3e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_a_family_draws_as_transformers_computes(family: str, tmp_path: Path, processes: None) -> None:
    model = rollouts.write(family, tmp_path)
    given = prompts(4)
    with start_engine(family, tmp_path, rollouts.config(max_response_length=24)) as engine:
        greedy = generate(engine, requests_of(given, 1), Sampling(max_tokens=24, temperature=0))
        drawn = {
            temperature: generate(
                engine, requests_of(given, 2), Sampling(max_tokens=24, temperature=temperature, ignore_eos=True)
            )
            for temperature in (0.7, 1.0)
        }
    for prompt in given:
        ids = model.generate(torch.tensor([prompt.tokens]), max_new_tokens=24, do_sample=False)[0, len(prompt.tokens) :]
        np.testing.assert_array_equal(greedy[prompt.id, 0].tokens, ids.numpy())
        for temperature, samples in drawn.items():
            for sample in (samples[prompt.id, 0], samples[prompt.id, 1]):
                every = reference_logprobs(model, prompt.tokens, sample.tokens, temperature)
                expected = chosen(every, sample.tokens)
                np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("architecture", ["Qwen3VLMoeForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_the_text_part_of_a_multimodal_checkpoint_draws_as_the_whole(
    architecture: str, tmp_path: Path, processes: None
) -> None:
    """Its files name and stack tensors otherwise than those of the text model, which vLLM runs; no update comes."""
    model = text_parts.write(architecture, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    given = prompts(3)
    with start_engine(architecture, tmp_path / "hf", rollouts.config(max_response_length=16)) as engine:
        drawn = generate(engine, requests_of(given, 1), Sampling(max_tokens=16, temperature=1, ignore_eos=True))
    for prompt in given:
        sample = drawn[prompt.id, 0]
        expected = chosen(reference_logprobs(model, prompt.tokens, sample.tokens, 1), sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL)
