"""mbridge and Megatron-Bridge as oracles: what each loads and exports, tensor by tensor, against what we do.

``tools/set_up.sh`` puts both beside the environment on the CPU rung; tests/support/bridges.py runs them.  One
checkpoint, four processes: whatever the layout, every tensor of every rank is the same bits.  What the bridge exports
of what we loaded, and we of what the bridge loaded, is the checkpoint again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.families.registry import FAMILIES
from tests.house.source import ROOT
from tests.support import checkpoints
from tests.support.bridge_cases import LIKE, MODELS, VERSIONS, WORLD_SIZE, layouts
from tests.support.transformer_engine_stub import VERSION as TRANSFORMER_ENGINE_VERSION

BRIDGES = Path(sys.prefix) / "bridges"
TRANSFORMER_ENGINE = Path(sys.prefix) / "transformer_engine"
HOW = "tools/set_up.sh installs it on the CPU rung"
INSTALL = f"{sys.executable} -m pip install --no-deps --target"

# Families without a bridge.
UNKNOWN = {
    "mbridge": {"mistral", "gemma2", "gemma3_text", "phi3", "olmoe", "deepseek_v2"},
    "megatron-bridge": {"mixtral", "qwen2_moe", "phi3"},
}
# Where a bridge does otherwise, by design or by mistake, and what its model or layouts are chosen for here.
KNOWN = {
    "mbridge, a Qwen after a tied Qwen2 in one process": "ties its output too: the mapping of the class was changed",
    "mbridge, Qwen2-MoE with dense layers": "raises NotImplementedError: it has no name for them.  Asked for without",
    "mbridge, DeepSeek": "passes a field that megatron-core 0.16 has no more, and reads files straight into a GPU",
    "mbridge, experts with ep=1 under tp that is not etp": "cannot export: it gathers them over tp.  Not asked for",
    "megatron-bridge, a vocabulary that tp does not divide": "raises: it pads none.  Asked for with one that divides",
    "megatron-bridge, OLMoE under tp": "has the norm over all heads whole, where ours is split.  Not asked for",
}
QKV, FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
DOCS = ROOT / "docs" / "weights.md"
Report = dict[str, Any]


def asked(scratch: Path, *options: str) -> Report:
    """What tests/support/bridges.py prints."""
    if not (BRIDGES / "mbridge").is_dir():
        wheels = " ".join(f"{name}=={version}" for name, version in VERSIONS.items())
        pytest.skip(f"no bridges: {HOW}, as does `{INSTALL} {BRIDGES} {wheels}`")
    if not (TRANSFORMER_ENGINE / "transformer_engine" / "pytorch").is_dir():
        wheel = f"transformer-engine=={TRANSFORMER_ENGINE_VERSION}"
        pytest.skip(f"no Transformer Engine: {HOW}, as does `{INSTALL} {TRANSFORMER_ENGINE} {wheel}`")
    command = [sys.executable, "-m", "tests.support.bridges", str(BRIDGES), str(TRANSFORMER_ENGINE), str(scratch)]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    report: Report = json.loads(run.stdout.splitlines()[-1])
    return report


def wrong(report: Report) -> dict[str, set[str]]:
    """Names that differ somewhere -> the bridges that say so."""
    found = defaultdict(set)
    for outcome in report["outcomes"]:
        for name in (*outcome["loaded"], *outcome["exported"], *outcome["ours"]):
            found[name].add(outcome["bridge"])
    return dict(found)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return asked(tmp_path_factory.mktemp("bridges"))


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_both_bridges_load_and_export_what_we_do(report: Report) -> None:
    outcomes = report["outcomes"]
    differing = [each for each in outcomes if each["loaded"] or each["exported"] or each["ours"]]
    assert differing == []
    met = {(each["bridge"], each["family"], each["layout"], each["rank"]) for each in outcomes}
    assert met == {
        (bridge, family, layout, rank)
        for bridge, of_bridge in MODELS.items()
        for family, model in of_bridge.items()
        for layout in layouts(model)
        for rank in range(WORLD_SIZE)
    }
    assert all(each["tensors"] for each in outcomes)


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_the_families_without_a_bridge_are_those(report: Report) -> None:
    for bridge, unknown in UNKNOWN.items():
        assert set(report["known"][bridge]) == FAMILIES.keys() - unknown, bridge


@pytest.mark.tier("full")
@pytest.mark.timeout(600)
def test_both_name_what_a_wrong_table_puts_elsewhere(tmp_path: Path) -> None:
    """Keys for values and gate for up, in our table alone."""
    exchanged = asked(tmp_path, "--families", "llama", "--swap", "k_proj=v_proj", "gate_proj=up_proj")
    named = wrong(exchanged)
    layers = range(checkpoints.MODELS["llama"].num_layers)
    megatron = {f"decoder.layers.{n}.{name}" for n in layers for name in (QKV, FC1)}
    attention = {f"model.layers.{n}.self_attn.{name}.weight" for n in layers for name in ("k_proj", "v_proj")}
    mlp = {f"model.layers.{n}.mlp.{name}.weight" for n in layers for name in ("gate_proj", "up_proj")}
    assert named == {name: set(MODELS) for name in megatron | attention | mlp}


def test_every_family_is_asked_about_or_has_no_bridge() -> None:
    for bridge, of_bridge in MODELS.items():
        asked_about = {LIKE.get(name, name) for name in of_bridge}
        undecided = FAMILIES.keys() - asked_about - UNKNOWN[bridge]
        assert not undecided, f"{bridge}: tests/support/bridge_cases.py asks about them, or UNKNOWN has them"
        assert asked_about | UNKNOWN[bridge] == FAMILIES.keys()
        assert not of_bridge.keys() & UNKNOWN[bridge]


def test_the_set_up_installs_the_versions_that_are_documented() -> None:
    for name, version in VERSIONS.items():
        assert f"{name}=={version}" in (ROOT / "tools" / "set_up.sh").read_text()
        assert f"{name} {version}" in DOCS.read_text().lower()
