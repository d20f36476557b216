"""What a rank saved is what it goes on from: bit for bit, in one layout, or a clear refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.checkpoints.rank_state import state_file
from mcore_rl.config.megatron_versions import MEGATRON_VERSIONS
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import OffloadPart
from mcore_rl.training.run_state import load_run_state, num_state_bytes
from mcore_rl.weights.table import Table
from tests.house.source import ROOT
from tests.support import checkpoints, engines
from tests.support.engines import same_bits
from tests.support.forked import run_ranks
from tests.support.saved_states import engine_of, save, table_of, train
from tests.support.skips import not_installed

FAMILY, MODEL = "mixtral", checkpoints.MODELS["mixtral"]
CASES = [("float32", "ep=2"), ("bfloat16", "ep=2"), ("float32", "tp=2")]  # bfloat16 has main weights besides
BEFORE, AFTER = 2, 2  # steps


@dataclass
class Observed:
    """Of one rank, by precision and layout.  bits: at "save", "end" and, of a fresh engine, "loaded" and "resumed"."""

    bits: dict[tuple[str, str], dict[str, list[Tensor]]] = field(default_factory=dict)
    losses: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    draws: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    round_trip: bool = False
    before_a_step: bool = False
    refusals: dict[str, str] = field(default_factory=dict)


def _bits(engine: Engine) -> list[Tensor]:
    return [*engines.weights_of(engine).values(), *engines.state_of(engine)]


def _observe(observed: Observed, groups: ProcessGroups, precision: str, layout: str, root: Path) -> None:
    key, folder = (precision, layout), root / f"{precision} {layout}"
    bits, losses, draws = observed.bits.setdefault(key, {}), observed.losses.setdefault(key, {}), {}
    observed.draws[key] = draws
    table = table_of(groups, FAMILY, MODEL, layout)
    whole = engine_of(groups, table, layout, root / FAMILY, precision)
    train(whole, groups, 0, BEFORE)
    bits["save"] = _bits(whole)
    whole.memory.offload(list(OffloadPart))  # as a trainer is while the engines draw
    written = save(whole, table, folder, behind=precision == "float32")
    assert written.problem is None and written.sum is not None
    observed.sizes.append((num_state_bytes(whole, table), written.sum.num_bytes))
    whole.memory.onload(list(OffloadPart))
    assert same_bits(_bits(whole), bits["save"])
    draws["whole"] = torch.rand(4)
    losses["whole"] = train(whole, groups, BEFORE, AFTER)
    bits["end"] = _bits(whole)

    fresh = engine_of(groups, table, layout, root / FAMILY, precision)
    torch.manual_seed(99)
    train(fresh, groups, 7, 1)  # another course, of which nothing may stay
    assert load_run_state(fresh, table, folder)
    draws["resumed"] = torch.rand(4)
    bits["loaded"] = _bits(fresh)
    fresh.memory.offload(list(OffloadPart))
    fresh.memory.onload(list(OffloadPart))
    losses["resumed"] = train(fresh, groups, BEFORE, AFTER)
    bits["resumed"] = _bits(fresh)
    assert whole.optimizer is not None and fresh.optimizer is not None
    observed.steps[key] = whole.optimizer.num_steps, fresh.optimizer.num_steps


def _there_and_back(groups: ProcessGroups, root: Path) -> bool:
    """bfloat16 from ep=2 to this layout, kept here; whether its parts are those that were kept there is seen later."""
    table = table_of(groups, FAMILY, MODEL, "tp=2")
    engine = engine_of(groups, table, "tp=2", root / FAMILY, "bfloat16")
    assert not load_run_state(engine, table, root / "bfloat16 ep=2")
    return save(engine, table, root / "there").problem is None


def _before_a_step(groups: ProcessGroups, root: Path) -> bool:
    """A critic's warm-up leaves the actor without moments; what is loaded over others has none either."""
    table = table_of(groups, FAMILY, MODEL, "tp=2")
    engine = engine_of(groups, table, "tp=2", root / FAMILY)
    first = _bits(engine)
    save(engine, table, root / "first")
    train(engine, groups, 0, 1)
    load_run_state(engine, table, root / "first")
    return same_bits(_bits(engine), first)


def _refusal(engine: Engine, table: Table, folder: Path) -> str:
    before = _bits(engine)
    with pytest.raises(CheckpointError) as error:
        load_run_state(engine, table, folder)
    assert same_bits(_bits(engine), before), "what was refused changed nothing"
    return str(error.value)


def _observe_refusals(observed: Observed, groups: ProcessGroups, root: Path) -> None:
    table, saved = table_of(groups, FAMILY, MODEL, "tp=2"), root / "float32 tp=2"
    engine = engine_of(groups, table, "tp=2", root / FAMILY)
    observed.refusals["nothing"] = _refusal(engine, table, root / "nowhere")
    critic = engine_of(groups, table, "tp=2", root / FAMILY, role="critic")
    observed.refusals["other role"] = _refusal(critic, table, saved)
    for name, model in {
        "fewer layers": replace(MODEL, num_layers=3),
        "wider": replace(MODEL, ffn_hidden_size=64),
    }.items():
        if name == "wider":
            assert MODEL.moe is not None
            model = replace(MODEL, moe=replace(MODEL.moe, ffn_hidden_size=32))
        other = table_of(groups, FAMILY, model, "tp=2")
        observed.refusals[name] = _refusal(engines.build(groups, model, layout="tp=2"), other, saved)
    path = state_file(saved, groups.rank)
    kept = path.read_bytes()
    for name, text in {"cut off": kept[:-7], "empty": b"", "no state": b"hello, world"}.items():
        torch.distributed.barrier()
        path.write_bytes(text)
        torch.distributed.barrier()
        observed.refusals[name] = _refusal(engine, table, saved)
        torch.distributed.barrier()
        path.write_bytes(kept)
    torch.distributed.barrier()
    if groups.rank == 0:
        os.rename(path, path.with_suffix(".away"))
    torch.distributed.barrier()
    observed.refusals["missing"] = _refusal(engine, table, saved)
    written = save(engine, table, root / "never made")
    observed.refusals["no directory"] = str(written.problem)


def _ranks(rank: Rank, root: Path) -> Observed:
    observed = Observed()
    with engines.world(rank):
        for layout in ("ep=2", "tp=2"):
            with engines.groups_of(layout) as groups:
                for precision, of in CASES:
                    if of == layout:
                        _observe(observed, groups, precision, layout, root)
                if layout == "tp=2":
                    observed.before_a_step = _before_a_step(groups, root)
                    assert _there_and_back(groups, root)
                    _observe_refusals(observed, groups, root)
        torch.distributed.barrier()
        with engines.groups_of("ep=2") as groups:
            table = table_of(groups, FAMILY, MODEL, "ep=2")
            engine = engine_of(groups, table, "ep=2", root / FAMILY, "bfloat16")
            load_run_state(engine, table, root / "there")
            observed.round_trip = same_bits(_bits(engine), observed.bits["bfloat16", "ep=2"]["save"])
    return observed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, processes: None) -> list[Observed]:
    root = tmp_path_factory.mktemp("states")
    checkpoints.write(FAMILY, root / FAMILY)
    for name in [*(" ".join(case) for case in CASES), "there", "first"]:
        (root / name).mkdir()
    return run_ranks(_ranks, 2, (root,), timeout_s=400)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_fresh_engine_goes_on_bit_for_bit(ranks: list[Observed], case: tuple[str, str]) -> None:
    for of_rank in ranks:
        bits = of_rank.bits[case]
        assert same_bits(bits["loaded"], bits["save"])
        assert same_bits(bits["resumed"], bits["end"])
        assert not same_bits(bits["save"], bits["end"]), "the steps after do something"
        assert of_rank.losses[case]["resumed"] == of_rank.losses[case]["whole"]
        assert of_rank.steps[case] == (BEFORE + AFTER, BEFORE + AFTER)
        assert torch.equal(of_rank.draws[case]["resumed"], of_rank.draws[case]["whole"]), "random numbers go on too"


NEWER = Path(sys.prefix) / f"megatron-core-{MEGATRON_VERSIONS[-1]}"


def steps_with(megatron: Path | None, root: Path, verb: str) -> dict[str, Any]:
    """See tests/support/megatron_steps.py.  megatron: a folder that holds another version than the environment's."""
    command = [sys.executable, "-m", "tests.support.megatron_steps", str(root), verb]
    environment = os.environ | {"PYTHONPATH": "" if megatron is None else str(megatron)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_either_version_of_megatron_goes_on_from_the_other(tmp_path: Path, processes: None) -> None:
    if not NEWER.is_dir():
        pytest.skip(not_installed(f"{NEWER.name} beside the older one"))
    ended = {}
    for name, first, second in (("old", None, NEWER), ("new", NEWER, None)):
        root = tmp_path / name
        (root / "state").mkdir(parents=True)
        checkpoints.write(FAMILY, root / FAMILY)
        begun, gone_on = steps_with(first, root, "begin"), steps_with(second, root, "go-on")
        assert {begun["version"], gone_on["version"]} == set(MEGATRON_VERSIONS)
        assert begun["ranks"] == gone_on["ranks"], f"begun with {begun['version']}"
        ended[name] = begun["ranks"]
    assert ended["old"] == ended["new"], "the steps themselves"


def test_bfloat16_to_another_layout_and_back_is_bit_for_bit(ranks: list[Observed]) -> None:
    assert all(of_rank.round_trip for of_rank in ranks)


def test_before_the_first_step_there_are_no_moments(ranks: list[Observed]) -> None:
    assert all(of_rank.before_a_step for of_rank in ranks)


def test_a_save_is_as_large_as_it_says(ranks: list[Observed]) -> None:
    """But for the header; weights are not kept beside the main weights that they are a cast of."""
    for of_rank in ranks:
        for said, written in of_rank.sizes:
            assert said < written < said + 120_000
        float32, bfloat16, _ = (said for said, _ in of_rank.sizes)
        assert float32 == bfloat16


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "rank_00000.safetensors is missing, and so are all others. Resume from another step"),
        ("other role", "holds the actor; give the directory of the critic"),
        ("fewer layers", "has shape (48,), and the model no such tensor. Give a checkpoint of this model"),
        ("wider", "has shape (48, 64), and the model shape (48, 32). Give a checkpoint of this model (and 47 more"),
        ("cut off", "rank_00001.safetensors: truncated: expected"),
        ("empty", "rank_00001.safetensors: truncated"),
        ("no state", "rank_00001.safetensors: "),
        ("missing", "rank_00000.safetensors is missing. Resume from another step"),
        ("no directory", "rank_00001.safetensors cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(ranks: list[Observed], what: str, said: str) -> None:
    assert said in ranks[1].refusals[what]
