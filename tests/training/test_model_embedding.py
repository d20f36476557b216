"""Scaled embeddings: transformers' numbers bit for bit, where the factor is rounded to the dtype of the weights."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from mcore_rl.config.engine import Precision
from mcore_rl.parallel.launch import Rank
from tests.support import engines, models
from tests.support.forked import run_ranks

TOKENS = torch.tensor([[3, 100, 0, 7, 7]])


def _embed(rank: Rank) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights and what they make of ``TOKENS``, [s, b, H], by precision."""
    by_precision = {}
    with engines.world(rank), engines.groups_of() as groups:
        for precision in Precision:
            engine = engines.build(groups, models.gemma2(), engines.config(precision=precision), trainable=False)
            embedding = engine.models[0].embedding
            out = embedding(input_ids=TOKENS, position_ids=torch.arange(5)[None])
            by_precision[precision.value] = (embedding.word_embeddings.weight.detach(), out.detach())
    return by_precision


@pytest.fixture(scope="module")
def embedded(processes: None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return run_ranks(_embed, 1)[0]


@pytest.mark.parametrize("precision", [precision.value for precision in Precision])
def test_equals_transformers_bit_for_bit(
    precision: str, embedded: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    weight, embeddings = embedded[precision]
    theirs = Gemma2TextScaledWordEmbedding(*weight.shape, padding_idx=None, embed_scale=48**0.5)  # type: ignore[arg-type]
    theirs.weight = torch.nn.Parameter(weight)
    assert embeddings.dtype == weight.dtype == getattr(torch, precision)
    assert torch.equal(embeddings.transpose(0, 1), theirs(TOKENS))
