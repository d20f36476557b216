"""Opening a directory: what transformers and the safetensors package wrote, and every way a directory can be wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.checkpoints import hf_directory
from mcore_rl.checkpoints.hf_directory import INDEX, SINGLE, HfCheckpoint
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {f"layer.{index}": torch.randn(6, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)}
IN_A, IN_B = ("layer.0", "layer.1"), ("layer.2", "layer.3")
WEIGHT_MAP = dict.fromkeys(IN_A, A) | dict.fromkeys(IN_B, B)


def save(directory: Path, held: dict[str, tuple[str, ...]], index: dict[str, str] | None = None) -> Path:
    """Shards that hold ``held``, and an index that says so, or ``index``."""
    directory.mkdir(exist_ok=True)
    for shard, names in held.items():
        save_file({name: TENSORS[name] for name in names}, directory / shard)
    weight_map = {name: shard for shard, names in held.items() for name in names} if index is None else index
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "sharded", {A: IN_A, B: IN_B})


def problems(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        HfCheckpoint.open(directory)
    assert caught.value.place == str(directory) and str(directory) in str(caught.value)
    return caught.value.problems


def assert_holds(directory: Path, expected: dict[str, Tensor]) -> None:
    with HfCheckpoint.open(directory) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in expected.values())
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor)


def test_a_single_file_opens(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    assert_holds(tmp_path, TENSORS)


def test_shards_open_and_other_files_are_not_looked_at(sharded: Path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin", "config.json"):
        (sharded / name).write_bytes(b"not ours")
    assert_holds(sharded, TENSORS)
    assert_holds(Path(str(sharded) + "/"), TENSORS)


def test_links_to_files_elsewhere_open_as_in_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in sharded.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert_holds(tmp_path / "snapshot", TENSORS)


def test_what_transformers_saves_in_shards_opens(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert_holds(tmp_path, {name: tensor for shard in shards for name, tensor in load_file(shard).items()})


def test_boxes_come_from_the_right_shard_after_closing_too(sharded: Path) -> None:
    checkpoint = HfCheckpoint.open(sharded)
    for _ in range(2):
        for name, tensor in TENSORS.items():
            out = torch.zeros(2, 3, dtype=torch.bfloat16)
            checkpoint.read_into(name, TensorSlice((1, 1), (2, 3)), out)
            assert torch.equal(out, tensor[1:3, 1:4].bfloat16())
        checkpoint.close()
    (sharded / A).unlink()
    with pytest.raises(CheckpointError, match=f"{A}: cannot be opened: No such file"):
        checkpoint.read("layer.0")


def test_numbers_without_their_scales_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"w": weight, "w_scale_inv": torch.ones(1, 1)}, tmp_path / SINGLE)
    checkpoint = HfCheckpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("w").view(torch.uint8), weight.view(torch.uint8))
    with pytest.raises(CheckpointError, match="tensor w is quantised"):
        checkpoint.read_into("w", TensorSlice.whole((2, 2)), torch.zeros(2, 2))


def damage_none(directory: Path) -> None:
    """Nothing but an empty directory."""
    for path in directory.iterdir():
        path.unlink()


def only(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        damage_none(directory)
        for name in names:
            (directory / name).touch()

    return damage


def index_of(content: str) -> Callable[[Path], None]:
    return lambda directory: (directory / INDEX).write_text(content) and None


def truncate(directory: Path) -> None:
    path = directory / B
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_none, [f"holds neither {SINGLE} nor {INDEX}"]),
        (only("pytorch_model.bin", "config.json"), ["holds only pytorch_model.bin", "AutoModelForCausalLM", ".save"]),
        (only("consolidated.00.pth"), ["holds only consolidated.00.pth"]),
        (lambda directory: (directory / INDEX).unlink(), [f"{INDEX} is missing, but there is {A}, {B}"]),
        (lambda directory: (directory / B).unlink(), [f"{B}: is missing; {INDEX} says that it holds layer.2, layer.3"]),
        (truncate, [f"{B}: truncated: expected 328 bytes, found 318. Download it again"]),
        (index_of("{"), [f"{INDEX}: is not JSON"]),
        (index_of("[]"), [f"{INDEX}: names no tensor in weight_map"]),
        (index_of('{"weight_map": {}}'), [f"{INDEX}: names no tensor in weight_map"]),
        (lambda directory: (directory / SINGLE).touch(), [f"holds {SINGLE} and also {INDEX}"]),
        (lambda directory: save(directory, {A: IN_A, B: ("layer.2",)}, WEIGHT_MAP),
         [f"{B}: does not hold layer.3, which {INDEX} says it does"]),
        (lambda directory: save(directory, {A: IN_A, B: IN_B}, dict.fromkeys(IN_A, A) | {"layer.2": B}),
         [f"{B}: holds layer.3, which {INDEX} does not name"]),
        (lambda directory: save(directory, {A: IN_A, B: (*IN_B, "layer.1")}, WEIGHT_MAP),
         [f"{B}: holds layer.1, and so does {A}"]),
        (lambda directory: save(directory, {A: (*IN_A, "layer.2"), B: IN_B}, WEIGHT_MAP),
         [f"{B}: holds layer.2, and so does {A}"]),
        (lambda directory: save(directory, {A: IN_A}, dict.fromkeys(IN_A, A) | {"layer.2": "../" + B}),
         ["tensor layer.2 is said to be in", "names no file beside it"]),
    ],
)  # fmt: skip
def test_a_wrong_directory_is_described(sharded: Path, damage: Callable[[Path], None], said: list[str]) -> None:
    damage(sharded)
    (problem,) = problems(sharded)
    assert all(words in problem for words in said), problem


def test_everything_wrong_is_said_at_once(sharded: Path) -> None:
    truncate(sharded)
    save_file({"layer.0": TENSORS["layer.0"], "extra": torch.ones(1)}, sharded / A)
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"lost": "model-00003-of-00002.safetensors"}
    (sharded / INDEX).write_text(json.dumps(index))
    said = "\n".join(problems(sharded))
    assert said.count("\n") == 3
    for words in ("does not hold layer.1", "holds extra", "truncated", "model-00003-of-00002.safetensors: is missing"):
        assert words in said


def test_what_is_no_directory_is_refused_with_the_way_to_download(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "none")
    assert "hf download" in problem
    save_file(TENSORS, tmp_path / SINGLE)
    assert "is not a directory" in problems(tmp_path / SINGLE)[0]


def test_long_lists_are_cut_in_the_message_and_kept_in_the_error() -> None:
    error = CheckpointError("here", [f"problem {'x' * index}" for index in range(30)])
    assert str(error).count("\n") == 21 and str(error).endswith("and 10 more") and len(error.problems) == 30
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CheckpointError and str(again) == str(error)
    assert hf_directory._few("gfedcba") == "a, b, c, d, e and 2 more"
