"""The engine with replayed experts against transformers whose routers are told the same: one process, every family.

Log-probs, entropies, loss, every gradient, and the share of choices that a router would not have made.  Float32 on both
sides: what differs is the order of sums, about 1e-6; the bound is 1e-5, as in ``test_transformers.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Device
from mcore_rl.ground.types import LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.groups import destroy_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from tests.invariance.problems import MODELS
from tests.support import batches, hf_reference
from tests.support.engine_parity import FLOAT32, Found, build_engine, gradients_of, joined, loss_inputs
from tests.support.forced_routes import ForcedRoutes
from tests.support.forked import run_ranks

TOLERANCE = 1e-5
# All kinds of routers but DeepSeek-V2's: transformers zeroes its scores outside of its own best groups, so that an
# expert that is dictated there has no weight.
NAMES = (
    "moe",
    "qwen_moe",
    "qwen2_moe",
    "olmoe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "minimax_m2",
    "qwen3_5_moe",
)


@dataclass(frozen=True)
class Side:
    """kl: the sum over trained tokens of the exact KL to the same weights, whose routers choose freely."""

    computed: Found
    difference: float
    kl: float


def exact_kl(inputs: LossInputs) -> LossSums:
    assert inputs.full_kl_N is not None
    return LossSums(total=0 * inputs.full_kl_N.sum(), metrics={"kl": (inputs.full_kl_N * inputs.mask_N).sum()})


def told(name: str) -> TrainBatch:
    """Experts at random for all tokens but the last of each sequence and a fifth."""
    batch = batches.ragged(MODELS[name].vocab_size)
    unrouted_T = torch.rand(batch.tokens_T.numel(), generator=torch.Generator().manual_seed(3)) < 0.2
    unrouted_T[torch.tensor(batch.lengths_S).cumsum(0) - 1] = True
    return replace(batch, routing_TLK=batches.routes(batch, MODELS[name]), unrouted_T=unrouted_T)


def _engine_side(rank: Rank, names: tuple[str, ...]) -> dict[str, Side]:
    platform = detect(Device.cpu)
    groups = joined(rank, platform)
    sides = {}
    for name in names:
        start = hf_reference.full_weights(hf_reference.build(MODELS[name]), MODELS[name])
        engine, batch = build_engine(platform, FLOAT32, name, start, groups), told(name)
        scores = engine.score(batch)
        step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
        assert scores.logprobs_T is not None and scores.entropy_T is not None
        kl = _kl_to_itself(build_engine(platform, FLOAT32, name, start, groups), batch)
        computed = Found(scores.logprobs_T, scores.entropy_T, step.loss, gradients_of(engine, start))
        sides[name] = Side(computed, step.metrics["router/difference"], kl)
    destroy_groups()
    return sides


def _kl_to_itself(engine: Engine, batch: TrainBatch) -> float:
    engine.snapshots.take("reference")
    return engine.train_step(batch, exact_kl, batches.denominators(batch), kl_to="reference").metrics["kl"]


@pytest.fixture(scope="module")
def engine_side(processes: None) -> dict[str, Side]:
    return run_ranks(_engine_side, 1, (NAMES,))[0]


def _reference(name: str) -> Side:
    model = MODELS[name]
    reference, freely, batch = hf_reference.build(model), hf_reference.build(model), told(name)
    forced = ForcedRoutes(reference, model)
    assert batch.routing_TLK is not None and batch.unrouted_T is not None
    logprobs, entropies, kl = list[Tensor](), list[Tensor](), 0.0
    for start, length in zip(batch.offsets_S, batch.lengths_S, strict=True):
        part = slice(start, start + length)
        forced.dictate(batch.routing_TLK[part], batch.unrouted_T[part])
        tokens = batch.tokens_T[part]
        log_p = torch.log_softmax(reference(tokens[None]).logits[0].float(), dim=-1)
        logprobs.append(torch.cat([torch.zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]]))
        with torch.no_grad():
            free = torch.log_softmax(freely(tokens[None]).logits[0].float(), dim=-1)
            kl += float(((log_p.exp() * (log_p - free)).sum(-1)[:-1] * batch.mask_T[part][1:]).sum())
    logprobs_T, entropy_T = torch.cat(logprobs), torch.cat(entropies)
    loss = batches.policy_loss(loss_inputs(batch, logprobs_T, entropy_T)).total / batches.denominators(batch).loss
    loss.backward()
    gradients = hf_reference.full_weights(reference, model, gradients=True)
    computed = Found(logprobs_T.detach(), entropy_T.detach(), float(loss.detach()), gradients)
    return Side(computed, forced.differing / forced.replayed, kl)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_experts_are_those_of_a_model_that_was_told(name: str, engine_side: dict[str, Side]) -> None:
    ours, theirs = engine_side[name], _reference(name)
    torch.testing.assert_close(ours.computed.logprobs_T, theirs.computed.logprobs_T, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours.computed.entropy_T, theirs.computed.entropy_T, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.computed.loss == pytest.approx(theirs.computed.loss, rel=TOLERANCE)
    for key, true in theirs.computed.gradients.items():
        error = float((ours.computed.gradients[key] - true).norm() / true.norm())
        assert error < TOLERANCE, f"{key}: relative error {error:.1e}"
    routers = [key for key in theirs.computed.gradients if "router" in key and "bias" not in key]
    assert routers and all(theirs.computed.gradients[key].norm() > 0 for key in routers), (
        "routers learn from replayed rows"
    )
    assert ours.difference == pytest.approx(theirs.difference, abs=1e-6)
    assert ours.kl == pytest.approx(theirs.kl, rel=1e-4) and theirs.kl > 0.05, "the reference chooses freely"
    assert 0.2 < theirs.difference < 0.9, "random experts are seldom a router's own"
