"""What a rank saved is what it goes on from: bit for bit, in one layout, or a clear refusal."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Precision
from mcore_rl.errors import CheckpointError
from mcore_rl.parallel.groups import Groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import Part
from mcore_rl.training.run_state import load_run_state, save_run_state, state_file
from tests.support import batches, engines, models
from tests.support.engines import same_bits

PRECISIONS = {"float32": Precision.float32, "bfloat16": Precision.bfloat16}
CASES = [("float32", "ep=2"), ("bfloat16", "ep=2"), ("float32", "tp=2")]  # bfloat16 has main weights besides
BEFORE, AFTER = 2, 2  # steps


@dataclass
class Observed:
    """Of one rank, by precision and layout.  bits: at "save", "end" and, of a fresh engine, "loaded" and "resumed"."""

    bits: dict[tuple[str, str], dict[str, list[Tensor]]] = field(default_factory=dict)
    losses: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    draws: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def _engine(groups: Groups, precision: str, layout: str, role: str = "actor", num_layers: int = 2) -> Engine:
    settings = engines.config(precision=PRECISIONS[precision])
    return engines.build(groups, models.moe(num_layers=num_layers), settings, layout=layout, role=role)


def _train(engine: Engine, groups: Groups, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        batch = batches.ragged(101, seed=step)
        share, counts = engines.share_of(batch, groups), batches.denominators(batch)
        losses.append(engine.train_step(share, batches.policy_loss, counts, with_entropy=True).loss)
    return losses


def _bits(engine: Engine) -> list[Tensor]:
    return [*engines.weights_of(engine).values(), *engines.state_of(engine)]


def _observe(found: Observed, groups: Groups, precision: str, layout: str, folder: Path) -> None:
    key = precision, layout
    bits, losses, draws = found.bits.setdefault(key, {}), found.losses.setdefault(key, {}), {}
    found.draws[key] = draws
    whole = _engine(groups, precision, layout)
    _train(whole, groups, 0, BEFORE)
    bits["save"] = _bits(whole)
    save_run_state(whole, folder)
    draws["whole"] = torch.rand(4)
    losses["whole"] = _train(whole, groups, BEFORE, AFTER)
    bits["end"] = _bits(whole)

    fresh = _engine(groups, precision, layout)
    torch.manual_seed(99)
    _train(fresh, groups, 7, 1)  # another course, of which nothing may stay
    load_run_state(fresh, folder)
    draws["resumed"] = torch.rand(4)
    bits["loaded"] = _bits(fresh)
    fresh.memory.offload(list(Part))
    fresh.memory.onload(list(Part))
    losses["resumed"] = _train(fresh, groups, BEFORE, AFTER)
    bits["resumed"] = _bits(fresh)
    assert whole.optimizer is not None and fresh.optimizer is not None
    found.steps[key] = whole.optimizer.num_steps, fresh.optimizer.num_steps


def _refusal(engine: Engine, folder: Path) -> str:
    before = _bits(engine)
    with pytest.raises(CheckpointError) as error:
        load_run_state(engine, folder)
    assert same_bits(_bits(engine), before), "what was refused changed nothing"
    return str(error.value)


def _observe_refusals(found: Observed, groups: Groups, folder: Path) -> None:
    engine = _engine(groups, "float32", "tp=2")
    found.refusals["missing"] = _refusal(engine, folder / "nowhere")
    found.refusals["other layout"] = _refusal(engine, folder / "float32 ep=2")
    save_run_state(engine, folder)
    found.refusals["other role"] = _refusal(_engine(groups, "float32", "tp=2", role="critic"), folder)
    found.refusals["other model"] = _refusal(_engine(groups, "float32", "tp=2", num_layers=1), folder)
    found.refusals["other precision"] = _refusal(_engine(groups, "bfloat16", "tp=2"), folder)
    path = state_file(folder, engine)
    whole = path.read_bytes()
    for name, text in {"cut off": whole[: len(whole) // 2], "empty": b"", "no state": b"hello"}.items():
        path.write_bytes(text)
        found.refusals[name] = _refusal(engine, folder)
    path.write_bytes(whole)
    save_run_state(engine, folder)
    found.files = sorted(os.listdir(folder))
    try:
        with pytest.raises(CheckpointError) as error:
            save_run_state(engine, folder / "never made")
        found.refusals["no directory"] = str(error.value)
    finally:
        load_run_state(engine, folder)


def _ranks(rank: Rank, folder: Path) -> Observed:
    found = Observed()
    with engines.world(rank):
        for layout in ("ep=2", "tp=2"):
            with engines.groups_of(layout) as groups:
                for case in CASES:
                    if case[1] == layout:
                        _observe(found, groups, *case, folder / " ".join(case))
                if layout == "tp=2":
                    _observe_refusals(found, groups, folder)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    folder = tmp_path_factory.mktemp("states")
    for case in CASES:
        (folder / " ".join(case)).mkdir()
    return run_ranks(_ranks, 2, (folder,), timeout_s=200)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_fresh_engine_goes_on_bit_for_bit(ranks: list[Observed], case: tuple[str, str]) -> None:
    for found in ranks:
        bits = found.bits[case]
        assert same_bits(bits["loaded"], bits["save"])
        assert same_bits(bits["resumed"], bits["end"])
        assert not same_bits(bits["save"], bits["end"]), "the steps after do something"
        assert found.losses[case]["resumed"] == found.losses[case]["whole"]
        assert found.steps[case] == (BEFORE + AFTER, BEFORE + AFTER)
        assert torch.equal(found.draws[case]["resumed"], found.draws[case]["whole"]), "random numbers go on too"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "rank_00001.pt is missing. Resume with as many processes as wrote it, or from another step"),
        ("other layout", "this is format 1, actor, "),
        ("other role", "this is format 1, critic, "),
        ("other model", "rank_00001.pt is of another model or precision. Resume with what the run began with"),
        ("other precision", "rank_00001.pt is of another model or precision. Resume with what the run began with"),
        ("cut off", "rank_00001.pt cannot be read: "),
        ("empty", "rank_00001.pt cannot be read: "),
        ("no state", "rank_00001.pt cannot be read: "),
        ("no directory", "rank_00001.pt cannot be written: "),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(ranks: list[Observed], what: str, said: str) -> None:
    assert said in ranks[1].refusals[what]


def test_no_partial_file_stays(ranks: list[Observed]) -> None:
    assert [name for name in ranks[0].files if name.endswith(".partial")] == []
    assert "rank_00000.pt" in ranks[0].files and "rank_00001.pt" in ranks[0].files
