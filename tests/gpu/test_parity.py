"""The engine on the accelerator against transformers on the CPU in float32: log-probs, entropies, loss, gradients.

float32, local layers: 1e-4 relative.  TensorFloat-32 is off, so products are rounded as on the CPU; but sums are cut
into tiles and joined in another order, and exponentials are approximated to a few units, in every layer, forward and
backward.  On the CPU the same comparison stays at 1e-6.

bfloat16, local and Transformer Engine's layers: the reference starts from the same weights, rounded to bfloat16, so
what differs are activations, rounded to 8 bits (4e-3) some ten times a layer.  On the CPU log-probs were seen to differ
by 5e-3 in the mean and 2e-2 at most, gradients by 2.3e-2; the bounds are about three times that, since accelerators
round at other places.  Experts are dictated, those that float32 chooses: rounding alone would send some elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Device, LayerSpec
from mcore_rl.parallel.device import Platform, have_transformer_engine, set_device
from mcore_rl.parallel.launch import run_ranks
from mcore_rl.training.attention_kernels import attend_one_by_one, attend_varlen, varlen_can_run
from mcore_rl.training.block_attention import attend_in_blocks
from mcore_rl.training.logprobs import cache_sized_chunk_bytes, token_logprobs
from mcore_rl.training.sequences import PackedSequences
from tests.gpu.places import cases
from tests.support.engine_parity import (
    SETTINGS,
    Found,
    Setting,
    engine_side,
    gradient_errors,
    models_for,
    reference_found,
)
from tests.support.skips import NOT_INSTALLED


@lru_cache
def all_found(kind: Device, setting: Setting, names: tuple[str, ...]) -> dict[str, Found]:
    return run_ranks(engine_side, 1, (kind, setting, names), timeout_s=600)[0]


def settings_and_models(is_accelerator: bool) -> list[tuple[Setting, str]]:
    return [(setting, name) for setting in SETTINGS for name in models_for(is_accelerator, setting)]


@pytest.mark.parametrize(("platform", "setting", "name"), cases(settings_and_models), indirect=["platform"])
def test_engine_agrees_with_transformers(platform: Platform, setting: Setting, name: str) -> None:
    if setting.layer_spec is LayerSpec.transformer_engine and not have_transformer_engine():
        pytest.skip(f"{NOT_INSTALLED}Transformer Engine, which the extra `cuda` brings")
    ours = all_found(platform.kind, setting, models_for(platform.is_accelerator, setting))[name]
    theirs = reference_found(name, setting.precision)
    for what in ("logprobs_T", "entropy_T"):
        error_T = (getattr(ours, what) - getattr(theirs, what)).abs()
        print(f"{what}: mean error {error_T.mean():.1e}, largest {error_T.max():.1e}")
        assert error_T.mean() < setting.score and error_T.max() < setting.worst, what
    print(f"loss: relative error {abs(ours.loss / theirs.loss - 1):.1e}")
    assert ours.loss == pytest.approx(theirs.loss, rel=setting.loss)
    errors = gradient_errors(ours, theirs)
    print(f"gradients: largest relative error {max(errors.values()):.1e}")
    assert max(errors.values()) < setting.gradient, {key: f"{error:.1e}" for key, error in errors.items()}


LENGTHS = (64, 8, 200, 32)


def attention_inputs(packed: PackedSequences, dtype: torch.dtype) -> list[Tensor]:
    """This rank's queries, the keys and values of all, and a gradient of the output; values that ``dtype`` holds."""
    random = torch.Generator().manual_seed(0)
    num_keys = sum(packed.padded_lengths)
    shapes = [(num_keys // packed.cp, 8, 64), (num_keys, 2, 64), (num_keys, 2, 64), (num_keys // packed.cp, 8, 64)]
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def attend(
    kernel: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    packed: PackedSequences,
    device: torch.device,
    *others: float | None,
) -> list[Tensor]:
    """The output and the gradients of query, key and value, in float64 on the CPU."""
    query, key, value = (x.detach().to(device).requires_grad_() for x in inputs[:3])
    out = kernel(query, key, value, packed, 64**-0.5, *others)
    gradients = torch.autograd.grad(out, (query, key, value), inputs[3].to(out))
    return [x.detach().double().cpu() for x in (out, *gradients)]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("cp", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_attention_kernels_agree(platform: Platform, cp: int, cp_rank: int, window: int | None) -> None:
    """Both kernels of ``PackedAttention`` in bfloat16 against its SDPA loop in float64.

    Bounds: outputs and the probabilities inside are rounded to 8 bits, 2e-3 on average; gradients go through three
    such products.
    """
    device, cpu = set_device(platform, 0), torch.device("cpu")
    packed = PackedSequences.of(LENGTHS, LENGTHS, cp, cp_rank, device)
    inputs = attention_inputs(packed, torch.bfloat16)
    expected = attend(attend_one_by_one, [x.double() for x in inputs], packed, cpu, window)
    kernels = {"SDPA": attend_one_by_one}
    if varlen_can_run(inputs[0].to(device), inputs[2].to(device), packed, window):
        kernels["varlen"] = attend_varlen
    is_its_case = platform.is_accelerator and cp == 1 and window is None
    assert "varlen" in kernels or not is_its_case, "whole sequences in bfloat16 are its case"
    for name, kernel in kernels.items():
        agree(name, attend(kernel, inputs, packed, device, window), expected)
    expected = attend(attend_in_blocks, [x.double() for x in inputs], packed, cpu, 1.5, window)
    agree("capped", attend(attend_in_blocks, inputs, packed, device, 1.5, window), expected)
    expected = attend(attend_with_sinks, [x.double() for x in inputs], packed, cpu, None, window)
    agree("sinks", attend(attend_with_sinks, inputs, packed, device, None, window), expected)


def attend_with_sinks(query_T: Tensor, *others: Any) -> Tensor:
    """Sinks that are as large as scores, of each head another."""
    return attend_in_blocks(query_T, *others, sinks=torch.linspace(-1.0, 2.0, query_T.shape[1]).to(query_T))


def agree(name: str, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Output and gradients of one kernel, within the bounds of ``test_attention_kernels_agree``."""
    for what, ours, theirs in zip(("out", "query", "key", "value"), tensors, expected, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        print(f"{name}, {what}: relative error {error:.1e}")
        assert error < (5e-3 if what == "out" else 1e-2), f"{name}: {what}"


@pytest.mark.parametrize("soft_cap", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_logprobs_agree_with_float64(platform: Platform, dtype: torch.dtype, soft_cap: float | None) -> None:
    """Values are computed in float32 from logits of any dtype: 1e-5 nats of about 10.

    Gradients are rounded to the dtype of the logits: 2^-9 of each at most in bfloat16, and about 1e-6 in float32.
    """
    device, random = set_device(platform, 0), torch.Generator().manual_seed(0)
    vocab_size, num_tokens, temperature = 20_003, 101, 0.7  # more columns than two blocks of a kernel
    logits_TV = (3 * torch.randn(num_tokens, vocab_size + 5, generator=random)).to(dtype)  # 5 columns of padding
    targets_T = torch.randint(vocab_size, (num_tokens,), generator=random)
    upstream_2T = torch.randn(2, num_tokens, generator=random)
    upstream_2T[:, ::7] = 0.0  # untrained

    leaf_TV = logits_TV.to(device, copy=True).requires_grad_()  # its values are overwritten
    outputs = token_logprobs(
        leaf_TV.view_as(leaf_TV), targets_T.to(device), vocab_size=vocab_size, temperature=temperature,
        soft_cap=soft_cap, chunk_bytes=cache_sized_chunk_bytes(platform) // 8,  # several chunks
    )  # fmt: skip
    (grad_TV,) = torch.autograd.grad(torch.stack(outputs), leaf_TV, upstream_2T.to(device))  # type: ignore[arg-type]

    exact_TV = logits_TV.double().requires_grad_()
    capped_TV = exact_TV if soft_cap is None else soft_cap * torch.tanh(exact_TV / soft_cap)
    log_p_TV = torch.log_softmax(capped_TV[:, :vocab_size] / temperature, dim=-1)
    expected = (log_p_TV.gather(1, targets_T[:, None])[:, 0], -(log_p_TV.exp() * log_p_TV).sum(-1))
    (exact_grad_TV,) = torch.autograd.grad(torch.stack(expected), exact_TV, upstream_2T.double())

    for ours_T, theirs_T in zip(outputs, expected, strict=True):
        assert ours_T is not None
        torch.testing.assert_close(ours_T.cpu().double(), theirs_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        grad_TV.cpu().double(), exact_grad_TV, rtol=2**-8 if dtype is torch.bfloat16 else 1e-4, atol=1e-7
    )
