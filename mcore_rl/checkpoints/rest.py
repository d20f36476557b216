"""Reading and writing what a multimodal checkpoint holds beside its text part (``families/text_part.py``).

``open_files`` shows of the files of a multimodal checkpoint the text model's tensors alone, by the names of the tables.
``Rest`` is the other tensors and how the files are spelt: whoever writes a checkpoint of the whole asks ``rest_of`` the
source, gives the writer its names, and copies the tensors.  A checkpoint that has no Hugging Face files, Megatron's or
a run's, keeps the rest in one file beside config.json, so that it can be exported when the source is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import SCALE_SUFFIX, HfCheckpoint
from mcore_rl.checkpoints.safetensors import (
    OpenFiles,
    TensorInfo,
    TensorSpec,
    encode_header,
    read_header,
    read_metadata,
    read_slice,
    tensor_bytes,
    windows_of,
)
from mcore_rl.checkpoints.sharded_writer import FORMAT, ShardedWriter
from mcore_rl.checkpoints.stacked import StackedWriter, expert_parameters, is_fused, stacks_in, transposed
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.stacks import Stack
from mcore_rl.families.text_part import NamesInFiles, TextPart, text_part_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice, offset_of, row_major_strides

KEPT = "not_trained.safetensors"  # where a checkpoint without Hugging Face files has the rest
# How files have the experts of a layer: one by one (or as the family's files do), or as transformers' modules have
# them, or these transposed.
ALONE = "alone"
STACKED = "stacked"
TRANSPOSED = "transposed"


def part_in(directory: Path) -> TextPart | None:
    """The row of the multimodal checkpoint in ``directory``; None: it is none, or has no config.json."""
    return text_part_of(read_config(directory)) if (directory / CONFIG).is_file() else None


def spelling_of(names: Iterable[str], part: TextPart) -> NamesInFiles:
    """The spelling by which files with ``names`` have the rest, and most tensors of the text."""
    names = list(names)

    def known(spelling: NamesInFiles) -> tuple[bool, int]:
        of_rest = sum(name.startswith(spelling.rest) for name in names)
        return of_rest > 0, of_rest + sum(spelling.of_tables(name) is not None for name in names)

    return max(part.spellings, key=known)  # the first of equals


def open_files(directory: Path, *, pictures: bool = False) -> HfCheckpoint:
    """``HfCheckpoint.open``; of a multimodal checkpoint its text model's tensors, by the names of the tables.

    A tensor of no known name is among them by its own, so that ``check_checkpoint`` refuses it.  pictures: those of the
    vision tower, too.
    """
    checkpoint = HfCheckpoint.open(directory)
    part = part_in(directory)
    if part is None:
        return checkpoint
    spelling = spelling_of(checkpoint.tensors, part)
    if problems := list(_problems(_not_trained(checkpoint, spelling), spelling)):
        raise CheckpointError(str(directory), problems)
    shown = {
        spelling.of_tables(name) or name: info
        for name, info in checkpoint.tensors.items()
        if not name.startswith(spelling.rest)
    }
    if pictures:
        shown |= {spelling.of_tower(name): info for name, info in _not_trained(checkpoint, spelling).items()}
    return HfCheckpoint(directory, {name: replace(info, name=name) for name, info in shown.items()})


def _not_trained(checkpoint: HfCheckpoint, spelling: NamesInFiles) -> dict[str, TensorInfo]:
    return {name: info for name, info in checkpoint.tensors.items() if name.startswith(spelling.rest)}


def _problems(tensors: Mapping[str, TensorInfo], spelling: NamesInFiles) -> Iterator[str]:
    """Why the rest ``tensors`` of a checkpoint cannot be carried along."""
    if not tensors:
        beginnings = " or ".join(f"{name}*" for name in spelling.rest)
        yield f"has no tensor {beginnings}, of which config.json speaks. Download the checkpoint again"
    quantised = [name for name in tensors if name.endswith(SCALE_SUFFIX)]
    if quantised:
        problem = f"{len(quantised)} tensors, the first {quantised[0]}, are scales of a part that is not trained"
        yield f"{problem}: what is exported would lack its quantisation. Give the unquantised checkpoint"


@dataclass(frozen=True)
class Rest:
    """The tensors of a multimodal checkpoint that are not trained, and how its files are spelt.

    directory: the source.  experts: ``ALONE``, ``STACKED`` or ``TRANSPOSED``.  tensors: by their names in the files.
    """

    directory: Path
    spelling: NamesInFiles
    experts: str
    tensors: Mapping[str, TensorInfo]

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes."""
        return [TensorSpec(info.name, info.dtype, info.shape) for info in self.tensors.values()]

    def without_tower(self) -> Rest:
        """The rest of a model that sees pictures: nothing, but the files are spelt alike."""
        return replace(self, tensors={})

    def spelled(self, name: str) -> str:
        """The files' name of the tables' tensor, or of one of the rest."""
        return name if name in self.tensors else self.spelling.in_files(name)

    def stacks(self, table: Table) -> tuple[Stack, ...]:
        """The stacks that the files of ``table``'s model have."""
        if self.experts == ALONE:
            return table.family.stacks
        stacks = expert_parameters(table.family)
        return transposed(stacks) if self.experts == TRANSPOSED else stacks

    def write(self, writer: ShardedWriter) -> None:
        """Copy the tensors to the files of ``writer``."""
        for info, window, part in self._windows():
            writer.write_slice(info.name, window, part)

    def demand_same(self, directory: Path) -> None:
        """Raises CheckpointError unless the checkpoint in ``directory`` has the same tensors, bit for bit."""
        if not self.tensors:  # its tower is among the weights
            return
        other = rest_of(directory)
        assert other is not None, f"{directory} is of no multimodal model"
        wrong = {spec.name for spec in {*self.specs} ^ {*other.specs}}
        if not wrong:
            for (info, _, mine), (_, _, theirs) in zip(self._windows(), other._windows(), strict=True):
                if tensor_bytes(mine) != tensor_bytes(theirs):
                    wrong.add(info.name)
        if wrong:
            problems = [f"tensor {name} is not that of {self.directory}. Convert again" for name in sorted(wrong)]
            raise CheckpointError(str(directory), problems)

    def _windows(self) -> Iterator[tuple[TensorInfo, TensorSlice, Tensor]]:
        """(tensor, region, its elements) in the order of names, and of the bytes of each tensor."""
        with OpenFiles(self.directory) as files:
            for info in sorted(self.tensors.values(), key=lambda info: info.name):
                for window in windows_of(info):
                    part = torch.empty(window.shape, dtype=info.dtype)
                    read_slice(files.descriptor(info.file), info, window, part)
                    yield info, window, part


def rest_of(directory: Path) -> Rest | None:
    """The rest of the multimodal checkpoint in ``directory``, or beside whose config.json ``keep_rest`` wrote it.

    None: it is of a language model alone.  Raises CheckpointError if it cannot be read or lacks the rest.
    """
    part = part_in(directory)
    if part is None:
        return None
    kept = directory / KEPT
    if kept.is_file():
        tensors, problems = read_header(kept)
        if problems:
            raise CheckpointError(str(directory), problems)
        said = read_metadata(kept)
        spelling = next((each for each in part.spellings if each.model == said.get("spelling")), None)
        if spelling is None:
            problem = f"{KEPT} does not say how the checkpoint that it is of was spelt. Give that with --config DIR"
            raise CheckpointError(str(directory), [problem])
        return Rest(directory, spelling, said.get("experts", ALONE), tensors)
    checkpoint = HfCheckpoint.open(directory)
    spelling = spelling_of(checkpoint.tensors, part)
    tensors = _not_trained(checkpoint, spelling)
    if problems := list(_problems(tensors, spelling)):
        raise CheckpointError(str(directory), problems)
    return Rest(directory, spelling, _experts_in(directory), tensors)


def _experts_in(directory: Path) -> str:
    table = Table(*model_of(read_config(directory)))
    checkpoint = open_files(directory)
    if not is_fused(checkpoint, table):
        return ALONE
    return STACKED if stacks_in(checkpoint, table) == expert_parameters(table.family) else TRANSPOSED


def rest_beside(table: Table, directory: Path) -> Rest | None:
    """The rest of the checkpoint in ``directory``, as ``rest_of`` reads it, that the weights of ``table`` lack.

    None: also of a critic that reads text alone, whose files are a language model's.
    """
    sees = table.model.vision is not None
    if table.head is Head.value and not sees:
        return None
    rest = rest_of(directory)
    return rest.without_tower() if rest is not None and sees else rest


def weights_have_tower(directory: Path) -> bool:
    """Whether ``keep_rest`` wrote into ``directory`` that the weights beside it have the vision tower."""
    if not (directory / KEPT).is_file():
        return False
    tensors, problems = read_header(directory / KEPT)
    return not tensors and not problems


def keep_rest(source: Path, target: Path, *, tower: bool = True) -> None:
    """Write the rest of the checkpoint in ``source``, if it has one, into the directory ``target``, as ``KEPT``.

    tower: False writes how files are spelt, and nothing else: the weights have the tower.
    Raises CheckpointError as ``rest_of``, and if it cannot be written.
    """
    rest = rest_of(source)
    if rest is None:
        return
    rest = rest if tower else rest.without_tower()
    path = target / KEPT
    said = {**FORMAT, "spelling": rest.spelling.model, "experts": rest.experts}
    header, placed = encode_header(rest.specs, path, said)
    try:
        with path.open("xb") as file:
            file.write(header)
            for info, window, part in rest._windows():
                begin = offset_of(window.start, row_major_strides(info.shape)) * info.dtype.itemsize
                file.seek(placed[info.name].begin + begin)
                file.write(tensor_bytes(part))
    except OSError as error:
        problem = f"{path.name}: cannot be written: {error.strerror}. Mend that and try again"
        raise CheckpointError(str(target), [problem]) from error


def writer_of(
    directory: Path | str, specs: Sequence[TensorSpec], table: Table, rest: Rest | None = None, **options: Any
) -> ShardedWriter:
    """The writer of a checkpoint of ``table``'s model, for the tables' tensors ``specs``.

    rest: of the source; the checkpoint is spelt like it and has its tensors, which ``Rest.write`` copies.
    """
    stacks = table.family.stacks
    if rest is not None:
        stacks = rest.stacks(table)
        specs = [*specs, *rest.specs]
        options["spelled"] = rest.spelled
    if not stacks:
        return ShardedWriter(directory, specs, **options)
    return StackedWriter(directory, specs, table, stacks, **options)
