"""All experts at once against Megatron's loop, and tokens that stay against Megatron's dispatcher, bit for bit."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.parallel.launch import Rank
from mcore_rl.planning import activations
from mcore_rl.training import grouped_experts
from tests.support import engines, models
from tests.support.forked import run_ranks

MODELS = {"silu": models.moe, "biases, clamped gate": models.gpt_oss, "eight": models.olmoe}
COUNTS = ([13, 0, 60, 1], [0, 0, 1, 0], [0, 0, 0, 40], [0, 0, 0, 0])
TOKENS = 37
Compared = list[tuple[Tensor, Tensor]]


def first_layer(chunks: list[torch.nn.Module]) -> MoELayer:
    return next(module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer))


def outputs_are_no_views(experts: SequentialMLP) -> None:
    """Megatron's loop adds a bias in place to what autograd takes for a view."""
    for expert in experts.local_experts:
        expert.linear_fc2.register_forward_hook(lambda _, __, results: (results[0].clone(), results[1]))


def of_experts(experts: SequentialMLP, counts: list[int]) -> Compared:
    """(ours, Megatron's): output and gradients of rows, of the router's weights and of every parameter."""
    parameters, width = list(experts.parameters()), experts.config.hidden_size
    dtype, rows = parameters[0].dtype, sum(counts)
    x, probs, grad = torch.randn(rows, width).to(dtype), torch.rand(rows).to(dtype), torch.randn(rows, width).to(dtype)
    results = []
    for forward in (experts.forward, SequentialMLP.forward.__get__(experts)):
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        out, bias = forward(leaves[0], torch.tensor(counts), leaves[1])
        assert bias is None
        results.append([out, *torch.autograd.grad(out, [*leaves, *parameters], grad)])
    return list(zip(*results, strict=True))


def of_dispatchers(layer: MoELayer, model: ModelConfig) -> Compared:
    """(ours, Megatron's): rows, their weights and numbers, sums of tokens, and gradients."""
    assert model.moe is not None and isinstance(layer.token_dispatcher, grouped_experts.LocalDispatcher)
    experts, width, dtype = model.moe.num_experts, model.hidden_size, next(layer.parameters()).dtype
    alltoall = MoEAlltoAllTokenDispatcher(experts, list(range(experts)), layer.config, get_default_pg_collection())
    choices = torch.rand(TOKENS, experts).topk(model.moe.top_k).indices
    chosen = torch.zeros(TOKENS, experts, dtype=torch.bool).scatter(1, choices, True)
    x, probs = torch.randn(TOKENS, 1, width).to(dtype), (torch.rand(TOKENS, experts) * chosen).to(dtype)
    grad = torch.randn(TOKENS, 1, width).to(dtype)
    results = []
    for dispatcher in (layer.token_dispatcher, alltoall):
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        rows, weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(leaves[0], chosen, leaves[1]))
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        out = dispatcher.combine_preprocess(rows * weights[:, None])
        out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
        results.append([rows, weights, counts, out, *torch.autograd.grad(out, leaves, grad)])
    return list(zip(*results, strict=True))


def compared(rank: Rank, model: ModelConfig) -> dict[str, Compared]:
    grouped_experts.PIECE = 16  # several pieces of these few rows
    cases = {}
    with engines.world(rank), engines.groups_of() as groups:
        torch.manual_seed(0)
        for precision in (Precision.float32, Precision.bfloat16):
            engine = engines.build(groups, model, engines.config(precision=precision))
            layer = first_layer(engine.models)
            cases[f"{precision.value}, dispatched"] = of_dispatchers(layer, model)
            outputs_are_no_views(layer.experts)
            more = [0] * (len(layer.experts.local_experts) - 4)
            for counts in COUNTS:
                case = [*counts, *more]
                cases[f"{precision.value}, rows {case}"] = of_experts(layer.experts, case)
    return cases


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", MODELS)
def test_experts_and_dispatch_have_megatrons_bits(name: str, processes: None) -> None:
    for case, pairs in run_ranks(compared, 1, (MODELS[name](),), timeout_s=240)[0].items():
        differing = [place for place, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
        assert not differing, (case, differing)


def test_the_planner_counts_the_piece_that_is_computed() -> None:
    """Neither room may import from the other."""
    assert activations.GATE_PIECE == grouped_experts.PIECE
