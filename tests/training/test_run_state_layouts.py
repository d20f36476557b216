"""What one layout saved, any other takes over: every weight, main weight and moment of the whole model, bit for bit.

The reference is Megatron's own description of its modules and optimizer (tests/support/saved_states.py).  Four ranks
write and read, then two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.parallel.groups import random_state
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.run_state import load_run_state
from tests.support import checkpoints, engines, hf_reference, saved_states
from tests.support.engines import same_bits
from tests.support.forked import run_ranks

pytestmark = pytest.mark.tier("full")
BEFORE, LATER = 2, 1  # steps
# Dense with a tied, padded vocabulary and biases; experts; latent attention with a bias of routers, which is untrained.
FAMILIES = ("qwen2", "mixtral", "deepseek_v3")
WORLDS = (4, 2)
# (ranks, family, layout) -> the layouts, of as many ranks and of two, that take it over.
SAVED = {
    (4, "qwen2", ""): ("tp=4", "pp=2"), (4, "qwen2", "tp=2,pp=2"): ("tp=2,pp=2", "cp=2"),
    (4, "qwen2", "pp=2,vpp=2"): ("tp=2,cp=2", ""), (4, "qwen2", "tp=2,cp=2"): ("", "tp=2"),
    (4, "qwen2", "tp=4"): ("tp=2,pp=2", "pp=2"),
    (4, "mixtral", ""): ("tp=2,ep=2", "tp=2"), (4, "mixtral", "tp=2,ep=2"): ("", "ep=2"),
    (4, "mixtral", "ep=4"): ("pp=2,cp=2", ""), (4, "mixtral", "pp=2,cp=2"): ("ep=4", "pp=2,vpp=2"),
    (4, "mixtral", "tp=2,etp=1"): ("cp=2", None), (4, "deepseek_v3", "pp=2,ep=2"): ("tp=2", "ep=2"),
    (2, "qwen2", "tp=2"): (None, "pp=2"), (2, "qwen2", "pp=2"): (None, "cp=2"), (2, "qwen2", "cp=2"): (None, "tp=2"),
    (2, "mixtral", "ep=2"): (None, "ep=2"), (2, "mixtral", "tp=2"): (None, "cp=2"),
}  # fmt: skip


@dataclass
class Read:
    """Of one reader, on rank 0.  wrong: tensors that differ.  loss: of the next step.  random: a digest of it."""

    saved: str
    layout: str
    same: bool
    wrong: list[str]
    losses: list[float]
    written_losses: list[float]
    random: list[int] = field(default_factory=list)


def _name(world_size: int, family: str, layout: str) -> str:
    return f"{world_size} {family} {layout}"


def _write(rank: Rank, root: Path, family: str, layout: str) -> None:
    """Train, save, note what the whole model is, and what the next steps' losses are."""
    like, place = torch.load(root / "like" / f"{family}.pt"), root / _name(rank.world_size, family, layout)
    with engines.groups_of(layout) as groups:
        table = saved_states.table_of(groups, family, checkpoints.MODELS[family], layout)
        engine = saved_states.engine_of(groups, table, layout, root / family)
        saved_states.train(engine, groups, 0, BEFORE)
        if rank.rank == 0:
            (place / "actor").mkdir(parents=True)
        dist.barrier()
        written = saved_states.save(engine, table, place / "actor", behind=rank.rank == 0)
        assert written.problem is None
        whole = saved_states.whole_state(engine, like)
        losses = saved_states.train(engine, groups, BEFORE, LATER)
        if rank.rank == 0:
            torch.save((whole, losses), place / "whole.pt")


def _read(rank: Rank, root: Path, saved: str, family: str, layout: str) -> Read:
    like = torch.load(root / "like" / f"{family}.pt")
    expected, losses = torch.load(root / saved / "whole.pt")
    with engines.groups_of(layout) as groups:
        table = saved_states.table_of(groups, family, checkpoints.MODELS[family], layout)
        engine = saved_states.engine_of(groups, table, layout, root / family)
        if rank.rank % 2:
            torch.manual_seed(rank.rank)  # nothing of it may stay
        same = load_run_state(engine, table, root / saved / "actor")
        random = random_state()["host"].tolist()
        whole = saved_states.whole_state(engine, like)
        wrong = [
            f"{kind} {key}"
            for kind, tensors in expected.items()
            for key, tensor in tensors.items()
            if not same_bits(whole[kind][key], tensor)
        ]
        return Read(saved, layout, same, wrong, saved_states.train(engine, groups, BEFORE, LATER), losses, random)


def _ranks(rank: Rank, root: Path) -> list[Read]:
    states = []
    with engines.world(rank):
        for writers, family, layout in SAVED:
            if writers == rank.world_size:
                _write(rank, root, family, layout)
        dist.barrier()
        for (writers, family, written), readers in SAVED.items():
            layout = readers[0 if rank.world_size == 4 else 1]
            if layout is not None:
                states.append(_read(rank, root, _name(writers, family, written), family, layout))
    return states


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory, processes: None) -> list[list[Read]]:
    root = tmp_path_factory.mktemp("states")
    (root / "like").mkdir()
    for family in FAMILIES:
        checkpoints.write(family, root / family)
        model = checkpoints.MODELS[family]
        torch.save(hf_reference.full_weights(hf_reference.build(model), model), root / "like" / f"{family}.pt")
    return [rank for world_size in WORLDS for rank in run_ranks(_ranks, world_size, (root,), timeout_s=400)]


def test_the_whole_model_is_the_same_bit_for_bit(reads: list[list[Read]]) -> None:
    assert {(read.saved, read.layout): read.wrong for rank in reads for read in rank if read.wrong} == {}
    assert len(reads[0]) == 11 and len(reads[-1]) == 15


def test_training_goes_on_from_there(reads: list[list[Read]]) -> None:
    # A wrong count of Adam's moves a weight of the next step by a tenth of the rate, and the loss by far more than
    # float32's rounding, which sums in another order: 1e-5 of a loss of about 1.
    for rank in reads:
        for read in rank:
            assert read.losses == pytest.approx(read.written_losses, rel=2e-4, abs=2e-5), (read.saved, read.layout)


def test_only_the_same_layout_claims_the_same_bits(reads: list[list[Read]]) -> None:
    for world_size, ranks in zip((4, 4, 4, 4, 2, 2), reads, strict=True):
        for read in ranks:
            written_by, _, layout = read.saved.split(" ", 2)
            assert read.same == (int(written_by) == world_size and layout == read.layout), (read.saved, read.layout)
            if read.same:
                assert read.losses == read.written_losses


def test_random_numbers_of_another_layout_follow_from_the_step(reads: list[list[Read]]) -> None:
    """Equal on all ranks and layouts, and not what was left from before."""
    digests = {tuple(read.random) for rank in reads for read in rank if not read.same}
    assert len(digests) == 1
