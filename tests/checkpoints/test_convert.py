"""Conversions both ways, and everything that must stop one.

The reference of a round trip is the checkpoint that transformers wrote, read by the safetensors package.  A source is
never touched: every test that may break one compares all its bytes before and after.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_rl.checkpoints import convert, distcp, megatron_checkpoint, safetensors
from mcore_rl.checkpoints.convert import HF, to_hf, to_megatron
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.errors import CheckpointError, ConfigError, McoreRLError
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import checkpoints
from tests.support.engines import same_bits

NORM = "model.norm.weight"


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in checkpoints.MODELS:
        checkpoints.write(name, directory / name)
    to_megatron(directory / "mixtral", directory / "megatron", report=_quiet)
    return directory


def _content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def _edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of ``source`` in one file, with other tensors."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    held = checkpoints.tensors(source)
    edit(held)
    save_file(held, target / "model.safetensors", {"format": "pt"})
    return target


@contextmanager
def _refused(source: Path, out: Path, kind: type[McoreRLError], *patterns: str) -> Iterator[None]:
    """The block raises an error that says all ``patterns``, names nothing ``out`` and leaves ``source`` as it is."""
    before = _content(source)
    with pytest.raises(kind) as refused:
        yield
    for pattern in patterns:
        assert pattern in str(refused.value)
    assert not out.exists()
    assert _content(source) == before


@pytest.mark.parametrize("name", checkpoints.MODELS)
def test_there_and_back_is_the_same_to_the_bit(name: str, root: Path, tmp_path: Path) -> None:
    before = _content(root / name)
    stages: dict[str, list[tuple[int, int]]] = {}

    def report(stage: str, num_bytes: int, total: int) -> None:
        stages.setdefault(stage, []).append((num_bytes, total))

    made = to_megatron(root / name, tmp_path / "megatron", parallel=parse_layout("tp=2"), report=report)
    back = to_hf(tmp_path / "megatron", tmp_path / "hf", report=report)
    expected = checkpoints.tensors(root / name)
    assert same_bits(checkpoints.tensors(tmp_path / "hf"), expected)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    for done in (made, back):
        assert (done.family, done.num_tensors, done.num_bytes) == (name, len(expected), num_bytes)
    assert stages.keys() == {"write", "verify", "check source"}
    assert [sum(size for size, _ in buckets) for buckets in stages.values()] == [
        2 * num_bytes,
        2 * num_bytes,
        num_bytes,
    ]
    assert {total for buckets in stages.values() for _, total in buckets} == {num_bytes}
    assert _content(root / name) == before
    assert (tmp_path / "hf" / "tokenizer.json").exists() and (tmp_path / "hf" / "chat_template.jinja").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_with_nan_are_named_and_nothing_gets_the_name(
    root: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        held[NORM][3] = torch.nan

    broken = _edited(root / "mixtral", tmp_path / "broken", edit)
    with _refused(broken, tmp_path / "out", CheckpointError, f"tensor {NORM} holds NaN"):
        to_megatron(broken, tmp_path / "out", dtype=dtype, report=_quiet)


def test_layers_of_prediction_are_neither_written_nor_promised(root: Path, tmp_path: Path) -> None:
    """The tensors behind the last layer are not of the policy: what is written says that it has none."""
    layers = json.loads((root / "deepseek_v3" / "config.json").read_text())["num_hidden_layers"]

    def edit(held: dict[str, Tensor]) -> None:
        held[f"model.layers.{layers}.eh_proj.weight"] = torch.ones(4, 8)

    source = _edited(root / "deepseek_v3", tmp_path / "source", edit)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    to_megatron(source, tmp_path / "megatron", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "hf", report=_quiet)
    for written in (tmp_path / "megatron" / HF, tmp_path / "hf"):
        assert json.loads((written / "config.json").read_text())["num_nextn_predict_layers"] == 0
    beyond = f"model.layers.{layers}."
    assert not [name for name in checkpoints.tensors(tmp_path / "hf") if name.startswith(beyond)]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_dtypes_are_cast_on_request_but_for_what_the_table_dictates(name: str, root: Path, tmp_path: Path) -> None:
    to_megatron(root / name, tmp_path / "megatron", dtype=torch.bfloat16, report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "hf", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "float16", dtype=torch.float16, report=_quiet)
    written, cast = checkpoints.tensors(tmp_path / "hf"), checkpoints.tensors(tmp_path / "float16")
    for key, tensor in checkpoints.tensors(root / name).items():
        kept = key.endswith("e_score_correction_bias")
        assert same_bits(written[key], tensor if kept else tensor.bfloat16()), key
        assert same_bits(cast[key], tensor if kept else tensor.bfloat16().half()), key
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "megatron" / HF / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp8_becomes_what_it_stands_for(root: Path, tmp_path: Path) -> None:
    """One matrix is quantised by hand, with one scale: 48 by 64 is less than a block of 128 by 128."""
    name = "model.layers.0.self_attn.o_proj.weight"
    held = checkpoints.tensors(root / "deepseek_v3")
    quantised = held[name].to(torch.float8_e4m3fn)
    (tmp_path / "fp8").mkdir()
    save_file(held | {name: quantised, f"{name}_scale_inv": torch.tensor([[0.5]])}, tmp_path / "fp8/model.safetensors")
    shutil.copyfile(root / "deepseek_v3" / "config.json", tmp_path / "fp8" / "config.json")
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoints.edit_config(tmp_path / "fp8", quantization_config=scheme)
    to_megatron(tmp_path / "fp8", tmp_path / "megatron", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "hf", report=_quiet)
    written = checkpoints.tensors(tmp_path / "hf")
    assert same_bits(written[name], (quantised.float() * 0.5).bfloat16())
    assert same_bits(written[NORM], held[NORM])
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


Break = Callable[[Path], object]


def _edit(change: Callable[[dict[str, Tensor]], object]) -> Break:
    """Rewrite the checkpoint as one file, its tensors changed."""

    def write(directory: Path) -> None:
        held = checkpoints.tensors(directory)
        change(held)
        for path in directory.glob("model*"):
            path.unlink()
        save_file(held, directory / "model.safetensors")

    return write


def _shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[2]


def _drop_expert(held: dict[str, Tensor]) -> None:
    for part in ("w1", "w2", "w3"):
        del held[f"model.layers.2.block_sparse_moe.experts.3.{part}.weight"]


BROKEN: dict[str, tuple[Break, type[McoreRLError], tuple[str, ...]]] = {
    "truncated": (
        lambda path: os.truncate(_shard(path), _shard(path).stat().st_size - 10), CheckpointError,
        ("model-00003-of", "truncated: expected", "Download it again"),
    ),
    "corrupt": (
        lambda path: _shard(path).write_bytes(b"\xff" * 5000), CheckpointError,
        ("model-00003-of", "is not a safetensors file"),
    ),
    "missing shard": (lambda path: _shard(path).unlink(), CheckpointError, ("model-00003-of", "is missing")),
    "missing tensor": (_edit(lambda held: held.pop(NORM)), CheckpointError, (f"tensor {NORM}", "is missing")),
    "dropped expert": (
        _edit(_drop_expert), CheckpointError,
        tuple(f"model.layers.2.block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w2", "w3")),
    ),
    "extra tensor": (
        _edit(lambda held: held.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)})), CheckpointError,
        ("model.layers.1.self_attn.q_proj.bias", "has no place in the model"),
    ),
    "wrong shape": (
        _edit(lambda held: held.update({NORM: torch.zeros(47)})), CheckpointError,
        (NORM, "expected shape (48,)", "found (47,)"),
    ),
    "wrong config": (
        lambda path: checkpoints.edit_config(path, num_local_experts=8), CheckpointError,
        ("experts.4.w1.weight", "and 31 more like it", "config.json"),
    ),
    "unsupported": (
        lambda path: checkpoints.edit_config(path, architectures=["MambaForCausalLM"]), ConfigError,
        ("MambaForCausalLM", "is not supported"),
    ),
    "field that vLLM reads": (
        lambda path: checkpoints.edit_config(path, index_topk=4), ConfigError, ("index_topk", "--ignore-field"),
    ),
    "no config": (lambda path: (path / "config.json").unlink(), CheckpointError, ("config.json: cannot be read",)),
    "no json": (lambda path: (path / "config.json").write_text("{"), CheckpointError, ("config.json: is not JSON",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_refused_before_anything_is_written(case: str, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "mixtral", tmp_path / "hf")
    spoil, kind, patterns = BROKEN[case]
    spoil(tmp_path / "hf")
    with _refused(tmp_path / "hf", tmp_path / "out", kind, *patterns):
        to_megatron(tmp_path / "hf", tmp_path / "out", report=_quiet)
    assert not (tmp_path / "out.incomplete").exists()


def test_no_directory_and_no_model_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hf download"):
        to_megatron(tmp_path / "nowhere", tmp_path / "out", report=_quiet)
    with pytest.raises(ConfigError, match="tp"):
        to_megatron(root / "mixtral", tmp_path / "out", parallel=parse_layout("tp=3"), report=_quiet)
    shutil.copytree(root / "megatron", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / HF)
    with pytest.raises(CheckpointError, match=r"Give the model's with --config DIR"):
        to_hf(tmp_path / "bare", tmp_path / "out", report=_quiet)
    to_hf(tmp_path / "bare", tmp_path / "out", config=root / "mixtral", report=_quiet)
    assert same_bits(checkpoints.tensors(tmp_path / "out"), checkpoints.tensors(root / "mixtral"))


def test_a_megatron_checkpoint_of_another_model_is_refused(root: Path, tmp_path: Path) -> None:
    with _refused(root / "megatron", tmp_path / "out", CheckpointError, "ffn_hidden_size: 64 in its own", "moe: {"):
        to_hf(root / "megatron", tmp_path / "out", config=root / "llama", report=_quiet)
    nameless = shutil.copytree(root / "megatron", tmp_path / "nameless", ignore=shutil.ignore_patterns(HF))
    with _refused(nameless, tmp_path / "out", CheckpointError, "is missing", "has no place in this llama"):
        to_hf(nameless, tmp_path / "out", config=root / "llama", report=_quiet)


def _flip(path: Path, needle: Tensor) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(needle.numpy().tobytes()) + 3] ^= 1
    path.write_bytes(content)


def test_a_damaged_megatron_checkpoint_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "megatron", tmp_path / "damaged")
    _flip(tmp_path / "damaged" / "__0_0.distcp", checkpoints.tensors(root / "mixtral")[NORM])
    with _refused(tmp_path / "damaged", tmp_path / "out", CheckpointError, "decoder.final_layernorm.weight", "damaged"):
        to_hf(tmp_path / "damaged", tmp_path / "out", report=_quiet)
    assert (tmp_path / "out.incomplete").exists()


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_what_was_written_wrongly_is_never_named(
    way: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit on the disk is not what was written."""
    out, needle = tmp_path / "out", checkpoints.tensors(root / "mixtral")[NORM]
    opened = convert.DistributedCheckpoint.open if way == "to_megatron" else HfCheckpoint.open

    def after_writing(directory: Path) -> object:
        if directory.name == "out.incomplete":
            files = (path for path in directory.iterdir() if path.is_file())
            (path,) = [path for path in files if needle.numpy().tobytes() in path.read_bytes()]
            _flip(path, needle)
        return opened(directory)

    owner = convert.DistributedCheckpoint if way == "to_megatron" else HfCheckpoint
    monkeypatch.setattr(owner, "open", staticmethod(after_writing))
    source = root / ("mixtral" if way == "to_megatron" else "megatron")
    with _refused(source, out, CheckpointError, f"tensor {NORM}: expected crc32:", "as in the source, found crc32:"):
        getattr(convert, way)(source, out, report=_quiet)
    assert (tmp_path / "out.incomplete").exists()


def test_a_tensor_written_to_the_wrong_place_is_never_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HfCheckpoint.read_into
    calls = [0]

    def swap_once(self: HfCheckpoint, name: str, region: TensorSlice, out: Tensor) -> None:
        calls[0] += name.endswith("experts.1.w1.weight")
        real(self, name.replace("experts.1.w1", "experts.2.w1") if calls[0] == 1 else name, region, out)

    monkeypatch.setattr(HfCheckpoint, "read_into", swap_once)
    with _refused(root / "mixtral", tmp_path / "out", CheckpointError, "layers.0.block_sparse_moe.experts.1.w1.weight"):
        to_megatron(root / "mixtral", tmp_path / "out", report=_quiet)


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_full_disk(way: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = root / ("mixtral" if way == "to_megatron" else "megatron"), tmp_path / "out"
    run = getattr(convert, way)
    with monkeypatch.context() as patch:
        free = shutil._ntuple_diskusage(0, 0, 1000)
        patch.setattr(shutil, "disk_usage", lambda path: free)
        with _refused(source, out, CheckpointError, "are needed", "are free"):
            run(source, out, report=_quiet)
        assert not (tmp_path / "out.incomplete").exists()

    def no_space(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if way == "to_hf":
        monkeypatch.setattr(os, "pwrite", no_space)
    else:
        monkeypatch.setattr(distcp.DistcpWriter, "_open", lambda self: _FullFile())
    with _refused(source, out, CheckpointError, "No space left on device", "Free some space"):
        run(source, out, report=_quiet)


class _FullFile(io.RawIOBase):
    """Full in the middle of an archive, where torch hides the cause."""

    written = 0

    def writable(self) -> bool:
        return True

    def write(self, content: memoryview) -> int:
        if self.written > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += len(content)
        return len(content)

    def tell(self) -> int:
        return self.written


def test_a_stored_tensor_holds_all_that_it_is_made_of(root: Path, tmp_path: Path) -> None:
    """Queries in bfloat16 beside keys in float32 are stored in float32."""
    shutil.copytree(root / "llama", tmp_path / "hf")
    name = "model.layers.0.self_attn.{}_proj.weight"
    _edit(lambda held: held.update({name.format("q"): held[name.format("q")].bfloat16()}))(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "again", report=_quiet)
    expected, written = checkpoints.tensors(tmp_path / "hf"), checkpoints.tensors(tmp_path / "again")
    assert same_bits(written[name.format("q")], expected[name.format("q")].float())
    assert same_bits(written[name.format("k")], expected[name.format("k")])


def test_a_reader_that_reads_nothing_verifies_nothing(root: Path) -> None:
    class Nothing:
        def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None: ...

    specs = {NORM: TensorSpec(NORM, torch.float32, (48,))}
    with HfCheckpoint.open(root / "llama") as source, pytest.raises(CheckpointError, match=NORM):
        convert._verify(source, Nothing(), specs, specs, root, _quiet)


def test_an_existing_output_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for run, source in ((to_megatron, root / "mixtral"), (to_hf, root / "megatron")):
        with pytest.raises(CheckpointError, match="exists and holds files"):
            run(source, tmp_path / "out", report=_quiet)
    assert _content(tmp_path / "out") == {tmp_path / "out" / "mine": b"x"}


def test_memory_is_one_chunk(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger than a chunk or a window is ever made, whatever the tensors."""
    monkeypatch.setattr(megatron_checkpoint, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(convert, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(safetensors, "WINDOW_BYTES", 1000)
    made: list[int] = []
    real = torch.empty

    def empty(*args: object, **kwargs: object) -> Tensor:
        tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    to_megatron(root / "mixtral", tmp_path / "megatron", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "hf", report=_quiet)
    assert 0 < max(made) <= 1000
    assert same_bits(checkpoints.tensors(tmp_path / "hf"), checkpoints.tensors(root / "mixtral"))


def test_config_json_names_the_dtype_of_most_bytes() -> None:
    specs = {
        "a": TensorSpec("a", torch.float32, (3,)),
        "b": TensorSpec("b", torch.bfloat16, (4,)),
        "c": TensorSpec("c", torch.bfloat16, (3,)),
    }
    assert convert._most(specs) is torch.bfloat16
