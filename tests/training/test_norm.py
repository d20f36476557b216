"""RMSNorm: transformers' numbers bit for bit, and the gradient sums that Megatron makes of its marks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.parallel.launch import Rank
from mcore_rl.training.norm import RMSNorm
from tests.support import engines
from tests.support.forked import run_ranks


def config(**options: object) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "normalization": "RMSNorm", **options}
    )


@pytest.fixture
def as_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm takes the CPU for an accelerator."""
    monkeypatch.setattr("mcore_rl.training.norm.compiles", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 64), (7, 2, 3, 16)])  # hidden states, and heads under query and key norms
@pytest.mark.parametrize("zero_centered", [False, True])
def test_equals_transformers_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], zero_centered: bool) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    x, grad = 3 * torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    results = []
    theirs = (Gemma2RMSNorm if zero_centered else LlamaRMSNorm)(shape[-1], eps=1e-3).to(dtype)
    settings = config(params_dtype=dtype, layernorm_zero_centered_gamma=zero_centered)
    ours = RMSNorm(config=settings, hidden_size=shape[-1], eps=1e-3)
    assert torch.equal(ours.weight, theirs.weight), "the same start"
    theirs.weight.data.normal_(0.0 if zero_centered else 1.0, 0.2)
    ours.weight.data.copy_(theirs.weight.data)
    for norm in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        results.append([out, *torch.autograd.grad(out, (leaf, norm.weight), grad)])
    for name, a, b in zip(("output", "input grad", "weight grad"), *results, strict=True):
        assert a.dtype == b.dtype == dtype
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_formulas_of_the_kernel_are_transformers_in_bfloat16_and_right_in_float64(
    dtype: torch.dtype, zero_centered: bool, as_one_kernel: None
) -> None:
    """Not compiled here (``test_one_kernel``).  In float32 the input's gradient differs by the order of operations."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    theirs = (Gemma2RMSNorm if zero_centered else LlamaRMSNorm)(16, eps=1e-3).to(dtype)
    theirs.weight.data.normal_(0.0 if zero_centered else 1.0, 0.2)
    settings = config(params_dtype=dtype, layernorm_zero_centered_gamma=zero_centered)
    ours = RMSNorm(config=settings, hidden_size=16, eps=1e-3)
    ours.weight.data.copy_(theirs.weight.data)
    # heads of keys lie in the projection of queries, keys and values
    x, grad = 3 * torch.randn(7, 2, 3, 24).to(dtype)[..., 4:20], torch.randn(7, 2, 3, 16).to(dtype)
    results = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        results.append([out, *torch.autograd.grad(out, (leaf, norm.weight), grad)])
    leaf, weight = x.double().requires_grad_(), theirs.weight.detach().double().requires_grad_()
    out = leaf / (leaf.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + zero_centered)
    exact = [out, *torch.autograd.grad(out, (leaf, weight), grad.double())]
    for a, b, c in zip(*results, exact, strict=True):
        assert a.dtype == b.dtype == dtype
        assert ((a.double() - c).norm() / c.norm()).item() < (1e-2 if dtype is torch.bfloat16 else 1e-6)
        if dtype is torch.bfloat16:
            assert torch.equal(a, b)


def test_the_kernel_keeps_its_input_alone(as_one_kernel: None) -> None:
    norm = RMSNorm(config=config(), hidden_size=8, eps=1e-5)
    x = torch.randn(5, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: x):
        norm(x)
    assert {each.data_ptr() for each in kept} == {x.data_ptr(), norm.weight.data_ptr()}


def test_a_frozen_weight_has_no_gradient_and_no_rows_are_no_kernel(as_one_kernel: None) -> None:
    norm = RMSNorm(config=config(), hidden_size=8, eps=1e-5).requires_grad_(False)
    x = torch.randn(5, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is None
    assert norm(x[:0]).shape == (0, 8)


def test_epsilon_keeps_zeros_finite() -> None:
    norm = RMSNorm(config=config(), hidden_size=8, eps=1e-5)
    x = torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_weight_follows_the_config() -> None:
    norm = RMSNorm(config=config(params_dtype=torch.bfloat16), hidden_size=8, eps=1e-5)
    assert norm.weight.dtype == torch.bfloat16
    assert norm.weight.tolist() == [1.0] * 8
    assert norm.weight.sequence_parallel is False
    parallel = config(sequence_parallel=True, tensor_model_parallel_size=2)
    assert RMSNorm(config=parallel, hidden_size=8, eps=1e-5).weight.sequence_parallel is True


def test_other_norms_are_refused() -> None:
    with pytest.raises(AssertionError, match="not RMSNorm"):
        RMSNorm(config=config(normalization="LayerNorm"), hidden_size=8, eps=1e-5)


def _gradient_sum_worker(rank: Rank) -> None:
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    rank.init_process_group(engines.CPU)
    for sequence_parallel, summed in ((True, {"input_layernorm", "q_layernorm"}), (False, {"q_layernorm"})):
        parallel = config(
            sequence_parallel=sequence_parallel, tensor_model_parallel_size=2, qk_layernorm=True, kv_channels=16
        )
        chunk = torch.nn.ModuleDict(
            {name: RMSNorm(config=parallel, hidden_size=16, eps=1e-5) for name in ("input_layernorm", "q_layernorm")}
        )
        chunk.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        for norm in chunk.values():
            norm.weight.grad = torch.full_like(norm.weight, rank.rank + 1.0)
        _allreduce_non_tensor_model_parallel_grads([chunk], parallel, dist.group.WORLD)
        for name, norm in chunk.items():
            expected = 3.0 if name in summed else rank.rank + 1.0
            assert norm.weight.grad.unique().tolist() == [expected], (name, sequence_parallel)


def test_megatron_sums_gradients_over_tensor_ranks(processes: None) -> None:
    """Under sequence parallelism those of every norm; without it those of query and key norms alone."""
    run_ranks(_gradient_sum_worker, 2)
