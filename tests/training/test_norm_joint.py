"""The norm over all heads of a token: transformers' numbers, wherever tensor ranks cut the heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.norm import JointHeadNorm
from tests.support.forked import run_ranks
from tests.training.test_norm import config

HEADS, WIDTH, DTYPES = 6, 16, (torch.float32, torch.bfloat16)


def _theirs(dtype: torch.dtype) -> tuple[Tensor, Tensor, OlmoeRMSNorm]:
    """(input, its output's gradient, the norm); the heads differ much in size, so that a head's own mean shows."""
    torch.manual_seed(0)
    x = (torch.randn(5, 2, HEADS, WIDTH) * torch.linspace(0.1, 5.0, HEADS)[:, None]).to(dtype)
    norm = OlmoeRMSNorm(HEADS * WIDTH, eps=1e-3).to(dtype)
    norm.weight.data.normal_(1.0, 0.2)
    return x, torch.randn(x.shape).to(dtype), norm


def _ours(rank: Rank, tp: int) -> list[list[Tensor]]:
    """For each dtype: output, gradient of the input, gradient of the weight; of this rank's heads."""
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    parallel = ParallelConfig(tp=tp)
    init_groups(Layout.of(parallel, tp), platform, device_of(platform, 0), seed=1)
    results = []
    for dtype in DTYPES:
        x, grad, theirs = _theirs(dtype)
        norm = JointHeadNorm(config=config(params_dtype=dtype), hidden_size=WIDTH, eps=1e-3, num_heads=HEADS)
        assert norm.weight.tolist() == [1.0] * (HEADS // tp * WIDTH) and norm.weight.tensor_model_parallel
        norm.weight.data.copy_(theirs.weight.data.chunk(tp)[rank.rank])
        leaf = x.chunk(tp, dim=2)[rank.rank].clone().requires_grad_()
        out = norm(leaf)
        results.append([out, *torch.autograd.grad(out, (leaf, norm.weight), grad.chunk(tp, dim=2)[rank.rank])])
    destroy_groups()
    return [[tensor.detach() for tensor in result] for result in results]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_equals_transformers_over_the_joined_heads(tp: int, processes: None) -> None:
    """Bit for bit on one rank; on several the mean square is summed in another order, and bfloat16 may round apart."""
    ranks = run_ranks(_ours, tp, (tp,))
    for dtype, *parts in zip(DTYPES, *ranks, strict=True):
        x, grad, norm = _theirs(dtype)
        leaf = x.clone().requires_grad_()
        out = norm(leaf.flatten(-2)).view(x.shape)
        expected = [out, *torch.autograd.grad(out, (leaf, norm.weight), grad)]
        for each, dim, theirs in zip(zip(*parts, strict=True), (2, 2, 0), expected, strict=True):
            ours = torch.cat(each, dim=dim)
            assert ours.dtype == theirs.dtype == dtype
            bound = 0.0 if tp == 1 else 4 * torch.finfo(dtype).eps * theirs.float().abs().max().item()
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=bound)
