"""Converts checkpoints on disk, Hugging Face to Megatron and back, and verifies the result before naming it.

Memory: one chunk or window.  The converter opens the result again under its temporary name, reads every tensor back,
and compares its checksum with that of the source, read once more and cast alike.  Only then does the directory get its
final name.  Sources are only read.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.distcp import ARCHIVE_BYTES, DistcpWriter, DistributedCheckpoint
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.kept_model import demand_kept_model
from mcore_rl.checkpoints.load import check_checkpoint
from mcore_rl.checkpoints.manifest import MANIFEST, damage
from mcore_rl.checkpoints.megatron_checkpoint import MegatronCheckpoint, Readable, plan_stored, write_stored
from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.checkpoints.not_a_number import NanCheck
from mcore_rl.checkpoints.peft import CONFIG as ADAPTER_CONFIG
from mcore_rl.checkpoints.peft import changed_base, lora_of, open_adapters, read_adapter_config, write_peft
from mcore_rl.checkpoints.published import FP8, open_weights
from mcore_rl.checkpoints.rank_state import MAIN, SIDECAR_FILES, WEIGHT, StoredState, state_file
from mcore_rl.checkpoints.rest import keep_rest, open_files, rest_beside, weights_have_tower, writer_of
from mcore_rl.checkpoints.safetensors import WINDOW_BYTES, TensorSpec, tensor_bytes, windows_of
from mcore_rl.checkpoints.stacked import num_stored, unstacked
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.family import Family
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError, refuse_if_any
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.weights.adapter_table import AdapterTable, adapter_name
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of

ACTOR = "actor"  # the role whose weights a checkpoint of a run stands for
HF = "hf"  # where a Megatron checkpoint of ours keeps config.json, tokenizer and kin
ProgressCallback = Callable[[str, int, int], None]  # (what is being done, bytes just done, bytes that it takes in all)


def role_directory(directory: Path) -> Path | None:
    """The directory of the ranks' files: ``directory`` or its ``actor``; None if it is no run's checkpoint."""
    return next((place for place in (directory, directory / ACTOR) if state_file(place, 0).exists()), None)


class RunWeights:
    """The weights of one role of a run's checkpoint, read as Hugging Face tensors.

    A checkpoint stores the main weights in float32; reading casts them.  In the dtype that the run trained in, they are
    the live weights, bit for bit.

    tensors: in the order of the layers, in the dtype that was trained.  sidecar_directory: has config.json and the
    tokenizer.
    """

    def __init__(self, directory: Path, family: Family, model: ModelConfig, lora: LoraConfig | None = None) -> None:
        """directory: of a role, as ``role_directory`` finds it.  lora: the adapters, of a run that trained these.

        Raises CheckpointError with every violation: a file that is missing or damaged; a tensor that is missing, that
        ``model`` does not have, or that has another shape.
        """
        self.sidecar_directory = directory / SIDECAR_FILES
        self._stored = StoredState.open(directory)
        state = self._stored.ranks[0]
        weights = Table(family, model, head=state.head)
        self.table = AdapterTable(weights, lora) if lora else weights
        shapes = {name: info.shape for name, info in self.table.hf_tensors.items()}
        problems = list(self._stored.mismatches(shapes))
        specs: dict[str, TensorSpec] = {}
        for name, info in self.table.hf_tensors.items():
            if problem := self._stored.missing(self._kind(name), name, TensorSlice.whole(info.shape)):
                problems.append(problem)
            specs[name] = TensorSpec(name, getattr(torch, info.dtype or state.dtype), info.shape)
        if problems:
            raise CheckpointError(str(directory), problems)
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(specs)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of Hugging Face tensor ``name`` into ``out``, of the region's shape; cast."""
        self._stored.read_into(self._kind(name), name, region, out)

    def damage(self, progress: Callable[[int, int], None]) -> list[str]:
        """The damaged files, by the checkpoint's manifest.  progress: called with (bytes just read, bytes in all)."""
        directory = self._stored.directory
        if not (directory.parent / MANIFEST).exists():
            return [f"there is no {MANIFEST} beside the directory, so that nothing says whether it is whole"]
        problems = damage(directory.parent, only=directory.name)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        progress(size, size)
        return problems

    def close(self) -> None:
        """Close the files."""
        self._stored.close()

    def _kind(self, name: str) -> str:
        return MAIN if self._stored.holds(MAIN, name) else WEIGHT


class MergedWeights:
    """The tensors of ``base``, of which those with ``adapters`` are ``W + scale * B A``, summed in float32, and cast.

    sidecar_directory: has config.json and the tokenizer.  base_directory: of ``base``.
    """

    def __init__(
        self,
        base: HfCheckpoint,
        table: Table,
        adapters: Mapping[str, Tensor],
        scale: float,
        sidecar_directory: Path | None = None,
    ) -> None:
        """adapters: whole, by their names in PEFT's files; a tensor of ``table`` itself, a value head, takes its place.

        sidecar_directory: None is that of ``base``.

        Raises CheckpointError with every adapter that has no partner, or not of a shape that fits the model's tensor.
        """
        self.table = table
        self._base = base
        self._scale = scale
        self.sidecar_directory = sidecar_directory or base.directory
        self.base_directory = base.directory
        self._pairs = {
            name: (adapters[_half(name, "A")], adapters[_half(name, "B")])
            for name in table.hf_tensors
            if _half(name, "A") in adapters and _half(name, "B") in adapters
        }
        self._whole = {name: adapters[name] for name in table.hf_tensors if name in adapters}
        known = {_half(name, which) for name in self._pairs for which in "AB"} | self._whole.keys()
        problems = [f"tensor {name} is of no layer of the model, or alone" for name in adapters.keys() - known]
        for name, (a, b) in self._pairs.items():
            rows, columns = table.hf_tensors[name].shape
            if (b.shape[0], a.shape[1]) != (rows, columns) or a.shape[0] != b.shape[1]:
                shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
                problems.append(f"adapters of {name} have shapes {shapes}, for {rows, columns}")
        for name, tensor in self._whole.items():
            if tensor.shape != table.hf_tensors[name].shape:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, for {table.hf_tensors[name].shape}")
        if problems:
            remedy = (
                "Give adapters of this model; of its embedding, or of an output projection tied to it, PEFT merges them"
            )
            raise CheckpointError(str(base.directory), [f"{each}. {remedy} (docs/lora.md)" for each in problems])
        held = {name: base.tensors[name] for name in table.hf_tensors if name in base.tensors}
        specs = {name: TensorSpec(name, info.dtype, info.shape) for name, info in held.items()}
        dtype = next(iter(specs.values())).dtype
        specs |= {name: TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in self._whole.items()}
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(specs)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``name`` into ``out``, of the region's shape; cast."""
        if name in self._whole:
            out.copy_(view_of(self._whole[name], region))
            return
        if name not in self._pairs:
            self._base.read_into(name, region, out)
            return
        rows, columns = region.start
        height, width = region.shape
        a, b = self._pairs[name]
        merged = torch.empty(region.shape, dtype=torch.float32)
        self._base.read_into(name, region, merged)
        change = b[rows : rows + height].float() @ a[:, columns : columns + width].float()
        out.copy_(merged.add_(change, alpha=self._scale))

    def damage(self, progress: Callable[[int, int], None]) -> list[str]:
        """Find none: nothing says how the files were.  progress: called once, as if all were read."""
        progress(1, 1)
        return []

    def close(self) -> None:
        """Close the files."""
        self._base.close()


def _half(weight: str, which: str) -> str:
    return adapter_name(weight.removesuffix(".weight"), which)


@dataclass(frozen=True)
class Converted:
    """A converted and verified checkpoint.  num_tensors: of the Hugging Face files.  num_bytes: of the elements."""

    directory: Path
    family: str
    num_tensors: int
    num_bytes: int


def read_model(directory: Path, *, pictures: bool = False) -> tuple[dict[str, Any], Family, ModelConfig]:
    """(config.json of ``directory``, its family, its model).  pictures: see ``model_of``.

    CheckpointError: it is missing or not a JSON object.  ConfigError: no family has it, or it cannot be trained.
    """
    config = read_config(directory)
    return config, *model_of(config, pictures=pictures)


def open_hf(directory: Path, *, pictures: bool = False) -> tuple[HfCheckpoint, Table]:
    """The Hugging Face checkpoint in ``directory``, checked against its config.json.

    FP8 and mxfp4 are dequantised on reading.  pictures: of a multimodal checkpoint the whole, else its text part.

    Raises as ``open_weights`` and ``check_checkpoint`` do.
    """
    checkpoint = open_weights(directory, pictures=pictures)
    _, family, model = read_model(directory, pictures=pictures)
    table = Table(family, model)
    check_checkpoint(checkpoint, table)
    return unstacked(checkpoint, table), table


def open_megatron(directory: Path, config: Path | None = None) -> MegatronCheckpoint:
    """The Megatron checkpoint in ``directory``, checked against the config.json in ``config`` (None: its own).

    Raises as ``read_model``, ``demand_kept_model`` and ``MegatronCheckpoint`` do.
    """
    stored = DistributedCheckpoint.open(directory)
    place = directory / HF if config is None else config
    if config is None and not (place / CONFIG).exists():
        problem = f"it has no {HF}/{CONFIG}, so nothing says what model it is. Give the model's with --config DIR"
        raise CheckpointError(str(directory), [problem])
    _, family, model = read_model(place)
    if config is not None:
        demand_kept_model(directory, directory / HF, model)
    return MegatronCheckpoint(stored, family, model)


def open_run(
    directory: Path, config: Path | None = None, base: Path | None = None
) -> RunWeights | MergedWeights | None:
    """The weights in a run's checkpoint, ``RUN/checkpoints/step_N`` or a role in it; None if it is not one.

    config: as in ``open_megatron``.  base: of a checkpoint with adapters alone, the model that they are merged with;
    None: the one that they were trained on, where it was.

    Raises as ``read_model``, ``demand_kept_model`` and ``RunWeights`` do.
    """
    role = role_directory(directory)
    if role is None:
        return None
    beside = role / SIDECAR_FILES
    sees = weights_have_tower(beside)
    _, family, model = read_model(beside if config is None else config, pictures=sees)
    if config is not None:
        demand_kept_model(directory, beside, model)
    if not (beside / ADAPTER_CONFIG).is_file():
        return RunWeights(role, family, model)
    adapters, of_run, head = run_adapters(role, family, model)
    checkpoint, table = open_hf(base or Path(of_run["base_model_name_or_path"]), pictures=sees)
    table = Table(table.family, table.model, head=head)
    return MergedWeights(checkpoint, table, adapters, lora_of(of_run).scale, beside)


def run_adapters(role: Path, family: Family, model: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Any], Head]:
    """(the adapters in the directory ``role`` of a run's checkpoint, their ``adapter_config.json``, the model's head).

    A value head, which trains beside them, is among the adapters.  CheckpointError: as ``RunWeights``, and if a file is
    damaged.
    """
    config = read_adapter_config(role / SIDECAR_FILES)
    with closing(RunWeights(role, family, model, lora_of(config))) as stored:
        if problems := stored.damage(lambda num_bytes, of: None):
            raise CheckpointError(str(role), problems)
        adapters = {}
        for name, spec in stored.tensors.items():
            adapters[name] = torch.empty(spec.shape, dtype=torch.float32)
            stored.read_into(name, TensorSlice.whole(spec.shape), adapters[name])
        return adapters, config, stored.table.head


def to_megatron(
    hf: Path,
    out: Path,
    *,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    report: ProgressCallback,
) -> Converted:
    """Write the Hugging Face checkpoint ``hf`` as a Megatron checkpoint into the new directory ``out``.

    parallel: the layout that the chunks suit; any other can load them too.  dtype: cast to it; None keeps each tensor's
    dtype (bfloat16 for FP8).  report: called as the work goes on.

    Raises as ``open_hf`` and ``NewDirectory`` do; ConfigError if the model cannot be split so; CheckpointError if a
    file cannot be read or written, or reads back differently.  After an error nothing has the name ``out``.
    """
    checkpoint, table = open_hf(hf)
    parallel = parallel or ParallelConfig()
    replicas = lcm(parallel.tp * parallel.pp * parallel.cp, parallel.etp * parallel.ep * parallel.pp)
    refuse_if_any(layout_violations(table.model, parallel, replicas))
    present = {name: info.dtype for name, info in checkpoint.tensors.items() if name in table.hf_tensors}
    dtypes = _cast(present, table, dtype)
    planned = plan_stored(table, dtypes)
    # A stored tensor may join several Hugging Face tensors; all get its dtype.
    dtypes = {name: spec.dtype for spec, held in planned.values() for local in held for name in local.hf_names}
    specs = {
        name: TensorSpec(name, dtypes[name], info.shape) for name, info in table.hf_tensors.items() if name in dtypes
    }
    total = sum(spec.num_bytes for spec in specs.values())
    directory = NewDirectory(out, total + ARCHIVE_BYTES * (len(specs) + total // WINDOW_BYTES))
    writer = DistcpWriter(directory)
    try:
        (directory.incomplete / HF).mkdir()
        copy_sidecar_files(hf, directory.incomplete / HF, _most(specs))
        keep_rest(hf, directory.incomplete / HF)
        write_stored(checkpoint, table, dtypes, writer, parallel, lambda n: report("write", n, total))
        writer.finish()
    finally:
        writer.close()
    with DistributedCheckpoint.open(directory.incomplete) as stored:
        written = MegatronCheckpoint(stored, table.family, table.model)
        _verify(checkpoint, written, written.tensors, specs, directory.incomplete, report)
    checkpoint.close()
    directory.complete()
    return Converted(directory.path, table.family.name, num_stored(specs, table, checkpoint), total)


def extract(run: Path, out: Path) -> Converted:
    """Write the adapters in the checkpoint ``run`` of a run as the new PEFT directory ``out``.

    Raises CheckpointError: it is none, or has no adapters.
    """
    role = role_directory(run)
    if role is None or not (role / SIDECAR_FILES / ADAPTER_CONFIG).is_file():
        problem = "is no checkpoint of a run that trained adapters. Give RUN/checkpoints/step_N of one"
        raise CheckpointError(str(run), [problem])
    _, family, model = read_model(role / SIDECAR_FILES)
    adapters, config, head = run_adapters(role, family, model)
    table = AdapterTable(Table(family, model, head=head), lora_of(config))
    NewDirectory(out, sum(each.nbytes for each in adapters.values())).incomplete.rmdir()
    write_peft(adapters, table, out, config["base_model_name_or_path"])
    return Converted(out, family.name, len(adapters), sum(each.nbytes for each in adapters.values()))


def merge(
    hf: Path, adapter: Path, out: Path, *, dtype: torch.dtype | None = None, report: ProgressCallback
) -> Converted:
    """Write the Hugging Face checkpoint ``hf``, merged with PEFT's directory ``adapter``, into the new ``out``.

    Raises as ``open_hf``, ``open_adapters`` and ``MergedWeights`` do, and as ``to_hf``; CheckpointError: the directory
    has tensors of the model itself that are not those of ``hf``.
    """
    checkpoint, table = open_hf(hf)
    with open_adapters(adapter, table) as adapters:
        if problems := changed_base(adapters, checkpoint):
            raise CheckpointError(str(adapter), problems)
        tensors = {name: adapters.read(name) for name in adapters.tensors}
        scale = adapters.scale
    return _write_hf(MergedWeights(checkpoint, table, tensors, scale), hf, hf, out, dtype=dtype, report=report)


def dequantise(hf: Path, out: Path, *, dtype: torch.dtype | None = None, report: ProgressCallback) -> Converted:
    """Write the quantised Hugging Face checkpoint ``hf`` with plain numbers into the new directory ``out``.

    dtype: cast to it; None writes what was quantised in bfloat16 and keeps the dtype of the rest.

    Raises as ``open_hf`` and ``to_hf`` do; CheckpointError if ``hf`` is not quantised.
    """
    checkpoint, table = open_hf(hf)
    if not read_config(hf).get("quantization_config"):
        raise CheckpointError(str(hf), ["is not quantised: config.json has no quantization_config. Use it as it is"])
    return _write_hf(MergedWeights(checkpoint, table, {}, 1.0), hf, hf, out, dtype=dtype, report=report)


def to_hf(
    megatron: Path,
    out: Path,
    *,
    config: Path | None = None,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    report: ProgressCallback,
) -> Converted:
    """Write the checkpoint ``megatron`` as a Hugging Face checkpoint into the new directory ``out``.

    megatron: a Megatron checkpoint, or one of a run (``open_run``).  config: the directory of config.json and
    tokenizer; None: those saved with the checkpoint.  base: see ``open_run``.  dtype: cast to it; None keeps each
    tensor's dtype.  report: called as the work goes on.

    Raises as ``open_megatron``, ``open_run`` and ``ShardedWriter`` do; CheckpointError if a file is damaged, cannot be
    read or written, or reads back differently.  After an error nothing has the name ``out``.
    """
    run = open_run(megatron, config, base)
    source = open_megatron(megatron, config) if run is None else run
    sidecar_directory = config or (megatron / HF if run is None else run.sidecar_directory)
    # A checkpoint with adapters alone keeps nothing of the model that they are merged with.
    rest = run.base_directory if isinstance(run, MergedWeights) else sidecar_directory
    return _write_hf(source, sidecar_directory, rest, out, dtype=dtype, report=report)


def _write_hf(
    source: MegatronCheckpoint | RunWeights | MergedWeights,
    sidecar_directory: Path,
    rest_directory: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    report: ProgressCallback,
) -> Converted:
    """rest_directory: has what is not trained of a multimodal model."""
    rest = rest_beside(source.table, rest_directory)
    pictures = source.table.model.vision is not None
    present = {name: spec.dtype for name, spec in source.tensors.items()}
    dtypes = _cast(present, source.table, dtype)
    specs = {name: TensorSpec(name, dtypes[name], spec.shape) for name, spec in source.tensors.items()}
    total = sum(spec.num_bytes for spec in specs.values())
    with writer_of(out, list(specs.values()), source.table, rest) as writer:
        if problems := source.damage(lambda num_bytes, of: report("check source", num_bytes, of)):
            raise CheckpointError(str(sidecar_directory), problems)
        head = source.table.head
        copy_sidecar_files(sidecar_directory, writer.incomplete, _most(specs), head=head, pictures=pictures)
        memory = _memory()
        for spec in specs.values():
            for window in windows_of(spec):
                part = _part(memory, window, spec)
                source.read_into(spec.name, window, part)
                writer.write_slice(spec.name, window, part)
                report("write", part.numel() * part.itemsize, total)

        if rest is not None:
            rest.write(writer)

        def verify(directory: Path) -> None:
            if rest is not None:
                rest.demand_same(directory)
            with unstacked(open_files(directory, pictures=pictures), source.table) as written:
                _verify(source, written, written.tensors, specs, directory, report)

        writer.finish(verify)
    source.close()
    return Converted(writer.directory.path, source.table.family.name, num_stored(specs, source.table), total)


def _cast(present: Mapping[str, torch.dtype], table: Table, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype to write each tensor in: ``dtype``, or the table's if it fixes one; None: its own, bfloat16 for FP8."""
    dtypes = {}
    for name, kept in present.items():
        dictated = table.hf_tensors[name].dtype
        wanted = dtype or (torch.bfloat16 if kept in FP8 else kept)
        dtypes[name] = getattr(torch, dictated) if dictated and dtype else wanted
    return dtypes


def _most(specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """The dtype of most of the bytes: the one to name in config.json."""
    counts = Counter[torch.dtype]()
    for spec in specs.values():
        counts[spec.dtype] += spec.num_bytes
    return counts.most_common(1)[0][0]


def _memory() -> Tensor:
    """Memory of one window, to be reused: new memory costs more than filling it."""
    return torch.empty(WINDOW_BYTES, dtype=torch.uint8)


def _part(memory: Tensor, window: TensorSlice, spec: TensorSpec) -> Tensor:
    return memory[: prod(window.shape) * spec.dtype.itemsize].view(spec.dtype).view(window.shape)


def _verify(
    source: Readable,
    written: Readable,
    declared: Mapping[str, TensorSpec],
    specs: Mapping[str, TensorSpec],
    directory: Path,
    report: ProgressCallback,
) -> None:
    """Raise CheckpointError unless ``written`` is ``source`` cast to ``specs``: both are read, and checksums compared.

    A tensor that holds NaN is named too.

    declared: the tensors that the headers of ``written`` list.
    """
    problems = [f"tensor {name} was written and is not of the model" for name in declared.keys() - specs.keys()]
    total = sum(spec.num_bytes for spec in specs.values())
    memory = _memory()
    check = NanCheck()
    for name, spec in specs.items():
        held = declared.get(name)
        if held is None or (held.dtype, held.shape) != (spec.dtype, spec.shape):
            is_there = "nothing" if held is None else f"{held.dtype} {held.shape}"
            problems.append(f"tensor {name}: expected {spec.dtype} {spec.shape}, found {is_there}")
            continue
        expected = read = 0
        for window in windows_of(spec):
            part = _part(memory, window, spec)
            source.read_into(name, window, part)
            check.see(name, part)
            expected = zlib.crc32(tensor_bytes(part), expected)
            written.read_into(name, window, part.zero_())
            read = zlib.crc32(tensor_bytes(part), read)
        if expected != read:
            problems.append(f"tensor {name}: expected crc32:{expected:08x} as in the source, found crc32:{read:08x}")
        report("verify", spec.num_bytes, total)
    if problems:
        again = "The disk or the memory is faulty, or the source changed: convert again"
        problems = [f"{problem}. {again}" for problem in problems]
    if problems := [*problems, *check.problems()]:
        raise CheckpointError(str(directory), problems)
