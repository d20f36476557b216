"""Boxes of the whole model's tensors from the files of all ranks, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.checkpoints.rank_state import MAIN, WEIGHT, RankState, StoredState, state_file
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of
from tests.support import checkpoints, rank_files

CASES = [
    ("qwen2", "", 3), ("qwen2", "tp=2", 4), ("qwen2", "pp=2", 2), ("mixtral", "tp=2,ep=2", 4), ("mixtral", "ep=4", 8),
    ("deepseek_v3", "pp=2,ep=2", 4),
]  # fmt: skip


def whole_of(family: str) -> dict[str, Tensor]:
    """Every element a number of its own, in float32 exactly."""
    count, tensors = 1, {}
    for name, info in checkpoints.table(family).hf_tensors.items():
        size = torch.Size(info.shape).numel()
        tensors[name] = torch.arange(count, count + size, dtype=torch.float32).view(info.shape)
        count += size
    return tensors


@pytest.mark.parametrize(("family", "layout", "world_size"), CASES)
def test_boxes_are_read_from_wherever_they_are(tmp_path: Path, family: str, layout: str, world_size: int) -> None:
    whole = whole_of(family)
    rank_files.write_ranks(tmp_path / "actor", family, whole, layout, world_size)
    with StoredState.open(tmp_path / "actor") as stored:
        assert list(stored.mismatches({name: tuple(tensor.shape) for name, tensor in whole.items()})) == []
        for name, tensor in whole.items():
            kind = MAIN if stored.holds(MAIN, name) else WEIGHT
            regions = [TensorSlice.whole(tensor.shape), TensorSlice((0,) * tensor.dim(), (1,) * tensor.dim())]
            regions.append(
                TensorSlice(tuple(n // 3 for n in tensor.shape), tuple(max(1, n // 2) for n in tensor.shape))
            )
            for region in regions:
                assert stored.missing(kind, name, region) is None
                out = torch.full(region.shape, float("nan"))
                stored.read_into(kind, name, region, out)
                assert torch.equal(out, view_of(tensor, region)), (name, region)
                cast = torch.zeros(*region.shape, 2, dtype=torch.bfloat16)[..., 0]  # with strides
                stored.read_into(kind, name, region, cast)
                assert torch.equal(cast, view_of(tensor, region).bfloat16())


def test_adams_count_is_that_of_a_rank_that_trains() -> None:
    """A pipeline stage without adapters counts none; another layout's rank may read its file first."""
    for counts, expected in (((None, 4), 4), ((4, None), 4), ((None, None), None)):
        ranks = [
            RankState(
                role="actor", rank=rank, world_size=2, layout="pp=2", head=Head.lm, dtype="float32", num_steps=4,
                num_skipped=0, adam_step=count, shards=(),
            )
            for rank, count in enumerate(counts)
        ]  # fmt: skip
        assert StoredState(Path(), ranks, [{}, {}]).adam_step == expected


def test_own_copies_come_first(tmp_path: Path) -> None:
    """Norms are the same on both tensor ranks; here they are made to differ, to see which is read."""
    whole = whole_of("llama")
    for rank, offset in enumerate((0, 1_000_000)):
        shifted = {name: tensor + offset for name, tensor in whole.items()}
        rank_files.write_ranks(tmp_path / str(rank), "llama", shifted, "tp=2", 2)
    (tmp_path / "both").mkdir()
    for rank in range(2):
        state_file(tmp_path / "both", rank).write_bytes(state_file(tmp_path / str(rank), rank).read_bytes())
    norm = "model.norm.weight"
    for prefer, offset in ((0, 0), (1, 1_000_000), (None, 0), (7, 0)):
        with StoredState.open(tmp_path / "both", prefer=prefer) as stored:
            out = torch.empty(whole[norm].shape)
            stored.read_into(MAIN, norm, TensorSlice.whole(out.shape), out)
            assert torch.equal(out, whole[norm] + offset)
            assert stored.ranks[0].rank == (1 if prefer == 1 else 0)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    whole = whole_of("llama")
    rank_files.write_ranks(tmp_path / "actor", "llama", whole, "tp=2", 2)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    with StoredState.open(tmp_path / "actor") as stored:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert "exp_avg of (64, 48) from (0, 0) is in no file" in str(
            stored.missing("exp_avg", name, TensorSlice.whole(shapes[name]))
        )
        beyond = TensorSlice((60, 0), (8, 48))
        assert "main of (4, 48) from (64, 0) is in no file. Resume" in str(stored.missing(MAIN, name, beyond))
        (problem,) = stored.mismatches(shapes | {name: (32, 48)})
        assert (
            problem
            == f"tensor {name} has shape (64, 48), and the model shape (32, 48). Give a checkpoint of this model"
        )
        (problem,) = stored.mismatches({key: shape for key, shape in shapes.items() if key != name})
        assert "and the model no such tensor" in problem


def test_files_that_do_not_make_a_world_are_refused(tmp_path: Path) -> None:
    rank_files.write_ranks(tmp_path / "actor", "llama", whole_of("llama"), "", 3)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is missing, and so are all others"):
        StoredState.open(tmp_path)
    state_file(tmp_path / "actor", 1).rename(state_file(tmp_path / "actor", 5))
    with pytest.raises(CheckpointError) as refused:
        StoredState.open(tmp_path / "actor")
    assert refused.value.problems == (
        "rank_00001.safetensors is missing. Resume from another step",
        "rank_00005.safetensors is of no rank of 3. Resume from another step",
    )
    state_file(tmp_path / "actor", 5).write_bytes(b"12345678901234567890")
    with pytest.raises(CheckpointError, match=r"rank_00005.safetensors: "):
        StoredState.open(tmp_path / "actor")


def test_a_file_that_shrinks_is_seen(tmp_path: Path) -> None:
    whole = whole_of("llama")
    rank_files.write_ranks(tmp_path / "actor", "llama", whole, "", 1)
    with StoredState.open(tmp_path / "actor") as stored:
        path = state_file(tmp_path / "actor", 0)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # tensors at its end, whichever they are

        def read_all() -> None:
            for name, tensor in whole.items():
                stored.read_into(MAIN, name, TensorSlice.whole(tensor.shape), torch.empty(tensor.shape))

        with pytest.raises(CheckpointError, match="ends too early"):
            read_all()
