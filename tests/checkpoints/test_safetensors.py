"""The file format: regions against slices of what the safetensors package loads, headers, damage."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.checkpoints import safetensors
from mcore_rl.checkpoints.safetensors import DTYPES, TensorSpec, encode_header, in_groups, read_header, read_slice
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows
from mcore_rl.weights.views import view_of

SHAPES = [(), (0,), (1,), (7,), (5, 3), (4, 0, 2), (3, 4, 5), (2, 3, 2, 3), (1, 9, 1)]
PROPERTY_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    values = torch.randint(-100, 100, shape, generator=generator)
    return values.to(torch.float32).to(dtype) if dtype.is_floating_point else values.to(dtype)


def bits(tensor: Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist()


def random_slice(rng: random.Random, shape: tuple[int, ...]) -> TensorSlice:
    start, size = [], []
    for limit in shape:
        begin = rng.choice([0, rng.randint(0, limit)])
        start.append(begin)
        size.append(rng.choice([limit - begin, rng.randint(0, limit - begin)]))
    return TensorSlice(tuple(start), tuple(size))


def slices(region: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))


def destinations(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """The ways a destination may lie in memory: plain, with gaps, transposed, of another dtype."""
    yield torch.zeros(shape, dtype=dtype)
    yield torch.zeros((*shape, 2), dtype=dtype)[..., 1]
    yield torch.zeros(shape[::-1], dtype=dtype).permute(list(range(len(shape)))[::-1])
    yield torch.zeros(shape, dtype=torch.float64)


@pytest.fixture(scope="module")
def file_of_everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("everything") / "model.safetensors"
    pairs = [(shape, dtype) for shape in SHAPES for dtype in PROPERTY_DTYPES]
    save_file({f"t{index}": random_tensor(*pair, seed=index) for index, pair in enumerate(pairs)}, path)
    return path


@pytest.mark.parametrize("window_bytes", [16, safetensors.WINDOW_BYTES])
def test_boxes_equal_slices_of_what_the_package_loads(
    file_of_everything: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "WINDOW_BYTES", window_bytes)
    tensors, problems = read_header(file_of_everything)
    reference, rng = load_file(file_of_everything), random.Random(0)
    assert problems == [] and tensors.keys() == reference.keys()
    with file_of_everything.open("rb") as file:
        for name, info in tensors.items():
            expected = reference[name]
            assert (info.dtype, info.shape) == (expected.dtype, tuple(expected.shape))
            for region in [TensorSlice.whole(info.shape), *(random_slice(rng, info.shape) for _ in range(8))]:
                part = expected[slices(region)]
                for out in destinations(region.shape, info.dtype):
                    read_slice(file.fileno(), info, region, out)
                    assert bits(out) == bits(part.to(out.dtype)), (name, region, out.stride())


def test_every_dtype_of_the_format_reads_as_the_package_reads_it(tmp_path: Path) -> None:
    saved = {name: torch.arange(16, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"}
    save_file(saved, tmp_path / "x.safetensors")
    tensors, problems = read_header(tmp_path / "x.safetensors")
    assert problems == []
    with (tmp_path / "x.safetensors").open("rb") as file:
        for name, tensor in saved.items():
            out = torch.zeros_like(tensor)
            read_slice(file.fileno(), tensors[name], TensorSlice.whole(tensor.shape), out)
            assert tensors[name].dtype == DTYPES[name] and bits(out) == bits(tensor)


def test_data_that_is_not_aligned_to_its_dtype_reads(tmp_path: Path) -> None:
    tensor = random_tensor((6, 4), torch.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length, as old versions wrote
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + tensor.numpy().tobytes())
    info = read_header(path)[0]["x"]
    assert info.begin % 2 == 1
    with path.open("rb") as file:
        for out in destinations((6, 2), torch.float32):
            read_slice(file.fileno(), info, TensorSlice((0, 1), (6, 2)), out)
            assert torch.equal(out.float(), tensor[:, 1:3])


def test_reading_part_of_a_tensor_leaves_the_rest_of_the_destination_alone(file_of_everything: Path) -> None:
    name = f"t{SHAPES.index((5, 3)) * len(PROPERTY_DTYPES)}"
    info = read_header(file_of_everything)[0][name]
    parameter = torch.full((9, 3), 7.0)
    with file_of_everything.open("rb") as file:
        read_slice(file.fileno(), info, TensorSlice((1, 0), (2, 3)), parameter[4:6])
        read_slice(file.fileno(), info, TensorSlice((1, 1), (2, 1)), parameter[7:9, :1])
    reference = load_file(file_of_everything)[name]
    assert torch.equal(parameter[4:6], reference[1:3]) and torch.equal(parameter[7:9, :1], reference[1:3, 1:2])
    assert (parameter[:4] == 7).all() and (parameter[6] == 7).all() and (parameter[7:, 1:] == 7).all()


def test_windows_cover_a_box_once_and_in_order_within_the_limit() -> None:
    rng = random.Random(1)
    for _ in range(300):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        region, limit, strides = random_slice(rng, shape), rng.randint(1, 40), row_major_strides(shape)
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        seen = [view_of(numbers, window).reshape(-1) for window in windows(region, strides, limit)]
        assert all(part[-1] - part[0] < limit for part in seen)
        assert torch.cat([numbers.new_empty(0), *seen]).tolist() == numbers[slices(region)].reshape(-1).tolist()


def test_boxes_overlap_where_they_share_an_element() -> None:
    rng = random.Random(2)
    for _ in range(500):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
        one, other = random_slice(rng, shape), random_slice(rng, shape)
        hits = torch.zeros(shape)
        view_of(hits, one).add_(1)
        view_of(hits, other).add_(1)
        assert one.overlaps(other) == bool((hits == 2).any())
    assert (
        not TensorSlice((0,), (3,)).fits((2,))
        and not TensorSlice((-1,), (1,)).fits((2,))
        and not TensorSlice((0,), (1,)).fits((2, 2))
    )


@pytest.mark.parametrize("letters", range(1, 9))
def test_the_header_is_one_that_the_package_reads(tmp_path: Path, letters: int) -> None:
    specs = [
        TensorSpec(f"{i}ä" + "t" * (letters if i == 0 else 1), dtype, (3, 2)) for i, dtype in enumerate(PROPERTY_DTYPES)
    ]
    path = tmp_path / "x.safetensors"
    header, tensors = encode_header(specs, path, {"format": "pt"})
    path.write_bytes(header + bytes(sum(spec.num_bytes for spec in specs)))
    assert read_header(path) == (tensors, [])
    assert {name: tensor.dtype for name, tensor in load_file(path).items()} == {s.name: s.dtype for s in specs}
    assert len(header) % 8 == 0 and all(info.begin % info.dtype.itemsize == 0 for info in tensors.values())


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWICE = '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{}}'
TWO = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}}'


def file_with(tmp_path: Path, header: object, data: bytes = bytes(8), length: int | None = None) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "shard.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"x": GOOD}, bytes(5), ["truncated: expected 77 bytes, found 74"]),
        ({"x": GOOD}, bytes(9), ["too long: expected 77 bytes, found 78"]),
        ('{"x": ', bytes(8), ["its header is not JSON"]),
        ("[1]", bytes(8), ["its header is no JSON object"]),
        ({"x": GOOD | {"dtype": "F99"}}, bytes(8), ["tensor x has the unknown dtype F99", "BF16"]),
        ({"x": GOOD | {"shape": [3]}}, bytes(8), ["tensor x of dtype F32 and shape [3] takes 12 bytes", "8"]),
        ({"x": GOOD | {"shape": [-2]}}, bytes(8), ["tensor x has no valid shape"]),
        ({"x": {"dtype": "F32"}}, bytes(8), ["tensor x has no valid shape"]),
        ({"x": 3}, bytes(8), ["tensor x has no valid shape"]),
        ({"x": GOOD | {"data_offsets": [4, 12]}}, bytes(12), ["gap before tensor x"]),
        (TWO % (6, 10), bytes(10), ["a gap between tensors a and b"]),
        (TWO % (2, 6), bytes(6), ["an overlap between tensors a and b"]),
        (TWICE, bytes(8), ["tensor x stands in it twice"]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_described(tmp_path: Path, header: object, data: bytes, said: list[str]) -> None:
    path = file_with(tmp_path, header, data)
    (problem,) = read_header(path)[1]
    assert problem.startswith("shard.safetensors: ") and problem.endswith("Download it again")
    assert all(words in problem for words in said), problem


def test_all_problems_of_a_file_are_said_at_once(tmp_path: Path) -> None:
    header = {"x": GOOD | {"dtype": "F99"}, "y": GOOD | {"shape": [3]}, "z": 1}
    assert len(read_header(file_with(tmp_path, header))[1]) == 3


def test_files_that_are_no_safetensors_files_are_described(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    for content, said in (
        (b"", "truncated: the header alone takes 10 bytes and the file has 0"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated: the header alone takes 1008 bytes and the file has 10"),
        (b"<!DOCTYPE html>", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Run git lfs pull"),
    ):
        path.write_bytes(content)
        (problem,) = read_header(path)[1]
        assert said in problem
    assert "No such file" in read_header(tmp_path / "none.safetensors")[1][0]


@pytest.mark.parametrize("columns", [slice(0, 4), slice(0, 2)])
def test_a_file_cut_after_it_was_opened_is_an_error_and_not_a_crash(tmp_path: Path, columns: slice) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(4096, 4)}, path)
    info, out = read_header(path)[0]["x"], torch.zeros(4096, 4)[:, columns].contiguous()
    os.truncate(path, 5000)
    with path.open("rb") as file, pytest.raises(CheckpointError, match=r"x\.safetensors: ends too early, at tensor x"):
        read_slice(file.fileno(), info, TensorSlice((0, 0), tuple(out.shape)), out)


def test_groups_keep_the_order_and_the_size() -> None:
    sizes = {"a": 3, "b": 4, "c": 9, "d": 1, "e": 7, "f": 1}
    groups = in_groups([TensorSpec(name, torch.uint8, (size,)) for name, size in sizes.items()], 8)
    assert [[spec.name for spec in group] for group in groups] == [["a", "b"], ["c"], ["d", "e"], ["f"]]
