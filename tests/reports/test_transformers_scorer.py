"""What transformers says of a response: its log-probs under what was drawn from, and where its tokens went."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.reports.question import VllmSamples
from mcore_rl.reports.transformers_scorer import EVERYTHING, TRUNCATED, _transformers_pass, _truncated
from mcore_rl.rollout.protocol import FinishReason, Prompt, Sample, Sampling
from tests.support.published import TINY, class_config

P_V = (0.4, 0.1, 0.3, 0.2)


@pytest.mark.parametrize(
    ("top_p", "top_k", "left"),
    [
        (1.0, -1, {0, 1, 2, 3}),
        (0.7, -1, {0, 2}),  # 0.4 + 0.3 reach it
        (0.71, -1, {0, 2, 3}),
        (0.3, -1, {0}),  # the first always stays
        (1.0, 3, {0, 2, 3}),
        (0.8, 2, {0, 2}),
        (0.5, 2, {0}),  # of the two that are left, 4/7 is enough
    ],
)
def test_what_top_p_and_top_k_leave(top_p: float, top_k: int, left: set[int]) -> None:
    sampling = Sampling(max_tokens=1, top_p=top_p, top_k=top_k)
    kept_V = _truncated(torch.tensor([P_V]).double().log(), sampling).softmax(-1)[0]
    total = sum(P_V[index] for index in left)
    expected = [p / total if index in left else 0.0 for index, p in enumerate(P_V)]
    assert kept_V.tolist() == pytest.approx(expected)


def sample(tokens: list[int], prompt_id: str) -> Sample:
    values = np.array(tokens, dtype=np.int32)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    return Sample(
        prompt_id=prompt_id, index=0, tokens=values, logprobs=logprobs, versions=(), finish=FinishReason.length
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_pass(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(class_config(TINY[name]), attn_implementation="eager").eval()
    prompts = {"a": Prompt(id="a", tokens=(5, 9, 11)), "b": Prompt(id="b", tokens=(20,))}
    samples = (sample([30, 31, 32, 33], "a"), sample([7, 8], "b"))
    with torch.no_grad():
        outputs = [
            model(torch.tensor([[*prompts[s.prompt_id].tokens, *s.tokens.tolist()]]), output_router_logits=True)
            for s in samples
        ]
    likeliest = sample([int(outputs[1].logits[0, 0].argmax()), 3], "b")
    drawn = VllmSamples(prompts=prompts, samples=samples, greedy=(likeliest,), differing={}, config={})
    sampling = Sampling(max_tokens=4, temperature=0.5, top_k=5)
    with torch.no_grad():
        scored = _transformers_pass(model, sampling, drawn)

    rows = [outputs[0].logits[0, 2:6], outputs[1].logits[0, 0:2]]  # what predicted the responses
    for temperature, values in ((0.5, scored.logprobs), (1.0, scored.sampled_from[EVERYTHING])):
        expected = [
            torch.log_softmax(logits / temperature, -1)[torch.arange(len(s.tokens)), torch.from_numpy(s.tokens).long()]
            for logits, s in zip(rows, samples, strict=True)
        ]
        np.testing.assert_allclose(values, torch.cat(expected), atol=1e-6)
    kept = scored.sampled_from[TRUNCATED]
    assert all(math.isinf(x) or x > y for x, y in zip(kept, scored.logprobs, strict=True)), "over fewer tokens"
    assert scored.is_top1.tolist() == [True, False]

    # transformers' own output of the routers, of the layers that have one.
    top_k = model.config.num_experts_per_tok
    layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert scored.routing_TLK is not None and scored.routing_TLK.shape == (10, len(model.model.layers), top_k)
    for place, layer in enumerate(layers):
        logits = torch.cat([output.router_logits[place] for output in outputs])
        expected = logits.topk(top_k).indices.sort(-1).values
        assert scored.routing_TLK[:, layer].long().sort(-1).values.equal(expected)
