"""What a file says of itself comes back as it was, and a range of a local tensor is where the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_rl.checkpoints.rank_state import FORMAT, RankState, StateShard, pieces_of_range, state_file
from mcore_rl.config.role import Head
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of
from tests.support import checkpoints


def state(**changes: object) -> RankState:
    table = checkpoints.table("qwen2", "tp=2")
    local = next(each for each in table.tensors(1) if "linear_qkv.weight" in each.name)
    pieces = pieces_of_range(table.pieces(local), table.shape(local), 7, 900)
    shard = StateShard("0/qkv", table.shape(local), 7, 900, pieces, ("main", "exp_avg"))
    values = dict(
        role="actor", rank=1, world_size=2, layout="tp=2", head=Head.lm, dtype="bfloat16", num_steps=3, num_skipped=1,
        adam_step=None, shards=(shard,),
    )  # fmt: skip
    return RankState(**(values | changes))  # type: ignore[arg-type]


def test_it_comes_back_as_it_was() -> None:
    assert RankState.parse(json.loads(json.dumps(state().metadata()))) == state()
    assert RankState.parse(state(adam_step=4).metadata()).adam_step == 4


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, state().metadata() | {"format": "mcore_rl rank state 1"}])
def test_another_format_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"this program reads '{FORMAT}'"):
        RankState.parse(metadata)


@pytest.mark.parametrize("head", [Head.lm, Head.value])
def test_the_format_before_is_read(head: Head) -> None:
    """It said whether it is a critic's."""
    written = state(head=head).metadata()
    values = json.loads(written["state"])
    values["critic"] = values.pop("head") == "value"
    assert RankState.parse({"format": "mcore_rl rank state 2", "state": json.dumps(values)}) == state(head=head)


@pytest.mark.parametrize(("family", "layout", "rank"), [("qwen2", "tp=2", 1), ("mixtral", "ep=2", 1), ("qwen2", "", 0)])
def test_pieces_of_a_range_are_those_of_the_tensor_that_lie_in_it(family: str, layout: str, rank: int) -> None:
    """Every element of the Hugging Face tensors is a number of its own; a local tensor is made of them by the table."""
    table = checkpoints.table(family, layout, 2)
    sizes = {name: info.shape for name, info in table.hf_tensors.items()}
    for local in table.tensors(rank)[:8]:
        names = sorted({piece.hf for piece in table.pieces(local)})
        count, whole = 1, {}
        for name in names:
            size = torch.Size(sizes[name]).numel()
            whole[name] = torch.arange(count, count + size).view(sizes[name])
            count += size
        shape = table.shape(local)
        tensor = torch.zeros(shape, dtype=torch.int64)  # padding
        for piece in table.pieces(local):
            view_of(tensor, piece.local_region).copy_(view_of(whole[piece.hf], piece.hf_region))
        for begin, end in ((0, tensor.numel()), (3, 4), (5, tensor.numel() - 3), (17, 17 + shape[-1])):
            end = min(end, tensor.numel())
            expected = torch.zeros_like(tensor)
            expected.view(-1)[begin:end] = tensor.view(-1)[begin:end]
            rebuilt = torch.zeros_like(tensor)
            for piece in pieces_of_range(table.pieces(local), shape, begin, end):
                target = view_of(rebuilt, TensorSlice(piece.local_start, piece.shape))
                assert not target.any(), "no element twice"
                target.copy_(view_of(whole[piece.hf], piece.hf_region))
            assert torch.equal(rebuilt, expected), local.name


def test_files_are_named_in_the_order_of_ranks(tmp_path: Path) -> None:
    assert state_file(tmp_path, 12).name == "rank_00012.safetensors"
    assert sorted([state_file(tmp_path, 100).name, state_file(tmp_path, 9).name])[0] == "rank_00009.safetensors"
