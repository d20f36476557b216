"""The single-process engine with adapters against PEFT: log-probs, loss, adapter gradients, two AdamW steps.

PEFT wraps linear modules; transformers keeps the experts of a layer in one tensor, which it cannot wrap by expert.  So
models with experts are held twice: against PEFT with adapters on attention, and, on all linears, against transformers
computing with ``W + scale * B A``, which autograd differentiates to A and B.  Float32; the bound is 1e-5, as in
``test_transformers.py``.  What PEFT computes is skipped where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import peft
import pytest
import torch
from torch.func import functional_call

from mcore_rl.config.engine import Device, OptimizerConfig
from mcore_rl.config.lora import ALL_LINEAR, LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from tests.invariance.problems import MODELS, Case, Problem
from tests.support import adapters, batches, full_weights, hf_reference
from tests.support.engine_runs import engine_config
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

TOLERANCE, STEPS = 1e-5, 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ROOT = LoraConfig(rank=4, alpha=6.0, use_rslora=True, exclude_modules=["k_proj", "down_proj"])
# Name -> the model, its adapters, and whether PEFT computes the other side.
CASES: dict[str, tuple[str, LoraConfig, bool]] = {
    "dense": ("dense", adapters.LORA, True),
    "biases and excluded layers": ("tied", ROOT, True),
    "the output projection": ("dense", replace(adapters.LORA, target_modules=["q_proj", "lm_head"]), True),
    "fused projections": ("phi3", adapters.LORA, True),
    "norms behind the outputs": ("gemma2", adapters.LORA, True),
    "attention beside experts": ("moe", replace(adapters.LORA, target_modules=ATTENTION), True),
    "latent attention": ("deepseek_v3", replace(adapters.LORA, target_modules=LATENT), True),
    "every expert": ("moe", adapters.LORA, False),
    "latent attention, dense layers, shared experts": ("deepseek_v3", adapters.LORA, False),
    "experts with biases": ("gpt_oss", adapters.LORA, False),
}


@dataclass
class Side:
    """What one side computed.  gradients: of the first step, not clipped.  weights: after all steps."""

    logprobs_T: torch.Tensor
    losses: list[float]
    gradients: Weights
    weights: Weights


def _optim() -> OptimizerConfig:
    return OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, clip_grad=0.0)


def _engine_side(rank: Rank, names: tuple[str, ...]) -> dict[str, Side]:
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    sides = {}
    for name in names:
        model, lora = MODELS[CASES[name][0]], CASES[name][1]
        table = adapters.adapter_table(model, lora)
        config = replace(engine_config(Case(problem=Problem(model=CASES[name][0]))), optim=_optim())
        engine = Engine("actor", model, ParallelConfig(), config, groups, platform, adapters=table)
        start = hf_reference.full_weights(hf_reference.build(model), model)
        engine.load_weights(lambda models, start=start: full_weights.load_full(models, start))
        given = adapters.drawn(table)
        engine.load_weights(lambda models, table=table, given=given: adapters.load(models, table, 0, given))
        batch = batches.ragged(model.vocab_size)
        logprobs_T = engine.score(batch).logprobs_T
        assert logprobs_T is not None
        losses, gradients = [], Weights()
        for step in range(STEPS):
            result = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
            losses.append(result.loss)
            gradients = gradients if step else adapters.gather_gradients(engine, table)
        left = full_weights.gather_full(engine.models, start)
        assert all(torch.equal(left[key], start[key]) for key in start), "a weight of the base moved"
        sides[name] = Side(logprobs_T, losses, gradients, adapters.gather(engine, table))
    destroy_groups()
    return sides


@pytest.fixture(scope="module")
def engine_side(processes: None) -> dict[str, Side]:
    return run_ranks(_engine_side, 1, (tuple(CASES),))[0]


def _trained(logits_of: Callable[[torch.Tensor], torch.Tensor], trained: Weights, model: ModelConfig) -> Side:
    """Two steps of torch's AdamW on the leaves ``trained``."""
    batch, optim = batches.ragged(model.vocab_size), _optim()
    stepper = torch.optim.AdamW(
        trained.values(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    side = Side(torch.empty(0), [], {}, {})
    for step in range(STEPS):
        stepper.zero_grad()
        logprobs_T, _, loss = batches.whole_loss(logits_of, batch)
        loss.backward()
        side.losses.append(float(loss.detach()))
        if not step:
            side.logprobs_T = logprobs_T.detach()
            side.gradients = {name: tensor.grad.clone() for name, tensor in trained.items()}
        stepper.step()
    side.weights = {name: tensor.detach() for name, tensor in trained.items()}
    return side


def _peft_side(model: ModelConfig, lora: LoraConfig, given: Weights) -> Side:
    wanted = ALL_LINEAR if lora.target_modules == [ALL_LINEAR] else lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, target_modules=wanted,
        exclude_modules=lora.exclude_modules or None, lora_dropout=0.0,
    )  # fmt: skip
    wrapped = peft.get_peft_model(hf_reference.build(model), config)
    trained = {
        name.replace(".default.weight", ".weight"): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert trained.keys() == given.keys(), "PEFT adapts other layers, or names them otherwise"
    with torch.no_grad():
        for name, parameter in trained.items():
            assert parameter.shape == given[name].shape, f"PEFT's {name} has shape {tuple(parameter.shape)}"
            parameter.copy_(given[name])
    return _trained(lambda tokens: wrapped(tokens).logits, trained, model)


def _merged_side(model: ModelConfig, lora: LoraConfig, given: Weights) -> Side:
    reference = hf_reference.build(model)
    base = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    trained = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}

    def change(module: str) -> torch.Tensor:
        a, b = (trained[f"{adapters.PEFT}{module}.lora_{which}.weight"] for which in "AB")
        return lora.alpha / lora.rank * (b @ a)

    def weights() -> Weights:
        merged = dict(base)
        for layer in range(model.num_layers):
            experts = f"model.layers.{layer}.mlp.experts."
            if f"{experts}gate_up_proj" in base:
                files, (gate, up, down) = experts, ("gate_proj", "up_proj", "down_proj")
                if f"{adapters.PEFT}model.layers.{layer}.block_sparse_moe.experts.0.w1.lora_A.weight" in given:
                    files, (gate, up, down) = f"model.layers.{layer}.block_sparse_moe.experts.", ("w1", "w3", "w2")
                num = base[f"{experts}down_proj"].shape[0]
                ups = [(change(f"{files}{e}.{gate}"), change(f"{files}{e}.{up}")) for e in range(num)]
                downs = torch.stack([change(f"{files}{e}.{down}") for e in range(num)])
                if model.linear_bias:  # gpt-oss: inputs by outputs, the rows of gate and up in turns
                    rows = torch.stack([torch.stack(pair, dim=1).flatten(0, 1).T for pair in ups])
                    downs = downs.transpose(1, 2)
                else:
                    rows = torch.stack([torch.cat(pair) for pair in ups])
                merged[f"{experts}gate_up_proj"] = base[f"{experts}gate_up_proj"] + rows
                merged[f"{experts}down_proj"] = base[f"{experts}down_proj"] + downs
        for name in given:
            module = name.removeprefix(adapters.PEFT).removesuffix(".lora_A.weight")
            if f"{module}.weight" in base:
                merged[f"{module}.weight"] = base[f"{module}.weight"] + change(module)
        return merged

    return _trained(lambda tokens: functional_call(reference, weights(), (tokens,)).logits, trained, model)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_trains_the_adapters_that_peft_trains(name: str, engine_side: dict[str, Side]) -> None:
    chosen, lora, by_peft = CASES[name]
    model, ours = MODELS[chosen], engine_side[name]
    theirs = (_peft_side if by_peft else _merged_side)(model, lora, adapters.drawn(adapters.adapter_table(model, lora)))
    torch.testing.assert_close(ours.logprobs_T, theirs.logprobs_T, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
    for what in ("gradients", "weights"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        assert mine.keys() == other.keys()
        moved = [key for key, tensor in other.items() if tensor.norm() > 0]
        assert len(moved) > 0.8 * len(other), "of few experts no token takes any"
        for key, tensor in other.items():
            error = (mine[key] - tensor).norm() / (tensor.norm() or 1.0)
            assert error < TOLERANCE, f"{what} of {key}: relative error {error:.1e}"
