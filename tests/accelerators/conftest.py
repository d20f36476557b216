"""What vLLM's own code decides on accelerators that are not here: asked once for each vendor."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from transformers import MixtralConfig

from tests.house.source import ROOT

Outcome = dict[str, Any]


@pytest.fixture(scope="package", params=["cuda", "rocm"])
def vllm_says(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``tests/support/vllm_platforms.py`` prints, for one vendor."""
    directory = tmp_path_factory.mktemp("mixtral")
    MixtralConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_local_experts=8, architectures=["MixtralForCausalLM"], dtype="bfloat16",
    ).save_pretrained(directory)  # fmt: skip
    command = [sys.executable, "-m", "tests.support.vllm_platforms", request.param, str(directory)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="package")
def outcomes(vllm_says: dict[str, Any]) -> dict[str, dict[str, Outcome]]:
    """Device -> what the rollout says of the experts' kernel -> what vLLM makes of it."""
    return dict(vllm_says["experts"])
