"""Writing: what transformers and the safetensors package load back, and that nothing unfinished has the final name."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.checkpoints import sharded_writer
from mcore_rl.checkpoints.hf_directory import INDEX, SINGLE, HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.checkpoints.sharded_writer import ShardedWriter, plan_shards
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
SHAPES = [(), (0, 3), (7,), (6, 5), (3, 4, 5)]


def random_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    pairs = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    return {f"t{index}": (torch.randn(shape) * 4).to(dtype) for index, (shape, dtype) in enumerate(pairs)}


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def load(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist(), name


def grid(shape: tuple[int, ...], rng: random.Random) -> list[TensorSlice]:
    """A random cut of ``shape`` into regions."""
    regions = [TensorSlice.whole(shape)]
    for dim, size in enumerate(shape):
        cut = rng.randint(0, size)
        for region in tuple(regions):
            regions.remove(region)
            for begin, end in ((0, cut), (cut, size)):
                start, sizes = list(region.start), list(region.shape)
                start[dim], sizes[dim] = begin, end - begin
                regions.append(TensorSlice(tuple(start), tuple(sizes)))
    rng.shuffle(regions)
    return regions


@pytest.mark.parametrize("max_shard_bytes", [1, 200, 10**9])
def test_whole_tensors_in_any_order_load_back(tmp_path: Path, max_shard_bytes: int) -> None:
    tensors = random_tensors()
    with ShardedWriter(tmp_path / "out", specs_of(tensors), max_shard_bytes=max_shard_bytes) as writer:
        for name in random.Random(0).sample(sorted(tensors), len(tensors)):
            writer.write(name, tensors[name])
    assert_same(load(tmp_path / "out"), tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with HfCheckpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("window_bytes", [16, sharded_writer.WINDOW_BYTES])
def test_boxes_in_any_order_and_layout_load_back(
    tmp_path: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_writer, "WINDOW_BYTES", window_bytes)
    tensors, rng = random_tensors(), random.Random(0)
    for attempt in range(5):
        parts = [(name, region) for name, tensor in tensors.items() for region in grid(tuple(tensor.shape), rng)]
        rng.shuffle(parts)
        with ShardedWriter(tmp_path / f"{attempt}", specs_of(tensors), max_shard_bytes=300) as writer:
            for name, region in parts:
                view = view_of(tensors[name], region)  # mostly with gaps
                writer.write_slice(
                    name, region, torch.nn.Parameter(view, requires_grad=False) if attempt else view.clone()
                )
        assert_same(load(tmp_path / f"{attempt}"), tensors)


def test_the_index_is_as_transformers_writes_it(tmp_path: Path) -> None:
    tensors = {name: torch.randn(10) for name in "cab"}
    with ShardedWriter(tmp_path / "out", specs_of(tensors), max_shard_bytes=80, metadata={"step": "3"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index == {"metadata": {"total_size": 120}, "weight_map": {"a": one, "b": two, "c": one}}
    with safe_open(tmp_path / "out" / two, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [one, two, INDEX]


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    tensors = dict(model.named_parameters())
    for max_shard_bytes in (20_000, 10**9):
        directory = tmp_path / str(max_shard_bytes)
        with ShardedWriter(directory, specs_of(tensors), max_shard_bytes=max_shard_bytes) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            model.config.save_pretrained(writer.incomplete)
        assert (directory / SINGLE).exists() == (max_shard_bytes == 10**9)
        loaded, info = LlamaForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
        assert not any(info.values())
        assert_same(dict(loaded.named_parameters()), tensors)


def test_shards_are_planned_in_order_within_their_size() -> None:
    specs = [TensorSpec(name, torch.uint8, (size,)) for name, size in [("a", 4), ("b", 6), ("c", 1), ("d", 30)]]
    names = [[spec.name for spec in shard] for shard in plan_shards(specs, 10).values()]
    assert names == [["a", "b"], ["c"], ["d"]]
    assert list(plan_shards(specs, 41)) == [SINGLE]
    assert len(plan_shards(specs, 40)) == 2


X, Y = torch.arange(12.0).reshape(3, 4), torch.ones(5)
PLAN = specs_of({"x": X, "y": Y})


def assert_unfinished(directory: Path) -> None:
    assert not directory.exists() and directory.with_name(directory.name + ".incomplete").is_dir()


def test_missing_parts_are_all_named_and_the_final_name_stays_free(tmp_path: Path) -> None:
    writer = ShardedWriter(tmp_path / "out", PLAN)
    writer.write_slice("x", TensorSlice((0, 0), (3, 1)), X[:, :1])
    with pytest.raises(CheckpointError) as caught:
        writer.finish()
    assert len(caught.value.problems) == 2
    assert "tensor x: 3 of 12 elements were written" in str(caught.value)
    assert "tensor y: 0 of 5 elements were written" in str(caught.value)
    assert_unfinished(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "region", "tensor", "said"),
    [
        ("z", TensorSlice.whole((3, 4)), X, "tensor z was not planned"),
        ("x", TensorSlice.whole((3, 4)), X.double(), "expected dtype torch.float32"),
        ("x", TensorSlice.whole((3, 4)), X[:2], "expected dtype torch.float32 and part of shape"),
        ("x", TensorSlice((1, 0), (3, 4)), X, "at (1, 0)"),
        ("x", TensorSlice((0,), (3,)), Y[:3], "part of shape (3, 4), found dtype torch.float32, shape (3,)"),
        ("y", TensorSlice((2,), (2,)), Y[:2], "tensor y: dtype torch.float32, shape (2,) at (2,) was written before"),
    ],
)
def test_what_was_not_planned_is_refused(
    tmp_path: Path, name: str, region: TensorSlice, tensor: Tensor, said: str
) -> None:
    writer = ShardedWriter(tmp_path / "out", PLAN)
    writer.write_slice("y", TensorSlice((0,), (3,)), Y[:3])
    with pytest.raises(CheckpointError) as caught, writer:
        writer.write_slice(name, region, tensor)
    with pytest.raises(CheckpointError, match="and part of shape"):
        writer.write("x", X[:2])
    assert said in str(caught.value)
    assert_unfinished(tmp_path / "out")


def test_everything_wrong_with_a_plan_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        ShardedWriter(tmp_path / "out", [*PLAN, PLAN[0], TensorSpec("c", torch.complex128, (1,))])
    assert len(caught.value.problems) == 2
    for words in ("x is to be written 2 times", "c has dtype torch.complex128"):
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_with_the_place_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    (tmp_path / "out.incomplete").mkdir()
    with pytest.raises(CheckpointError) as caught:
        ShardedWriter(tmp_path / "out", PLAN)
    assert len(caught.value.problems) == 2
    for words in ("exists and holds files", "rm -r"):
        assert words in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_an_empty_directory_or_none_is_taken_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "new/below/new"):
        with ShardedWriter(tmp_path / place, PLAN) as writer:
            writer.write("x", X)
            writer.write("y", Y)
        assert_same(load(tmp_path / place), {"x": X, "y": Y})
    with pytest.raises(CheckpointError, match="exists and is a file"):
        ShardedWriter(tmp_path / "empty" / SINGLE, PLAN)


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_an_interruption_leaves_nothing_under_the_final_name(tmp_path: Path, interruption: type[BaseException]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = ShardedWriter(tmp_path / "out", PLAN)
    writer.write("y", Y)
    writer.write_slice("x", TensorSlice((0, 0), (1, 4)), X[:1])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.raises(interruption), writer:
        raise interruption
    assert_unfinished(tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CheckpointError, match="an earlier attempt was interrupted"):
        ShardedWriter(tmp_path / "out", PLAN)


def test_verification_sees_the_whole_directory_and_its_failure_keeps_the_name_free(tmp_path: Path) -> None:
    def verify(directory: Path) -> None:
        with HfCheckpoint.open(directory) as checkpoint:
            assert torch.equal(checkpoint.read("x"), X)
        assert not (tmp_path / "out").exists()
        raise RuntimeError("not the same")

    writer = ShardedWriter(tmp_path / "out", PLAN, max_shard_bytes=1)
    writer.write("x", X)
    writer.write("y", Y)
    with pytest.raises(RuntimeError, match="not the same"):
        writer.finish(verify)
    assert_unfinished(tmp_path / "out")
    writer.finish()
    assert_same(load(tmp_path / "out"), {"x": X, "y": Y})


def test_a_name_taken_meanwhile_is_an_error(tmp_path: Path) -> None:
    writer = ShardedWriter(tmp_path / "out", PLAN)
    writer.write("x", X)
    writer.write("y", Y)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        writer.finish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_too_little_space_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=68))
    with pytest.raises(CheckpointError, match=r"GiB are needed and 0.0 GiB are free"):
        ShardedWriter(tmp_path / "out", PLAN)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = ShardedWriter(tmp_path / "out", PLAN)
    writer.write("y", Y)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError) as caught, writer:
        writer.write("x", X)
    assert "model.safetensors: cannot be written: No space left on device. Free some space" in str(caught.value)
    assert_unfinished(tmp_path / "out")


def test_the_kernel_may_write_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, memory, begin: pwrite(file, memory[:3], begin))
    with ShardedWriter(tmp_path / "out", PLAN) as writer:
        writer.write("x", X)
        writer.write("y", Y)
    assert_same(load(tmp_path / "out"), {"x": X, "y": Y})
