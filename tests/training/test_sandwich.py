"""The norm behind a row-parallel linear: its output, its place in checkpoints, and what it refuses.

That its gradient is summed over tensor ranks is proven by tests/invariance (gemma2, tp=2).
"""

from __future__ import annotations

import pytest
import torch

from mcore_rl.parallel.launch import Rank
from mcore_rl.training.norm import RMSNorm
from mcore_rl.training.sandwich import NormedRowParallelLinear
from tests.support import engines, full_weights, models
from tests.support.forked import run_ranks


def _build(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, ...]], str]:
    with engines.world(rank), engines.groups_of() as groups:
        engine = engines.build(groups, models.gemma2())
        layer = engine.models[0].decoder.layers[1]
        linear = layer.mlp.linear_fc2
        assert isinstance(linear, NormedRowParallelLinear)
        assert isinstance(layer.self_attention.linear_proj, NormedRowParallelLinear)
        x = torch.randn(3, 2, linear.weight.shape[1])
        expected = linear.post_layernorm(torch.nn.functional.linear(x, linear.weight))
        assert isinstance(linear.post_layernorm, RMSNorm) and linear.post_layernorm.eps == engine.model.norm_epsilon
        keys = {shard.key: tuple(shard.global_shape) for shard in full_weights.shards(engine.models)}
        config = engine.models[0].config
        try:
            NormedRowParallelLinear(
                8, 8, config=config, init_method=config.init_method, bias=False, input_is_parallel=True,
                skip_bias_add=True, is_expert=True,
            )  # fmt: skip
        except AssertionError as error:
            refusal = str(error)
        output, bias = linear(x)
        assert bias is None
        return output.detach(), expected.detach(), keys, refusal


@pytest.fixture(scope="module")
def built(processes: None) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, ...]], str]:
    return run_ranks(_build, 1)[0]


def test_output_is_normed(built: tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, ...]], str]) -> None:
    assert torch.equal(built[0], built[1])


def test_checkpoints_name_it_as_megatron_bridge_does(
    built: tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, ...]], str],
) -> None:
    for layer in range(2):
        for linear in ("self_attention.linear_proj", "mlp.linear_fc2"):
            assert built[2][f"decoder.layers.{layer}.{linear}.post_layernorm.weight"] == (48,)


def test_experts_are_refused(built: tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, ...]], str]) -> None:
    assert "each expert's output" in built[3]
