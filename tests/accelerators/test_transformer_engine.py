"""Every family constructs over Transformer Engine's own modules and binds to our tables; and who plans with its layers.

Its Python is that of the wheel, with a stub of its compiled half (tests/support/transformer_engine_stub.py).  Held is
that modules take the arguments that Megatron and we give them, have the parameters that we look for, and tell the same
configuration as our own layers (``training.effective_config``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from packaging.requirements import Requirement

from mcore_rl.config.engine import EngineConfig, LayerSpec
from mcore_rl.config.launch import load_cluster
from mcore_rl.config.parallel import parse_layout
from mcore_rl.planning.activations import engine_on, kernels_of
from tests.accelerators.test_requirements import RECORDED
from tests.house.source import ROOT
from tests.house.test_pins import EXTRAS
from tests.support import models
from tests.support.skips import NOT_INSTALLED
from tests.support.transformer_engine_stub import FOLDER, VERSIONS
from tools.record_requirements import PYTHONS, holds_for, locked

WITH_EXPERTS = {"mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "deepseek-v2", "glm4-moe", "olmoe", "glm4-moe-lite",
                "minimax-m2"}  # fmt: skip
LINEAR = "its layers with linear attention take no packed sequences"
LACKS = {
    "gemma2": "its attention has no soft cap",
    "gemma3-text": "its output linears have no norm",
    "gpt-oss": "its attention has no sinks",
    "ernie4-5": "its rotation of neighbouring pairs",
    "qwen3-next": LINEAR,
    "qwen3-5-text": LINEAR,
    "qwen3-5-moe-text": LINEAR,
}
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "seed-oss", "smollm3", *WITH_EXPERTS, *LACKS}
WITH_ROUTER_BIAS = {"deepseek-v3", "glm4-moe", "glm4-moe-lite", "minimax-m2"}
Outcomes = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    if not (FOLDER / "transformer_engine" / "pytorch").is_dir():
        pytest.skip(
            f"{NOT_INSTALLED}Transformer Engine in {FOLDER}: tools/set_up.sh puts its Python there, on the CPU rung"
        )
    command = [sys.executable, "-m", "tests.support.transformer_engine_stub", str(FOLDER)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: Outcomes = json.loads(run.stdout.splitlines()[-1])
    return {name.removeprefix("tiny-"): layouts for name, layouts in result.items()}


@pytest.mark.tier("ci")
def test_every_family_constructs_and_binds_in_two_layouts(outcomes: Outcomes) -> None:
    assert set(outcomes) == FAMILIES
    for family, layouts in outcomes.items():
        assert len(layouts) == 2
        for layout, outcome in layouts.items():
            if family in LACKS:
                assert outcome["lacks"].startswith(LACKS[family])
                continue
            assert outcome["transformer_engine"], (family, layout)
            # Bound are all parameters, and of two layers the buffers of expert biases where there are any.
            buffers = 2 if family in WITH_ROUTER_BIAS else 0
            assert outcome["bound"] - outcome["parameters"] == buffers, (family, layout)
            assert outcome["configured otherwise"] == [] and outcome["unread"] == {}, (family, layout)
            assert outcome["mlp"] == ("TEGroupedMLP" if family in WITH_EXPERTS else "MLP"), (family, layout)
            assert outcome["router"] == ("mcore_rl.training.router" if family in WITH_EXPERTS else "builtins")


@pytest.mark.parametrize("python", PYTHONS)
def test_it_is_the_version_of_the_rung_that_has_it(python: str) -> None:
    version = VERSIONS[locked(python)["megatron-core"]]
    named = (each for each in EXTRAS["cuda"] if each.name == "transformer-engine")
    (required,) = (each for each in named if holds_for(python, each))
    assert version in required.specifier
    assert f"transformer-engine=={version}" in RECORDED
    lines = (line for line in (ROOT / "tools" / "set_up.sh").read_text().split('"') if line.startswith("transformer-"))
    assert [str(each.specifier) for each in map(Requirement, lines) if holds_for(python, each)] == [f"=={version}"]


def test_a_plan_counts_its_layers_only_where_it_is() -> None:
    model, layout, engine = models.dense(), parse_layout(""), EngineConfig()
    for name, expected in (("nvidia_h100", True), ("amd_mi300x", False)):
        cluster = load_cluster(name)
        for wanted, fused in zip(LayerSpec, (expected, False, True), strict=True):  # auto, local, Transformer Engine
            settled = engine_on(cluster, replace(engine, layer_spec=wanted))
            assert kernels_of(model, layout, settled, accelerator=True).fused is fused, (name, wanted)
