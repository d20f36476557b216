"""The replicated linear's marks.

The whole module is held to transformers' model by tests/parity and to itself under every layout by tests/invariance.
"""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.parallel import parse_layout
from mcore_rl.training.latent_attention import ReplicatedLinear
from mcore_rl.training.model import transformer_config
from tests.support import engines, models


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replicated_weight_is_whole_and_marked_for_summation(tp: int) -> None:
    config = transformer_config(models.deepseek_v3(), parse_layout(f"tp={tp},etp=1"), engines.config(), LayerSpec.local)
    linear = ReplicatedLinear(
        48, 20, parallel_mode="duplicated", config=config, init_method=torch.nn.init.ones_, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False,
    )  # fmt: skip
    assert linear.weight.shape == (20, 48) and linear.weight.sequence_parallel is (tp > 1)
    out, bias = linear(torch.ones(2, 3, 48))
    assert bias is None and torch.equal(out, torch.full((2, 3, 20), 48.0))
