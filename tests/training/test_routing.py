"""Recorded and replayed routing under each layout of two ranks, against transformers' choices and counts by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import EngineConfig, OptimizerConfig, Recompute
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.types import TokenScores, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from tests.support import batches, engines, full_weights, hf_reference, models
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

MODEL = models.moe()
MOE = MODEL.moe
assert MOE is not None
DIFFERENCE = "router/difference"
LAYOUTS = ["", "tp=2,etp=1", "cp=2", "pp=2", "pp=2,vpp=2", "ep=2"]


@dataclass
class Observed:
    """What one rank saw of its own share under one layout.  gradients: by the name of the parameter."""

    free: TokenScores
    replayed: TokenScores
    dictated: TokenScores
    partly: TokenScores
    free_metrics: dict[str, float]
    dictated_metrics: dict[str, float]
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def dictated(batch: TrainBatch) -> TrainBatch:
    """The same batch with experts at random for every token."""
    return replace(batch, routing_TLK=batches.routes(batch, MODEL))


def partly_dictated(batch: TrainBatch) -> TrainBatch:
    """The same, but every third token, and the last of each sequence, chooses by itself."""
    unrouted_T = torch.arange(batch.tokens_T.numel()) % 3 == 0
    unrouted_T[torch.tensor(batch.lengths_S).cumsum(0) - 1] = True
    return replace(dictated(batch), unrouted_T=unrouted_T)


def at_rest(**changes: object) -> EngineConfig:
    """Rate 0 and no clipping: the gradients stay in place after a step.  Packed, three microbatches or more."""
    return engines.config(optim=OptimizerConfig(lr=0.0, clip_grad=0.0), microbatch_tokens=36, **changes)


def _train(engine: Engine, batch: TrainBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and router metrics of one step; ``batch`` is this rank's share of the one batch of all tests."""
    whole = batches.denominators(batches.ragged(MODEL.vocab_size))
    step = engine.train_step(batch, batches.policy_loss, whole, with_entropy=True)
    gradients = {
        f"{stage}.{name}": parameter.main_grad.clone()
        for stage, chunk in enumerate(engine.models)
        for name, parameter in chunk.named_parameters()
    }
    return gradients, {name: value for name, value in step.metrics.items() if name.startswith("router/")}


def _observe(rank: Rank, start: Weights) -> dict[str, Observed]:
    by_layout = {}
    with engines.world(rank):
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:

                def build(groups: object = groups, layout: str = layout, **changes: object) -> Engine:
                    load = lambda chunks: full_weights.load_full(chunks, start)  # noqa: E731
                    return engines.build(groups, MODEL, at_rest(**changes), layout=layout, load=load)

                batch = engines.share_of(batches.ragged(MODEL.vocab_size), groups)
                engine, told = build(), engines.share_of(dictated(batches.ragged(MODEL.vocab_size)), groups)
                in_part = engines.share_of(partly_dictated(batches.ragged(MODEL.vocab_size)), groups)
                free = engine.score(batch, record_routing=True)
                replay = replace(batch, routing_TLK=free.routing_TLK)
                seen = Observed(
                    free=free,
                    replayed=engine.score(replay, record_routing=True),
                    dictated=engine.score(told, record_routing=True),
                    partly=engine.score(in_part, record_routing=True),
                    free_metrics={},
                    dictated_metrics={},
                )
                seen.gradients["free"], seen.free_metrics = _train(engine, batch)
                seen.gradients["replayed"], again = _train(engine, replay)
                assert again == seen.free_metrics | {DIFFERENCE: 0.0}, "its own choices are those that it replays"
                seen.gradients["dictated"], seen.dictated_metrics = _train(engine, told)
                seen.gradients["recomputed"], again = _train(build(recompute=Recompute.full), told)
                assert again == seen.dictated_metrics, "a recomputed forward was counted"
                by_layout[layout] = seen
    return by_layout


@pytest.fixture(scope="module")
def reference() -> Weights:
    return hf_reference.full_weights(hf_reference.build(MODEL), MODEL)


@pytest.fixture(scope="module")
def observed(reference: Weights, processes: None) -> list[dict[str, Observed]]:
    return run_ranks(_observe, 2, (reference,))


@pytest.fixture(scope="module")
def their_choices_TLK() -> Tensor:
    """transformers' experts, one sequence at a time, in the order of their scores."""
    model, batch = hf_reference.build(MODEL), batches.ragged(MODEL.vocab_size)
    chosen = []
    for tokens in batch.tokens_T.split(list(batch.lengths_S)):
        with torch.no_grad():
            by_layer = model(tokens[None], output_router_logits=True).router_logits
        chosen.append(torch.stack([scores_TE.topk(MOE.top_k).indices for scores_TE in by_layer], dim=1))
    return torch.cat(chosen)


def share_of(batch: TrainBatch, layout: str, rank: int) -> TrainBatch:
    """A rank's share of the whole batch."""
    shape = Layout.of(parse_layout(layout), 2)
    return batch.select(range(shape.coords(rank).dp, len(batch.lengths_S), shape.dp))


def shares(observed: list[dict[str, Observed]], layout: str) -> list[tuple[TrainBatch, Observed]]:
    """(its share of the batch, what it saw) of each rank."""
    batch = batches.ragged(MODEL.vocab_size)
    return [(share_of(batch, layout, rank), seen[layout]) for rank, seen in enumerate(observed)]


def choices_of(whole_TLK: Tensor, layout: str, rank: int) -> Tensor:
    """A rank's share of the choices for the whole batch."""
    batch = replace(batches.ragged(MODEL.vocab_size), routing_TLK=whole_TLK.to(torch.uint8))
    mine = share_of(batch, layout, rank).routing_TLK
    assert mine is not None
    return mine


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recorded_choices_are_those_of_transformers(
    layout: str, observed: list[dict[str, Observed]], their_choices_TLK: Tensor
) -> None:
    """For every token, layer and rank, in the same order; no score of this batch is within rounding of another."""
    for rank, seen in enumerate(observed):
        ours_TLK = seen[layout].free.routing_TLK
        assert ours_TLK is not None and ours_TLK.dtype == torch.uint8 and ours_TLK.device.type == "cpu"
        assert torch.equal(ours_TLK, choices_of(their_choices_TLK, layout, rank))


@pytest.mark.tier("test")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaying_what_was_recorded_changes_no_bit(layout: str, observed: list[dict[str, Observed]]) -> None:
    for seen in observed:
        assert engines.same_bits(vars(seen[layout].replayed), vars(seen[layout].free))
        assert engines.same_bits(seen[layout].gradients["replayed"], seen[layout].gradients["free"])
        assert all(gradient.any() for gradient in seen[layout].gradients["free"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dictated_happens(layout: str, observed: list[dict[str, Observed]]) -> None:
    told_TLK = dictated(batches.ragged(MODEL.vocab_size)).routing_TLK
    assert told_TLK is not None
    for rank, (batch, seen) in enumerate(shares(observed, layout)):
        happened_TLK = seen.dictated.routing_TLK
        assert happened_TLK is not None and torch.equal(happened_TLK, choices_of(told_TLK, layout, rank))
        assert seen.free.logprobs_T is not None and seen.dictated.logprobs_T is not None
        first_T = torch.zeros(batch.tokens_T.numel(), dtype=torch.bool)
        first_T[list(batch.offsets_S)] = True
        change_T = (seen.dictated.logprobs_T - seen.free.logprobs_T).abs()
        assert (change_T[~first_T] > 1e-4).float().mean() > 0.9  # rounding would move them by 1e-6
        assert not change_T[first_T].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_a_choice_choose_by_themselves(
    layout: str, observed: list[dict[str, Observed]], their_choices_TLK: Tensor
) -> None:
    """In the first layer, whose input no choice has changed, as transformers does; what the others take is dictated."""
    told = partly_dictated(batches.ragged(MODEL.vocab_size))
    for rank, seen in enumerate(observed):
        share, theirs_TLK = share_of(told, layout, rank), choices_of(their_choices_TLK, layout, rank)
        happened_TLK, free_T = seen[layout].partly.routing_TLK, share.unrouted_T
        assert happened_TLK is not None and share.routing_TLK is not None and free_T is not None
        assert torch.equal(happened_TLK[~free_T], share.routing_TLK[~free_T])
        assert torch.equal(happened_TLK[free_T, 0], theirs_TLK[free_T, 0])
        assert not torch.equal(happened_TLK[free_T, 1:], theirs_TLK[free_T, 1:]), "later layers see what others took"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recomputation_replays_too(layout: str, observed: list[dict[str, Observed]]) -> None:
    """The same operations run again, so the same bits come; on the first stage several microbatches wait for it."""
    for seen in observed:
        assert engines.same_bits(seen[layout].gradients["recomputed"], seen[layout].gradients["dictated"])
        assert not engines.same_bits(seen[layout].gradients["dictated"], seen[layout].gradients["free"])


def load_by_hand(choices_TLK: Tensor) -> dict[str, float]:
    """The load statistics of the whole batch: shares of (token, choice) pairs, padding unknown."""
    num_tokens, num_layers, _ = choices_TLK.shape
    shares, entropies = [], []
    for layer in range(num_layers):
        counts = [int((choices_TLK[:, layer] == expert).sum()) for expert in range(MOE.num_experts)]
        assert sum(counts) == num_tokens * MOE.top_k
        share_E = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        shares.append(share_E)
        entropies.append(-(share_E * share_E.clamp(min=1e-30).log()).sum() / torch.tensor(MOE.num_experts).log())
    return {
        "router/load_max": MOE.num_experts * float(torch.stack(shares).max()),
        "router/load_min": MOE.num_experts * float(torch.stack(shares).min()),
        "router/load_entropy": float(torch.stack(entropies).mean()),
        "router/aux_loss": 0.0,
        "router/z_loss": 0.0,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", ["free", "dictated"])
def test_the_statistics_are_those_counted_by_hand(
    choice: str, layout: str, observed: list[dict[str, Observed]], their_choices_TLK: Tensor
) -> None:
    """Counts are whole numbers, so float32 shares are off by a rounding or two: 1e-6."""
    told_TLK = dictated(batches.ragged(MODEL.vocab_size)).routing_TLK
    expected = load_by_hand(their_choices_TLK if choice == "free" or told_TLK is None else told_TLK)
    for seen in observed:
        metrics = seen[layout].free_metrics if choice == "free" else seen[layout].dictated_metrics
        assert (DIFFERENCE in metrics) is (choice == "dictated"), "of what is replayed, and of nothing else"
        counted = {name: value for name, value in metrics.items() if name != DIFFERENCE}
        assert counted == pytest.approx(expected, rel=1e-6)


def test_the_two_statistics_differ(their_choices_TLK: Tensor) -> None:
    told_TLK = dictated(batches.ragged(MODEL.vocab_size)).routing_TLK
    assert told_TLK is not None
    assert load_by_hand(their_choices_TLK) != pytest.approx(load_by_hand(told_TLK), rel=1e-2)
