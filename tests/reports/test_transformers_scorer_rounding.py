"""What rounding like an engine in fp8 does to transformers' log-probs, against a model that is rounded by hand."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_rl.config.engine import Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.reports.question import Question, RoundedScores
from mcore_rl.reports.transformers_scorer import rounded_scores
from mcore_rl.rollout.protocol import Sampling
from tests.support import quantised_engines

pytestmark = pytest.mark.tier("ci")
TOKENS = (torch.arange(24) * 37 % 101).view(1, -1)
EXACT = 5e-5  # sums of float32 in another order, measured 8e-6; rounding moves log-probs by 1e-2 and more
Groups = tuple[str, ...]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = quantised_engines.write(name, tmp_path_factory.mktemp(name))[1]
        return made[name]

    return directory


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def logprobs(model: Any) -> Any:
    logits = model(TOKENS, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, TOKENS[0, 1:, None])[:, 0].double().numpy()


def scores(directory: Path, scheme: Quantization, rollout: str) -> dict[str, RoundedScores]:
    question = Question(
        hf=directory,
        layout=parse_layout(""),
        rollout=parse_rollout_layout(rollout),
        dtype=Precision.bfloat16,
        sampling=Sampling(max_tokens=1),
        quantization=scheme,
    )
    model = load(directory)
    before = logprobs(model)
    with torch.no_grad():
        made = rounded_scores(model, question, lambda: logprobs(model))
    assert np.array_equal(logprobs(model), before), "the model is left as it was"
    return made


# By hand: one block after another, in Python


def by_hand(matrix: Tensor, scheme: Quantization) -> Tensor:
    """A matrix that is rounded as vLLM's engines hold it; powers of two and blocks written out once more."""
    result = torch.empty(matrix.shape)
    rows, columns = {
        Quantization.fp8_block: (128, 128),
        Quantization.fp8_channel: (matrix.shape[0], matrix.shape[1]),
        Quantization.fp8_tensor: tuple(matrix.shape),
        Quantization.mxfp8: (matrix.shape[0], 32),
    }[scheme]
    for top, left in itertools.product(range(0, matrix.shape[0], rows), range(0, matrix.shape[1], columns)):
        block = matrix[top : top + rows, left : left + columns].float()
        each_row = scheme in (Quantization.fp8_channel, Quantization.mxfp8)
        scale = (block.abs().amax(1, keepdim=True) if each_row else block.abs().max()) / torch.tensor(448.0)
        if scheme is Quantization.mxfp8:
            scale = torch.exp2(scale.log2().ceil())
        # Of a matrix's blocks and tensors vLLM multiplies with the inverse; of rows it divides.
        by_inverse = scheme in (Quantization.fp8_block, Quantization.fp8_tensor)
        scaled = block * (1 / scale) if by_inverse else block / scale
        held = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        result[top : top + rows, left : left + columns] = held.float() * scale
    return result


def of_token(x: Tensor, scheme: Quantization) -> Tensor:
    """Activations, row by row."""
    size = {Quantization.fp8_block: 128, Quantization.mxfp8: 32}.get(scheme, x.shape[-1])
    parts = []
    for part in x.float().split(size, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        if scheme is Quantization.mxfp8:
            scale = torch.exp2(scale.log2().ceil())
        scaled = part / scale if size < x.shape[-1] else part * (1 / scale)
        parts.append(scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def ranks_of(rows: Tensor, ranks: int) -> list[Tensor]:
    return list(rows.chunk(ranks))


@torch.no_grad()
def hand_rounded(model: Any, groups: Groups, scheme: Quantization, ranks: int, *, activations: bool) -> None:
    """Rounds ``model`` as ``ranks`` tensor ranks would: the rows, or columns, of each are a matrix of their own."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        merged = []
        if "attention" in groups:
            merged.append([attention.q_proj, attention.k_proj, attention.v_proj])
            row_parallel(attention.o_proj, scheme, ranks)
        if "dense" in groups and hasattr(mlp, "gate_proj"):
            merged.append([mlp.gate_proj, mlp.up_proj])
            row_parallel(mlp.down_proj, scheme, ranks)
        for linears in merged:
            of_rank = zip(*(ranks_of(each.weight, ranks) for each in linears), strict=True)
            made = [by_hand(torch.cat(parts), scheme).split([len(part) for part in parts]) for parts in of_rank]
            for number, linear in enumerate(linears):
                linear.weight.copy_(torch.cat([parts[number] for parts in made]))
        if activations:
            for linear in itertools.chain(*merged, *([attention.o_proj],) * ("attention" in groups)):
                linear.register_forward_pre_hook(lambda _, inputs: (of_token(inputs[0], scheme),))
            if "dense" in groups and hasattr(mlp, "gate_proj"):
                mlp.down_proj.register_forward_pre_hook(lambda _, inputs: (of_token(inputs[0], scheme),))
        if "experts" in groups and hasattr(mlp, "experts"):
            hand_rounded_experts(mlp.experts, scheme, activations=activations)


def row_parallel(linear: Any, scheme: Quantization, ranks: int) -> None:
    linear.weight.copy_(torch.cat([by_hand(part, scheme) for part in linear.weight.chunk(ranks, dim=1)], dim=1))


def hand_rounded_experts(experts: Any, scheme: Quantization, *, activations: bool) -> None:
    """Rounds the experts of one rank, and computes token after token instead of in transformers' loop."""
    for stacked in (experts.gate_up_proj, experts.down_proj):
        for expert in range(len(stacked)):
            stacked[expert] = by_hand(stacked[expert], scheme)

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for token, choice in itertools.product(range(len(x)), range(chosen.shape[1])):
            expert = int(chosen[token, choice])
            given = of_token(x[token : token + 1], scheme) if activations else x[token : token + 1]
            gate, up = (given @ experts.gate_up_proj[expert].T).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            inner = of_token(inner, scheme) if activations else inner
            result[token] += (inner @ experts.down_proj[expert].T)[0] * weights[token, choice]
        return result

    experts.forward = forward


CASES = [
    ("qwen2", Quantization.fp8_block, "tp=2"),
    ("qwen2", Quantization.mxfp8, "tp=2"),
    ("qwen3_moe", Quantization.fp8_block, "tp=1"),
    ("qwen3_moe", Quantization.fp8_channel, "tp=1"),
    ("qwen2", Quantization.fp8_tensor, "tp=1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(each, "value", each)) for each in case))
def test_each_group_is_rounded_as_by_hand(written: Callable[[str], Path], case: tuple[str, Quantization, str]) -> None:
    name, scheme, rollout = case
    directory = written(name)
    file = directory / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    made = scores(directory, scheme, rollout)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    groups = {"attention", "experts"} if name == "qwen3_moe" else {"attention", "dense"}
    assert set(made) == {"all", *groups}
    plain = logprobs(load(directory))
    ranks = parse_rollout_layout(rollout).tp
    for group, parts in made.items():
        members = tuple(groups) if group == "all" else (group,)
        for activations, ours in ((False, parts.weights), (True, parts.activations)):
            model = load(directory)
            hand_rounded(model, members, scheme, ranks, activations=activations)
            apart = np.abs(ours - logprobs(model))
            if activations:
                # A sum in another order moves a number over the middle of two numbers of fp8, now and then.
                assert apart.mean() < 0.3 * np.abs(parts.activations - parts.weights).mean()
            else:
                assert apart.max() < EXACT
        assert np.abs(parts.weights - plain).mean() > 200 * EXACT
        assert np.abs(parts.activations - parts.weights).mean() > 200 * EXACT
