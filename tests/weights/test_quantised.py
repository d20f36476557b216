"""The reference quantiser against vLLM's own functions, bit for bit, and its parts against the whole.

vLLM's code runs on this CPU for blocks, channels and mxfp8.  Per tensor its kernel is of accelerators alone; there the
oracle is the same arithmetic in vLLM's ``QuantFP8.forward_native``.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.weights.quantised import (
    FP8,
    QuantisedMatrix,
    quantise,
    rounded,
    rounded_activations,
)
from mcore_rl.weights.quantised_shards import is_quantised, num_scales, partial_columns
from mcore_rl.weights.rollout_table import RolloutTable
from tests.support.checkpoints import MODELS
from tests.support.forked import ENGINES

SCHEMES = [each for each in Quantization if each is not Quantization.none]
SHAPE = (200, 384)  # rows that are not whole blocks


def tensors() -> dict[str, Tensor]:
    """Matrices in bfloat16 of all magnitudes."""
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(SHAPE, generator=random)
    spread = normal * torch.exp2(torch.randint(-120, 100, SHAPE, generator=random).float())
    outliers = normal * 0.02
    outliers[::50, ::70] = 300.0
    some_zero = normal.clone()
    some_zero[:130] = 0
    some_zero[:, 128:256] = 0
    made = {
        "random": normal * 0.02,
        "outliers": outliers,
        "huge": normal * 1e37,
        "denormal": normal * 1e-39,
        "spread": spread,
        "some zero": some_zero,
        "zero": torch.zeros(SHAPE),
        "negative zero": -torch.zeros(SHAPE),
        "middles": (torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) % 449).float(),  # many lie between two numbers
    }
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def _of_vllm() -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """(scheme, matrix) -> (bytes, scales) as vLLM makes them; in a process that vLLM may have."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    made = {}
    with set_current_vllm_config(VllmConfig()):
        per_tensor = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
        for name, tensor in tensors().items():
            made["fp8_block", name] = per_block_cast_to_fp8(tensor, block_size=[128, 128], use_ue8m0=False)
            scale = fp8._fp8_channel_scale(weight_amax(tensor, dim=-1, keepdim=True))
            made["fp8_channel", name] = fp8._fp8_quant_per_channel(tensor, scale), scale
            scale = fp8._fp8_scale(weight_amax(tensor).reshape(1))
            made["fp8_tensor", name] = per_tensor.forward_native(tensor, scale)[0], scale.view(1, 1)
            made["mxfp8", name] = _mxfp8_e4m3_quantize_torch(tensor)
            for scheme, group in (("fp8_block", GroupShape(1, 128)), ("fp8_channel", GroupShape.PER_TOKEN)):
                made[f"{scheme} of inputs", name] = QuantFP8(static=False, group_shape=group).forward_native(tensor)
    return {key: (each.view(torch.uint8), scales) for key, (each, scales) in made.items()}


@pytest.fixture(scope="module")
def of_vllm(processes: None) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    with ProcessPoolExecutor(1, mp_context=ENGINES) as pool:
        return pool.submit(_of_vllm).result()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", tensors())
def test_bytes_and_scales_are_those_of_vllm(
    of_vllm: dict[tuple[str, str], tuple[Tensor, Tensor]], scheme: Quantization, name: str
) -> None:
    theirs, their_scales = of_vllm[scheme.value, name]
    ours, scales = quantise(tensors()[name], scheme)
    assert ours.dtype is FP8 and scales.dtype is their_scales.dtype
    assert torch.equal(scales, their_scales)
    undefined = theirs & 0x7F == 0x7F  # zeros of so small a scale that its inverse is infinite
    assert not undefined.any() or scheme is Quantization.fp8_tensor
    assert torch.equal(ours.view(torch.uint8)[~undefined], theirs[~undefined])
    # There the accelerator's kernel compares with the greatest, and takes it; it stands for 448 such scales, or 0.
    assert (ours.float()[undefined] == 448).all()
    assert not tensors()[name][undefined].any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_parts_quantised_together_are_the_whole(scheme: Quantization) -> None:
    """The parts begin and end within blocks, as shards of fused tensors do."""
    matrix, values = QuantisedMatrix(scheme, SHAPE), tensors()["outliers"]
    starts = [(row, column) for row in (0, 37, 130) for column in (0, 70, 300)]
    ends = [({0: 37, 37: 130, 130: 200}[row], {0: 70, 70: 300, 300: 384}[column]) for row, column in starts]
    parts = [values[r:s, c:d] for (r, c), (s, d) in zip(starts, ends, strict=True)]
    magnitudes = matrix.magnitudes()
    for start, part in zip(starts, parts, strict=True):
        matrix.widen(magnitudes, part, start)
    whole, scales = quantise(values, scheme)
    assert magnitudes.shape == num_scales(scheme, SHAPE)
    assert torch.equal(matrix.scales(magnitudes), scales)
    for (row, column), (below, right), part in zip(starts, ends, parts, strict=True):
        ours = matrix.quantise(part, (row, column), scales)
        assert torch.equal(ours.view(torch.uint8), whole[row:below, column:right].view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_it_stands_for_is_near(scheme: Quantization) -> None:
    """Three bits of fraction: within 2**-4 of each number that is not far below its block's greatest."""
    values = tensors()["random"].float()
    held, scales = quantise(values.bfloat16(), scheme)
    factor = torch.exp2(scales.float() - 127) if scheme is Quantization.mxfp8 else scales
    rows, columns = (-(-size // count) for size, count in zip(SHAPE, scales.shape, strict=True))
    if scheme is Quantization.fp8_block:
        rows = columns = 128
    each = factor.repeat_interleave(rows, 0)[: SHAPE[0]].repeat_interleave(columns, 1)[:, : SHAPE[1]]
    near = (held.float() * each - values.bfloat16().float()).abs() <= values.abs() * 2**-4 + each * 2**-10
    assert near.all()


def test_shards_of_whole_blocks_have_the_bytes_of_the_whole() -> None:
    """And those that are not have others, as shards of rows have."""
    values = tensors()["random"]
    whole, _ = quantise(values, Quantization.fp8_block)
    for columns, same in ((128, True), (192, False)):
        shards = [quantise(part, Quantization.fp8_block) for part in values.split(columns, 1)]
        joined = torch.cat([shard.view(torch.uint8) for shard, _ in shards], 1)
        assert torch.equal(joined, whole.view(torch.uint8)) is same
    shards = [quantise(part, Quantization.fp8_channel) for part in values.split(192, 1)]
    assert not torch.equal(shards[0][1], quantise(values, Quantization.fp8_channel)[1])


def quantised_names(family: str) -> set[str]:
    """The quantised tensors of a layer of each kind, without their layers' numbers."""
    table = RolloutTable(FAMILIES[family], MODELS[family], parse_rollout_layout("tp=1"))
    rules = [rule for rule in table.rules if table.layers(rule) and is_quantised(rule)]
    return {rule.name.rpartition("{l}.")[2] for rule in rules}


def test_only_matrices_of_attention_layers_and_experts_are_quantised() -> None:
    attention = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    mlp = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    experts = {f"mlp.experts.routed_experts.{name}_weight" for name in ("w13", "w2")}
    assert quantised_names("llama") == attention | mlp
    assert quantised_names("qwen3_moe") == attention | experts
    shared = {f"mlp.shared_expert.{name}.weight" for name in ("gate_up_proj", "down_proj")}
    assert quantised_names("qwen3_next") == attention | experts | shared
    assert quantised_names("mixtral") == attention | {
        f"block_sparse_moe.experts.routed_experts.{name}_weight" for name in ("w13", "w2")
    }


def test_columns_that_are_no_whole_blocks_are_named() -> None:
    model = MODELS["llama"]
    table = RolloutTable(FAMILIES["llama"], model, parse_rollout_layout("tp=1"))
    rules = {rule.name.rpartition(".self_attn.")[2] or rule.name: rule for rule in table.rules}
    output = rules["o_proj.weight"]
    width = model.num_attention_heads * model.head_dim
    assert partial_columns(Quantization.fp8_block, output, model, 2) == (width // 2 if width // 2 % 128 else None)
    assert partial_columns(Quantization.fp8_channel, output, model, 2) is None


@pytest.mark.parametrize("scheme", [Quantization.fp8_block, Quantization.fp8_channel], ids=str)
@pytest.mark.parametrize("name", tensors())
def test_inputs_are_rounded_as_by_vllm(
    of_vllm: dict[tuple[str, str], tuple[Tensor, Tensor]], scheme: Quantization, name: str
) -> None:
    held, scales = of_vllm[f"{scheme.value} of inputs", name]
    theirs = held.view(FP8).float() * scales.repeat_interleave(SHAPE[1] // scales.shape[1], 1)
    ours = rounded_activations(tensors()[name].float().view(2, -1, SHAPE[1]), scheme)
    assert ours.view(SHAPE).equal(theirs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_rounded_matrix_is_near_and_another(scheme: Quantization) -> None:
    """Half a unit of fp8's last place: 1/16 of a number; and what lies below a block's least numbers is near 0."""
    matrix = tensors()["random"].float()
    made = rounded(matrix, scheme)
    assert not made.equal(matrix)
    largest = matrix.abs().max()
    assert ((made - matrix).abs() <= matrix.abs() / 16 + largest * 2.0**-17).all()
    assert rounded(made, scheme).equal(made) or scheme is not Quantization.mxfp8, "powers of two: nothing moves again"
