"""What vLLM recorded of its routing, put beside what others chose for the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mcore_rl.reports.question import VllmSamples, recorded_routing
from mcore_rl.rollout.protocol import FinishReason, Prompt, Sample

LAYERS, TOP_K = 2, 2


def sample(prompt: str, prompt_tokens: int, tokens: int, experts: int) -> Sample:
    processed = prompt_tokens + tokens - 1  # vLLM never processes the last token
    return Sample(
        prompt_id=prompt, index=0, tokens=np.arange(tokens, dtype=np.int32), logprobs=np.zeros(tokens, np.float32),
        versions=(), finish=FinishReason.length, experts=np.full((processed, LAYERS, TOP_K), experts, np.int16),
    )  # fmt: skip


def test_each_token_has_the_experts_that_vllm_chose_for_it() -> None:
    prompts = {"a": Prompt(id="a", tokens=(1, 2, 3)), "b": Prompt(id="b", tokens=(4,))}
    samples = (sample("a", 3, 2, experts=5), sample("b", 1, 3, experts=7))
    drawn = VllmSamples(prompts=prompts, samples=samples, greedy=(), differing={}, config={})
    theirs_TLK = torch.zeros(9, LAYERS, TOP_K, dtype=torch.int16)
    routing_TLK = recorded_routing(drawn, theirs_TLK)
    assert routing_TLK is not None
    assert routing_TLK[:, 0, 0].tolist() == [5, 5, 5, 5, 0, 7, 7, 7, 0]
    assert (routing_TLK == routing_TLK[:, :1, :1]).all() and not theirs_TLK.any()


def test_nothing_is_compared_where_nothing_was_recorded() -> None:
    prompts = {"a": Prompt(id="a", tokens=(1,))}
    unrecorded = replace(sample("a", 1, 1, experts=1), experts=None)
    drawn = VllmSamples(prompts=prompts, samples=(unrecorded,), greedy=(), differing={}, config={})
    assert recorded_routing(drawn, torch.zeros(2, LAYERS, TOP_K)) is None
    assert recorded_routing(drawn, None) is None
