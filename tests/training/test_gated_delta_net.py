"""Which heads a context rank computes the rule of, and that log-probs are the same.

The whole module is held to transformers' model by tests/parity and to itself under every layout by tests/invariance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.parallel.launch import Rank
from mcore_rl.training import gated_delta_net
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

pytestmark = pytest.mark.tier("test")


def model_of(key_heads: int) -> ModelConfig:
    """Two value heads share a key head; all layers but one have them."""
    model = models.qwen3_next()
    assert model.linear_attention is not None
    linear = replace(model.linear_attention, num_key_heads=key_heads, num_value_heads=2 * key_heads)
    return replace(model, linear_attention=linear)


def _scored(rank: Rank, layout: str, key_heads: int) -> tuple[Tensor, set[int]]:
    """Log-probs, and how many heads this rank computed the rule of at a time."""
    seen = set()
    rule = gated_delta_net.gated_delta_rule

    def watched(query: Tensor, *rest: Any) -> Tensor:
        seen.add(query.shape[1])
        return rule(query, *rest)

    gated_delta_net.gated_delta_rule = watched  # in this process, which ends with the test
    with engines.world(rank), engines.groups_of(layout) as groups:
        engine = engines.build(groups, model_of(key_heads), layout=layout)
        scores = engine.score(batches.ragged(101))
    assert scores.logprobs_T is not None
    return scores.logprobs_T, seen


@pytest.mark.parametrize(("key_heads", "computed"), [(4, 4), (3, 6)])
def test_context_ranks_divide_the_heads_where_they_can(key_heads: int, computed: int, processes: None) -> None:
    ((alone, all_heads),) = run_ranks(_scored, 1, ("", key_heads))
    assert all_heads == {2 * key_heads}
    for logprobs, heads in run_ranks(_scored, 2, ("cp=2", key_heads)):
        assert heads == {computed}
        torch.testing.assert_close(logprobs, alone, rtol=1e-5, atol=1e-5)
