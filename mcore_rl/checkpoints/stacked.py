"""Reading and writing checkpoints that hold all experts of a layer in one tensor (``families/stacks.py``).

Some families' checkpoints have such stacks as published.  Of the others, a checkpoint may have them that was written
from the module of transformers 5 by other means than ``save_pretrained``, which takes them apart; it is read too.

Everything else speaks of the tables' tensors, one matrix of one expert.  Reading takes such a matrix out of its slab,
window by window; writing collects the parts of a slab, which one process has, and writes the slab as one run of bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import WINDOW_BYTES, TensorInfo, TensorSpec, assert_part
from mcore_rl.checkpoints.sharded_writer import ShardedWriter
from mcore_rl.families.blocks import HF_MLP
from mcore_rl.families.family import Family
from mcore_rl.families.stacks import Stack, StackedPart, stacked_parts
from mcore_rl.weights.table import HfInfo, Table
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows
from mcore_rl.weights.views import view_of

Slab = tuple[str, int]  # stored tensor, expert


# Mixtral's and MiniMax-M2's name in files, and the module's; other families' modules have the names of their files.
OF_MODULE = (".block_sparse_moe.", ".mlp.")


def expert_parameters(family: Family) -> tuple[Stack, ...]:
    """The parameters in which transformers' modules (5.19) have the experts of a layer, in the order of the module."""
    if family.stacks:  # the files have them, too
        return tuple(stack for stack in family.stacks if len(stack.holds[0].dims) == 2)
    joined = (("linear_fc1.weight", "gate_up_proj"), ("linear_fc2.weight", "down_proj"))
    return tuple(
        Stack(f"{HF_MLP}experts.{name}", rule.hf)
        for end, name in joined
        for rule in family.weights
        if rule.per_expert and rule.name.endswith(end)
    )


def is_fused(checkpoint: HfCheckpoint, table: Table) -> bool:
    """Whether the files have the experts as the modules of transformers 5, and other files of the family do not."""
    model = table.model
    if table.family.stacks or model.moe is None:
        return False
    names = [stack.name for stack in expert_parameters(table.family)]
    layers = filter(model.has_experts, range(model.num_layers))
    return any(name.format(l=layer) in checkpoint.stored for layer in layers for name in names)


def transposed(stacks: Iterable[Stack]) -> tuple[Stack, ...]:
    """``stacks`` with slabs ``[inputs, outputs]``, as published Qwen3-VL-MoE has those that its module has not."""
    return tuple(replace(stack, transposed=not stack.transposed) for stack in stacks)


def stacks_in(checkpoint: HfCheckpoint, table: Table) -> tuple[Stack, ...]:
    """The stacks in the files of ``checkpoint``; which way round those of transformers' modules are, their shapes say.

    Both matrices of an expert together always say it: both are square only if its width is both the hidden size and
    half of it.
    """
    if not is_fused(checkpoint, table):
        return table.family.stacks
    plain = expert_parameters(table.family)
    turned = transposed(plain)
    layer = next(filter(table.model.has_experts, range(table.model.num_layers)))
    held = {stack.name: checkpoint.stored.get(stack.name.format(l=layer)) for stack in plain}

    def fits(stacks: tuple[Stack, ...]) -> bool:
        infos = [(held[stack.name], stack.shape(table.model)) for stack in stacks]
        return all(info is not None and info.shape == shape for info, shape in infos)

    return turned if fits(turned) and not fits(plain) else plain


def parts_of(table: Table, checkpoint: HfCheckpoint | None = None) -> dict[str, StackedPart]:
    """The tables' tensors that stand in stacks in the files of ``table``'s model, by name.

    checkpoint: whose files; None: as checkpoints of the family are written.
    """
    return stacked_parts(table.family.stacks if checkpoint is None else stacks_in(checkpoint, table), table.model)


def _name_in_files(name: str, fused: bool) -> str:
    return name.replace(*OF_MODULE) if fused else name


def stored_tensors(table: Table, checkpoint: HfCheckpoint | None = None) -> dict[str, HfInfo]:
    """Every tensor that a checkpoint's files must hold, by the names in the files.  checkpoint: see ``parts_of``."""
    fused = checkpoint is not None and is_fused(checkpoint, table)
    parts = parts_of(table, checkpoint)
    stored = dict[str, HfInfo]()
    for name, info in table.hf_tensors.items():
        part = parts.get(name)
        if part is None:
            stored[_name_in_files(name, fused)] = info
        else:
            stored.setdefault(part.stored, replace(info, shape=part.stack.shape(table.model)))
    return stored


def num_stored(names: Collection[str], table: Table, checkpoint: HfCheckpoint | None = None) -> int:
    """How many tensors of the files the tables' tensors ``names`` are.  checkpoint: see ``parts_of``."""
    parts = parts_of(table, checkpoint)
    return len({parts[name].stored if name in parts else name for name in names})


def unstacked(checkpoint: HfCheckpoint, table: Table) -> HfCheckpoint:
    """``checkpoint`` with the tables' tensors instead of its stacks; itself, if it has none.

    Stacks that are missing or of another shape give no tensors; ``check_checkpoint`` reports them.
    """
    has_stacks = bool(table.family.stacks) or is_fused(checkpoint, table)
    if not has_stacks or isinstance(checkpoint, UnstackedCheckpoint):
        return checkpoint
    return UnstackedCheckpoint(checkpoint, table)


class UnstackedCheckpoint(HfCheckpoint):
    """The tables' tensors within the stacks of ``files``, beside the other tensors.

    A part's ``TensorInfo`` has its own name and shape, and the bytes of its slab.  ``close`` closes ``files``.
    Parts that take turns in a slab lie in the same bytes, so the last of what was read is kept for the next part:
    whoever reads the parts of a slab in turn reads and dequantises it once.  Memory: that much of one slab.
    """

    def __init__(self, files: HfCheckpoint, table: Table) -> None:
        self.files = files
        self._stacked: dict[str, StackedPart] = {}
        self._last: tuple[Slab, dict[TensorSlice, Tensor]] = ("", -1), {}
        for name, part in parts_of(table, files).items():
            info = files.tensors.get(part.stored)
            if info is not None and info.shape == part.stack.shape(table.model):
                self._stacked[name] = part
        stacks = {part.stored for part in self._stacked.values()}
        others = {name: info for name, info in files.tensors.items() if name not in stacks}
        fused = is_fused(files, table)
        names = {name: _name_in_files(name, fused) for name in table.hf_tensors if name not in self._stacked}
        self._names = {name: stored for name, stored in names.items() if name != stored and stored in others}
        others |= {name: replace(others.pop(stored), name=name) for name, stored in self._names.items()}
        within = {name: self._info(name, table.hf_tensors[name]) for name in self._stacked}
        super().__init__(files.directory, others | within)

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """The tensors of the files."""
        return self.files.stored

    def _info(self, name: str, wanted: HfInfo) -> TensorInfo:
        part = self._stacked[name]
        stack = self.files.tensors[part.stored]
        size = stack.num_bytes // stack.shape[0]
        begin = stack.begin + part.expert * size
        return TensorInfo(name, stack.dtype, wanted.shape, stack.file, begin, begin + size)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """As ``HfCheckpoint.read_into``; a part of a slab at a time, of at most ``WINDOW_BYTES``."""
        part = self._stacked.get(name)
        if part is None:
            self.files.read_into(self._names.get(name, name), region, out)
            return
        assert_part(name, self.tensors[name].shape, region, out)
        if 0 in region.shape:
            return
        stack = self.files.tensors[part.stored]
        outputs = part.outputs(region.start[0], region.shape[0])
        dim = part.dim_of_outputs
        slab = list(zip(region.start, region.shape, strict=True))[:: -1 if dim else 1]
        # Whole turns, so that all parts ask for the same windows.
        turn = outputs.start // outputs.step * outputs.step
        slab[dim] = (turn, len(outputs) * outputs.step)
        begins, sizes = zip(*slab, strict=True)
        whole = TensorSlice((part.expert, *begins), (1, *sizes))
        turned = out.swapaxes(-1, -2) if dim else out
        for window in windows(whole, row_major_strides(stack.shape), WINDOW_BYTES // stack.dtype.itemsize):
            read = self._window(part, window)
            start, _ = window.within(whole)
            skipped = (outputs.start - turn - start[1 + dim]) % outputs.step
            taken = read[0][(*(slice(None),) * dim, slice(skipped, None, outputs.step))]
            into = list(start[1:])
            into[dim] = (into[dim] + skipped) // outputs.step
            view_of(turned, TensorSlice(tuple(into), tuple(taken.shape))).copy_(taken)

    def _window(self, part: StackedPart, window: TensorSlice) -> Tensor:
        """``window`` of the stack of ``part``; kept where another part of its slab lies between its numbers."""
        stack = self.files.tensors[part.stored]
        slab = (part.stored, part.expert)
        if self._last[0] != slab:
            self._last = slab, {}
        kept = self._last[1].get(window)
        if kept is None:
            kept = torch.empty(window.shape, dtype=stack.dtype)
            self.files.read_into(part.stored, window, kept)
            if part.stack.in_turns:
                self._last[1][window] = kept
        return kept

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._last = ("", -1), {}
        self.files.close()


class StackedWriter(ShardedWriter):
    """A ``ShardedWriter`` that is given the tables' tensors and writes the stacks that they are parts of.

    One process gives all parts of a slab, and memory holds the slabs that are not complete yet; where experts are cut
    over processes (``etp``), every part is written by itself.
    """

    def __init__(
        self, directory: Path | str, specs: Sequence[TensorSpec], table: Table, stacks: Iterable[Stack], **options: Any
    ) -> None:
        """specs: of the tables' tensors; a stack has the dtype of its parts.  options: of ``ShardedWriter``."""
        self._parts = stacked_parts(stacks, table.model)
        self._cut = table.parallel.etp > 1
        self._slabs: dict[Slab, Tensor] = {}
        self._missing_of: dict[Slab, int] = {}
        stored: dict[str, TensorSpec] = {}
        for spec in specs:
            part = self._parts.get(spec.name)
            if part is None:
                stored[spec.name] = spec
                continue
            shape = part.stack.shape(table.model)
            known = stored.setdefault(part.stored, TensorSpec(part.stored, spec.dtype, shape))
            assert known.dtype == spec.dtype, f"{spec.name} is {spec.dtype}, and others of {part.stored} {known.dtype}"
        super().__init__(directory, list(stored.values()), **options)

    def write_slice(self, name: str, region: TensorSlice, tensor: Tensor) -> None:
        """As ``ShardedWriter.write_slice``; the bytes of a part are written with the last of its slab."""
        part = self._parts.get(name)
        if part is None:
            super().write_slice(name, region, tensor)
            return
        if self._cut:
            turned = tensor.swapaxes(-1, -2) if part.dim_of_outputs else tensor
            super().write_slice(part.stored, _region(part, region), turned[None])
            return
        info = self._tensors[part.stored]
        slab = (part.stored, part.expert)
        assert tensor.dtype == info.dtype, f"{name}: {tensor.dtype} was not planned"
        if slab not in self._slabs:
            self._slabs[slab] = torch.empty(info.shape[1:], dtype=info.dtype)
        view_of(part.within(self._slabs[slab]), region).copy_(tensor)
        if self._counted(slab, tensor.numel()):
            super().write_slice(part.stored, _place(part, info), self._slabs.pop(slab)[None])

    def note_written(self, name: str, region: TensorSlice) -> None:
        """As ``ShardedWriter.note_written``."""
        part = self._parts.get(name)
        if part is None:
            super().note_written(name, region)
        elif self._cut:
            super().note_written(part.stored, _region(part, region))
        elif self._counted((part.stored, part.expert), region.num_elements):
            super().note_written(part.stored, _place(part, self._tensors[part.stored]))

    def _counted(self, slab: Slab, elements: int) -> bool:
        """Whether ``elements`` more make ``slab`` complete."""
        left = self._missing_of.get(slab, prod(self._tensors[slab[0]].shape[1:])) - elements
        assert left >= 0, f"{slab} was written twice"
        self._missing_of[slab] = left
        return left == 0


def _place(part: StackedPart, info: TensorInfo) -> TensorSlice:
    return TensorSlice((part.expert, *(0,) * (len(info.shape) - 1)), (1, *info.shape[1:]))


def _region(part: StackedPart, region: TensorSlice) -> TensorSlice:
    """Where ``region`` of ``part`` is in its stack."""
    assert not part.stack.in_turns, f"{part.stored}: outputs that take turns are not cut over processes"
    outputs = part.outputs(region.start[0], region.shape[0])
    slab = [(outputs.start, len(outputs)), *zip(region.start[1:], region.shape[1:], strict=True)]
    begins, sizes = zip(*(reversed(slab) if part.dim_of_outputs else slab), strict=True)
    return TensorSlice((part.expert, *begins), (1, *sizes))
