"""The router's losses against a float64 calculation by hand, however the batch is cut; and their recomputation.

The hand calculation starts from the hidden states that enter each router, caught one whole sequence at a time, so it
knows nothing of packing, padding or microbatches.  The engine is float32 and its sums run over 125 tokens at most;
errors are about 1e-7 of each term, and the bound is 1e-5 of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from mcore_rl.config.engine import AuxLoss, EngineConfig, MoeTrainConfig, OptimizerConfig, Recompute
from mcore_rl.ground.types import LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.training.router import Router, routers_of
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

TOLERANCE = 1e-5
AUX, Z = 0.3, 0.02
CUTS = {
    "one microbatch": dict(microbatch_tokens=4096),
    "packed": dict(microbatch_tokens=48),
    "one by one": dict(microbatch_tokens=None, microbatch_sequences=1),
    "padded": dict(microbatch_tokens=None, microbatch_sequences=4),
    "padded and recomputed": dict(microbatch_tokens=None, microbatch_sequences=4, recompute=Recompute.full),
    "packed and recomputed": dict(microbatch_tokens=48, recompute=Recompute.full),
}
TERMS = {
    "sequence": MoeTrainConfig(aux_loss=AuxLoss.sequence, aux_loss_coeff=AUX),
    "batch": MoeTrainConfig(aux_loss=AuxLoss.batch, aux_loss_coeff=AUX),
    "z": MoeTrainConfig(z_loss_coeff=Z),
}
MODEL = models.moe(num_layers=2)
MOE = MODEL.moe
assert MOE is not None


def nothing(inputs: LossInputs) -> LossSums:
    """No loss of the policy's own: what is left is the routers'."""
    assert inputs.logprobs_N is not None
    return LossSums(total=0 * inputs.logprobs_N.sum(), metrics={})


@dataclass
class Trained:
    """One step at rate 0: gradients of the routers' weights, by layer, and the metrics."""

    gradients: list[Tensor]
    metrics: dict[str, float]


@dataclass
class Observed:
    inputs_LTH: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    by_term: dict[tuple[str, str], Trained] = field(default_factory=dict)
    by_recompute: dict[Recompute, dict[str, Tensor]] = field(default_factory=dict)
    dictated_LTH: list[Tensor] = field(default_factory=list)
    by_dictated: dict[str, float] = field(default_factory=dict)
    unused: dict[str, float] = field(default_factory=dict)
    num_registered: int = -1


def at_rest(**changes: object) -> EngineConfig:
    """Rate 0 and no clipping: the gradients stay in place after a step."""
    return engines.config(optim=OptimizerConfig(lr=0.0, clip_grad=0.0), **changes)


def _router_inputs(engine: Engine, batch: TrainBatch) -> list[Tensor]:
    caught: list[list[Tensor]] = [[] for _ in range(MODEL.num_layers)]
    handles = [
        router.register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[0].detach().flatten(0, 1)))
        for router, kept in zip(routers_of(engine.models), caught, strict=True)
    ]
    engine.score(batch)
    for handle in handles:
        handle.remove()
    return [torch.cat(kept).double() for kept in caught]


def _train(groups: ProcessGroups, batch: TrainBatch, settings: EngineConfig) -> Trained:
    engine = engines.build(groups, MODEL, settings)
    step = engine.train_step(batch, nothing, batches.denominators(batch))
    return Trained([router.weight.main_grad.clone() for router in routers_of(engine.models)], step.metrics)


def dictated(batch: TrainBatch) -> TrainBatch:
    """The same batch with experts at random for every token."""
    return replace(batch, routing_TLK=batches.routes(batch, MODEL))


def _observe(rank: Rank) -> Observed:
    seen, batch = Observed(), batches.ragged(MODEL.vocab_size)
    with engines.world(rank), engines.groups_of() as groups:
        engine = engines.build(groups, MODEL, at_rest(microbatch_tokens=None, microbatch_sequences=1))
        seen.inputs_LTH = _router_inputs(engine, batch)
        seen.weights = [router.weight.detach().double() for router in routers_of(engine.models)]
        for term, terms in TERMS.items():
            for cut, sizes in CUTS.items():
                seen.by_term[term, cut] = _train(groups, batch, at_rest(moe=terms, **sizes))
        seen.dictated_LTH = _router_inputs(engine, dictated(batch))
        for term in ("sequence", "batch"):
            told = _train(groups, dictated(batch), at_rest(moe=TERMS[term], microbatch_tokens=48))
            seen.by_dictated[term] = told.metrics["router/aux_loss"]
        seen.unused = _train(groups, batch, at_rest()).metrics
        for recompute in Recompute:
            engine = engines.build(groups, MODEL, at_rest(recompute=recompute, microbatch_tokens=32))
            engine.train_step(dictated(batch), batches.policy_loss, batches.denominators(batch), with_entropy=True)
            seen.by_recompute[recompute] = {
                name: parameter.main_grad.clone() for name, parameter in engine.models[0].named_parameters()
            }
        seen.num_registered = len(RouterReplay.global_router_replay_instances)
    return seen


@pytest.fixture(scope="module")
def observed(processes: None) -> Observed:
    return run_ranks(_observe, 1)[0]


# ---- by hand, in float64 ----


def balance(inputs_TH: Tensor, weight: Tensor, lengths: tuple[int, ...], choices_TK: Tensor | None = None) -> Tensor:
    """Mean over ``lengths`` of ``E/K sum_e f_e P_e`` (arXiv:2101.03961, eq. 4; arXiv:2412.19437, eq. 17).

    choices_TK: the experts that tokens went to; None: the best.
    """
    losses = []
    if choices_TK is None:
        choices_TK = (inputs_TH @ weight.t()).topk(MOE.top_k).indices
    for part_TH, taken_TK in zip(inputs_TH.split(list(lengths)), choices_TK.split(list(lengths)), strict=True):
        probs_TE = torch.softmax(part_TH @ weight.t(), dim=-1)
        loss = torch.zeros((), dtype=torch.float64)
        for expert in range(MOE.num_experts):
            chosen = sum(expert in choices for choices in taken_TK.tolist())
            share = chosen / len(part_TH)
            loss = loss + MOE.num_experts / MOE.top_k * share * probs_TE[:, expert].mean()
        losses.append(loss)
    return torch.stack(losses).mean()


def by_hand(term: str, inputs_TH: Tensor, weight: Tensor) -> Tensor:
    lengths = batches.LENGTHS
    if term == "z":
        return Z * torch.logsumexp(inputs_TH @ weight.t(), dim=-1).square().mean()
    return AUX * balance(inputs_TH, weight, lengths if term == "sequence" else (sum(lengths),))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("term", TERMS)
def test_the_value_is_that_of_the_formula(term: str, cut: str, observed: Observed) -> None:
    expected = sum(float(by_hand(term, *layer)) for layer in zip(observed.inputs_LTH, observed.weights, strict=True))
    metrics = observed.by_term[term, cut].metrics
    named, other = ("router/z_loss", "router/aux_loss") if term == "z" else ("router/aux_loss", "router/z_loss")
    assert metrics[named] == pytest.approx(expected, rel=TOLERANCE)
    assert metrics[other] == 0


@pytest.mark.parametrize("term", ["sequence", "batch"])
def test_the_loads_are_those_of_dictated_experts(term: str, observed: Observed) -> None:
    routing_TLK = dictated(batches.ragged(MODEL.vocab_size)).routing_TLK
    assert routing_TLK is not None
    lengths = batches.LENGTHS if term == "sequence" else (sum(batches.LENGTHS),)
    layers = enumerate(zip(observed.dictated_LTH, observed.weights, strict=True))
    expected = sum(AUX * float(balance(*each, lengths, routing_TLK[:, layer])) for layer, each in layers)
    assert observed.by_dictated[term] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("term", TERMS)
def test_the_gradient_is_that_of_the_formula(term: str, cut: str, observed: Observed) -> None:
    """Of the last router's weight: the losses of later layers would flow back into an earlier one's."""
    weight = observed.weights[-1].clone().requires_grad_()
    by_hand(term, observed.inputs_LTH[-1], weight).backward()
    assert weight.grad is not None and weight.grad.norm() > 1e-4, "nothing was compared"
    gradient = observed.by_term[term, cut].gradients[-1].double()
    assert (gradient - weight.grad).norm() < TOLERANCE * weight.grad.norm()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("term", TERMS)
def test_the_cut_does_not_matter_to_any_layer(term: str, cut: str, observed: Observed) -> None:
    first = observed.by_term[term, "one by one"].gradients
    for ours, theirs in zip(observed.by_term[term, cut].gradients, first, strict=True):
        assert (ours - theirs).norm() < TOLERANCE * theirs.norm()


def test_the_losses_differ(observed: Observed) -> None:
    """Else the tests above could not tell one from another."""
    gradients = [observed.by_term[term, "packed"].gradients[-1] for term in TERMS]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (gradients[one] - gradients[other]).norm() > 0.01 * gradients[one].norm()


def test_without_terms_there_are_no_losses(observed: Observed) -> None:
    assert observed.unused["router/aux_loss"] == observed.unused["router/z_loss"] == 0


# ---- recomputation and what is left ----


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_the_recomputation_repeats_what_was_dictated(recompute: Recompute, observed: Observed) -> None:
    """Each of five microbatches has its own dictated experts.  The same operations run again, so the same bits come."""
    assert engines.same_bits(observed.by_recompute[recompute], observed.by_recompute[Recompute.none])
    assert all(gradient.any() for gradient in observed.by_recompute[Recompute.none].values())


def test_megatrons_own_list_holds_no_router(observed: Observed) -> None:
    assert observed.num_registered == 0


def test_routers_come_in_the_order_of_the_layers() -> None:
    def layer(number: int) -> torch.nn.Module:
        router = Router.__new__(Router)
        torch.nn.Module.__init__(router)
        router.layer_number = number
        return torch.nn.ModuleList([torch.nn.Linear(1, 1), router])

    assert [router.layer_number for router in routers_of([layer(3), layer(7), layer(1)])] == [1, 3, 7]
