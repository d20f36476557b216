"""mbridge and Megatron-Bridge as oracles: what each loads and exports, tensor by tensor, against what we do.

``tools/set_up.sh`` puts both beside the environment on the CPU rung; tests/support/bridges.py runs them.  One
checkpoint, four processes: whatever the layout, every tensor of every rank is the same bits.  What the bridge exports
of what we loaded, and we of what the bridge loaded, is the checkpoint again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from mcore_rl.config.megatron_versions import megatron_version
from mcore_rl.config.parallel import parse_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import WorkerError
from tests.house.source import ROOT
from tests.support.bridge_cases import LIKE, LIMITS, MODELS, UNKNOWN, VERSIONS, WORLD_SIZE, layouts
from tests.support.bridges import Case, adaptations, asked, known, write_checkpoint
from tests.support.skips import NOT_INSTALLED
from tests.support.transformer_engine_stub import FOLDER
from tests.support.transformer_engine_stub import VERSIONS as TRANSFORMER_ENGINE_VERSIONS

WHEELS = {  # beside the environment: folder -> what is in it
    "bridges": (*(f"{name}=={version}" for name, version in VERSIONS.items()),),
    FOLDER.name: (f"transformer-engine=={TRANSFORMER_ENGINE_VERSIONS[megatron_version()]}",),
}
PAIRS = [(bridge, name) for bridge, of_bridge in MODELS.items() for name in of_bridge]
QKV, FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
DOCS = ROOT / "docs" / "weights.md"


@pytest.fixture
def both(processes: None) -> None:
    """Both bridges, and Transformer Engine's Python."""
    for folder, wheels in WHEELS.items():
        path = Path(sys.prefix) / folder
        install = f"{sys.executable} -m pip install --no-deps --target {path} {' '.join(wheels)}"
        if not path.is_dir():
            pytest.skip(f"{NOT_INSTALLED}{path}: tools/set_up.sh makes it on the CPU rung, as does `{install}`")


def of_model(bridge: str, name: str, directory: Path) -> list[Case]:
    """A case for each of its layouts."""
    model = MODELS[bridge][name]
    checkpoint = write_checkpoint(model, directory)
    return [Case(bridge, name, layout, checkpoint) for layout in layouts(bridge, model)]


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bridge", "name"), PAIRS)
def test_a_bridge_loads_and_exports_what_we_do(bridge: str, name: str, both: None, tmp_path: Path) -> None:
    cases = of_model(bridge, name, tmp_path)
    outcomes = asked(cases, WORLD_SIZE)
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert {(outcome.case, outcome.rank) for outcome in outcomes} == {
        (case, rank) for case in cases for rank in range(WORLD_SIZE)
    }
    assert all(outcome.tensors for outcome in outcomes)


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_the_families_without_a_bridge_are_those(both: None) -> None:
    assert {bridge: FAMILIES.keys() - set(families) for bridge, families in known().items()} == UNKNOWN


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LIMITS)
def test_a_bridge_cannot_do_what_its_version_cannot(name: str, both: None, tmp_path: Path) -> None:
    limit, parallel = LIMITS[name], parse_layout(LIMITS[name].layout)
    cases = [
        Case(limit.bridge, name, limit.layout, write_checkpoint(model, tmp_path / str(place)))
        for place, model in enumerate(limit.models)
    ]
    try:
        outcomes = asked(cases, parallel.tp * parallel.pp, without=limit.without)
        said = " ".join(name for outcome in outcomes if outcome.case == cases[-1] for name in outcome.wrong)
    except WorkerError as error:
        said = str(error)
    assert limit.now in said if limit.now else said == "", "it can: beside_0_19 of the limit, and its models to MODELS"


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_every_adaptation_is_left_out_once(both: None) -> None:
    assert {limit.without for limit in LIMITS.values() if limit.without} == adaptations()


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bridge", MODELS)
def test_a_bridge_names_what_a_wrong_table_puts_elsewhere(bridge: str, both: None, tmp_path: Path) -> None:
    """Keys for values and gate for up, in our table alone: ranks say so of what they loaded.

    Beyond the key/value heads a rank may hold rows of queries alone, in which nothing is wrong.
    """
    loaded: dict[str, set[str]] = defaultdict(set)  # layout -> what is wrong there
    exported: dict[str, set[str]] = defaultdict(set)
    swap = {"k_proj": "v_proj", "gate_proj": "up_proj"}
    for outcome in asked(of_model(bridge, "llama", tmp_path), WORLD_SIZE, swap=swap):
        wrong_here = {name.split(".", 3)[3] for name in outcome.loaded}  # decoder.layers.N.
        assert FC1 in wrong_here
        loaded[outcome.case.layout] |= wrong_here
        exported[outcome.case.layout] |= {*outcome.exported, *outcome.ours}
    model = MODELS[bridge]["llama"]
    parts = [f"self_attn.{part}_proj.weight" for part in "kv"] + [f"mlp.{part}_proj.weight" for part in ("gate", "up")]
    wrong = {f"model.layers.{layer}.{part}" for layer in range(model.num_layers) for part in parts}
    assert exported == dict.fromkeys(layouts(bridge, model), wrong)
    assert loaded == {layout: {QKV, FC1} for layout in layouts(bridge, model)}


def test_every_family_is_asked_about_or_has_no_bridge() -> None:
    for bridge, of_bridge in MODELS.items():
        asked_about = {LIKE.get(name, name) for name in of_bridge}
        undecided = FAMILIES.keys() - asked_about - UNKNOWN[bridge]
        assert not undecided, f"{bridge}: tests/support/bridge_cases.py asks about them, or UNKNOWN has them"
        assert asked_about | UNKNOWN[bridge] == FAMILIES.keys()
        assert not of_bridge.keys() & UNKNOWN[bridge]


def test_the_set_up_installs_the_versions_that_are_documented() -> None:
    for wheels in WHEELS.values():
        assert all(wheel in (ROOT / "tools" / "set_up.sh").read_text() for wheel in wheels)
    for name, version in VERSIONS.items():
        assert f"{name} {version}" in DOCS.read_text().lower()
