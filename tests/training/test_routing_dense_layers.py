"""Routing of a model in which some layers are dense: records, replays and statistics are those of the others alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.parallel.launch import Rank
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

MODEL = models.qwen2_moe()
MOE = MODEL.moe
assert MOE is not None
DENSE, WITH_EXPERTS = [0, 2], [1, 3]


@dataclass
class Observed:
    routing_TLK: Tensor
    metrics: dict[str, float]
    logprobs_T: Tensor
    replayed_T: Tensor


def _observe(rank: Rank) -> Observed:
    batch = batches.ragged(MODEL.vocab_size)
    with engines.world(rank), engines.groups_of() as groups:
        engine = engines.build(groups, MODEL)
        scores = engine.score(batch, record_routing=True)
        assert scores.routing_TLK is not None and scores.logprobs_T is not None
        garbage_TLK = scores.routing_TLK.clone()
        garbage_TLK[:, DENSE] = 99
        replayed_T = engine.score(replace(batch, routing_TLK=garbage_TLK)).logprobs_T
        assert replayed_T is not None
        step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
    return Observed(scores.routing_TLK, step.metrics, scores.logprobs_T, replayed_T)


@pytest.fixture(scope="module")
def observed(processes: None) -> Observed:
    return run_ranks(_observe, 1)[0]


def _of_many(rank: Rank) -> tuple[Tensor, bool]:
    """The record of a model with 300 experts, and whether its replay is recorded as it was."""
    moe = replace(MOE, num_experts=300, dense_layers=[0, 1, 2], ffn_hidden_size=4)
    model = replace(MODEL, moe=moe)
    batch = batches.ragged(model.vocab_size)
    with engines.world(rank), engines.groups_of() as groups:
        engine = engines.build(groups, model)
        routing_TLK = engine.score(batch, record_routing=True).routing_TLK
        again_TLK = engine.score(replace(batch, routing_TLK=routing_TLK), record_routing=True).routing_TLK
    assert routing_TLK is not None and again_TLK is not None
    return routing_TLK, torch.equal(again_TLK, routing_TLK)


def test_more_than_256_experts_are_recorded_in_two_bytes(processes: None) -> None:
    routing_TLK, same = run_ranks(_of_many, 1)[0]
    assert routing_TLK.dtype == torch.int16 and same
    assert 255 < routing_TLK.max() < 300 and routing_TLK.min() >= 0


def test_records_of_dense_layers_are_empty(observed: Observed) -> None:
    assert not observed.routing_TLK[:, DENSE].any()
    assert observed.routing_TLK[:, WITH_EXPERTS].sum(-1).all()


def test_replays_of_dense_layers_are_not_read(observed: Observed) -> None:
    assert torch.equal(observed.replayed_T, observed.logprobs_T)


def test_statistics_leave_dense_layers_out(observed: Observed) -> None:
    """By hand from the record.  The first step trains the weights that scored, so it chooses the same experts."""
    shares = []
    for layer in WITH_EXPERTS:
        chosen = observed.routing_TLK[:, layer].flatten().long()
        shares.append(torch.bincount(chosen, minlength=MOE.num_experts).double() / chosen.numel())
    share_LE = torch.stack(shares)
    entropy_L = -(share_LE * share_LE.log()).sum(1) / torch.tensor(float(MOE.num_experts)).log()
    expected = (share_LE.max() * MOE.num_experts, share_LE.min() * MOE.num_experts, entropy_L.mean())
    for name, value in zip(("load_max", "load_min", "load_entropy"), expected, strict=True):
        assert observed.metrics[f"router/{name}"] == pytest.approx(float(value), rel=1e-5)
