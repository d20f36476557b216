"""Adapters as PEFT's files have them, and as the tables do: an A and a B for each Hugging Face linear.

transformers 5 keeps the experts of a layer in two parameters, ``gate_up_proj`` and ``down_proj``.  PEFT (0.21) wraps
each parameter once (``ParamWrapper`` in peft/tuners/lora/layer.py): A is ``[experts * rank, inputs]``, expert by
expert, and B ``[outputs, rank * experts]``, in which experts take turns.  Gate and up, which have adapters of their own
here, share the rank there: A has one below the other, B is block diagonal.  The wrapper of the later parameter is the
outer one; the other's name has ``base_layer``.

``peft_tensors`` makes PEFT's tensors of those of the tables, ``PeftCheckpoint`` reads a directory that PEFT saved.
Directories of transformers 4, with a module for each expert, are read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorInfo, windows_of
from mcore_rl.checkpoints.stacked import OF_MODULE, expert_parameters
from mcore_rl.config.lora import LoraConfig
from mcore_rl.families.blocks import HF_LAYER
from mcore_rl.families.rules import num_experts
from mcore_rl.families.stacks import Stack, StackedPart
from mcore_rl.weights.adapter_table import HEAD, PEFT, AdapterTable, adapter_name, module_of
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of

WITHIN_WHOLE = "model.language_model."  # where transformers 5 has the text model's ``model.`` in a multimodal one


def in_whole(name: str) -> str:
    """The name that a tensor of the text model has in a multimodal model of transformers 5."""
    return re.sub(rf"^{re.escape(PEFT)}model\.", f"{PEFT}{WITHIN_WHOLE}", name)


def of_text(name: str) -> str:
    """A name of PEFT's files as it is of the text model alone: transformers 5 and 4 have had it within the whole."""
    within = "|".join(map(re.escape, (WITHIN_WHOLE, "language_model.model.")))
    name = re.sub(rf"^{re.escape(PEFT)}(?:{within})", f"{PEFT}model.", name)
    return name.replace(f"{PEFT}language_model.lm_head.", f"{PEFT}lm_head.")


def targets_in_whole(targets: Sequence[str]) -> str:
    """PEFT's pattern of the layers of the text model ``targets``; a tower has layers of the same names."""
    of_layers = "|".join(re.escape(target) for target in targets if target != HEAD)
    patterns = [rf"{re.escape(WITHIN_WHOLE)}(?:.*\.)?(?:{of_layers})"] if of_layers else []
    return "|".join([*patterns, HEAD] if HEAD in targets else patterns)


@dataclass(frozen=True)
class _Wrapped:
    """A parameter of experts that has adapters.  holds: places in ``stack.holds`` of those that have."""

    stack: Stack
    holds: tuple[int, ...]


def _wrapped(table: AdapterTable) -> list[_Wrapped]:
    adapted = {module for each in table.adapted.values() for module in each.modules}
    wrapped = []
    for stack in expert_parameters(table.base.family):
        holds = tuple(place for place, tensor in enumerate(stack.holds) if module_of(tensor) in adapted)
        if holds:
            wrapped.append(_Wrapped(stack, holds))
    return wrapped


def target_fields(table: AdapterTable) -> dict[str, Any]:
    """The fields of ``adapter_config.json`` that say which layers of a model with experts are adapted, and their ranks.

    PEFT takes ``gate_proj`` in ``target_modules`` for the experts' alone, so that layers of dense MLPs and shared
    experts with such names are parameters here.
    """
    lora = table.lora
    wrapped = _wrapped(table)
    of_experts = {tensor.name for stack in expert_parameters(table.base.family) for tensor in stack.holds}
    taken = {name.removesuffix(".weight").rpartition(".")[2] for name in of_experts}
    modules = []
    parameters = [_within_layer(each.stack.name) for each in wrapped]
    for adapted in table.adapted.values():
        for module in adapted.modules:
            if f"{module}.weight" in of_experts:
                continue
            within = _within_layer(module)
            if within.rpartition(".")[2] in taken:
                parameters.append(f"{within}.weight")
            else:
                modules.append(within)
    ranks = {_pattern(each.stack): len(each.holds) * lora.rank for each in wrapped if len(each.holds) > 1}
    alphas = {pattern: replace(lora, rank=rank, alpha=1.0).scale for pattern, rank in ranks.items()}
    return {
        "target_modules": modules,
        "exclude_modules": None,
        "target_parameters": parameters or None,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: lora.scale / scale for pattern, scale in alphas.items()},
    }


def _within_layer(name: str) -> str:
    return name.removeprefix(HF_LAYER)


def _pattern(stack: Stack) -> str:
    return re.escape(_within_layer(stack.name))


def peft_tensors(tensors: Mapping[str, Tensor], table: AdapterTable) -> dict[str, Tensor]:
    """Whole adapters by PEFT's names for transformers 5, of ``tensors``, whole and by the names of ``table``."""
    made = dict(tensors)
    wrapped = _wrapped(table)
    model = table.model
    for layer in filter(model.has_experts, range(model.num_layers)) if wrapped else ():
        for number, each in enumerate(wrapped):
            halves = {which: list[Tensor]() for which in "AB"}
            for expert in range(num_experts(model)):
                names = {which: _names(each, layer, expert, which) for which in "AB"}
                halves["A"].append(torch.cat([made.pop(name) for name in names["A"]]))
                halves["B"].append(_joined([made.pop(name) for name in names["B"]], each))
            parameter = each.stack.name.format(l=layer).rpartition(".")[0]
            module = parameter + ".base_layer" * (len(wrapped) - 1 - number)
            made[adapter_name(module, "A")] = torch.cat(halves["A"])
            made[adapter_name(module, "B")] = torch.stack(halves["B"], dim=2).flatten(1)
    return made


def _names(wrapped: _Wrapped, layer: int, expert: int, which: str) -> list[str]:
    holds = (module_of(wrapped.stack.holds[place]) for place in wrapped.holds)
    return [adapter_name(module.format(l=layer, e=expert), which) for module in holds]


def _joined(halves: Sequence[Tensor], wrapped: _Wrapped) -> Tensor:
    """B of one expert, block diagonal, with zeros for what has no adapters."""
    outputs, rank = halves[0].shape
    dtype = halves[0].dtype
    joined = torch.zeros(len(wrapped.stack.holds) * outputs, len(halves) * rank, dtype=dtype)
    for number, (place, half) in enumerate(zip(wrapped.holds, halves, strict=True)):
        rows = StackedPart(wrapped.stack, "", 0, place, outputs).rows
        joined[rows, number * rank : (number + 1) * rank] = half
    return joined


_HALF = re.compile(rf"{re.escape(PEFT)}(.+)\.lora_([AB])\.weight")
_EXPERTS = re.compile(r"(.+\.mlp\.experts)((?:\.base_layer)*)")
_LAYER = re.compile(re.escape(HF_LAYER).replace(r"\{l\}", r"(\d+)"))


def number_for(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """What PEFT takes for ``module`` of ``rank_pattern`` or ``alpha_pattern`` (``get_pattern_key``, peft/utils)."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclass(frozen=True)
class _Half:
    """Where one half of an adapter is.

    info: the stored tensor, of ``experts`` experts (0: of a linear alone).  factor: of its numbers.  part: which expert
    and which of its outputs.  block: (first, last, exclusive) of its ranks in the stored tensor, where each part has
    its own.
    """

    info: TensorInfo
    factor: float
    rank: int
    experts: int = 0
    part: StackedPart | None = None
    block: tuple[int, int] | None = None


class PeftCheckpoint(HfCheckpoint):
    """The adapters of a directory that PEFT saved, by the names of the tables: A and B of each Hugging Face linear.

    All have one scale, ``scale``: where a pattern gives another, B is multiplied.  After ``pad`` all have the rank
    ``lora.rank``, too.  ``lora``: the rank, alpha and use_rslora that a run must have to train them.  ``base_copies``:
    (stored name, name in the model) of tensors of the model itself that PEFT saved.  ``problems``: what is wrong with
    the tensors' ranks or with the names of experts' parameters; empty: they can be read.
    """

    def __init__(
        self, directory: Path, files: Mapping[str, TensorInfo], config: Mapping[str, Any], table: Table
    ) -> None:
        """config: see ``read_adapter_config``.  table: of the model's weights."""
        self._config = config
        self._table = table
        self._headers = files
        self._halves: dict[str, _Half] = {}
        self._pad: int | None = None
        self._absent: dict[str, tuple[int, ...]] = {}
        self._of_other_rank: list[str] = []
        self._in_blocks: dict[tuple[Stack, int], bool] = {}
        self.base_copies: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self._stored = lru_cache(maxsize=2)(self._read_stored)
        super().__init__(directory, files)  # the files' tensors are read by their own names until they are placed
        self._of_top = LoraConfig(
            rank=config["r"], alpha=float(config["lora_alpha"]), use_rslora=bool(config.get("use_rslora"))
        )
        outer = self._outermost()
        for name, info in files.items():
            self._place(name, info, outer)
        if self._of_other_rank:
            first = self._of_other_rank[0]
            count = len(self._of_other_rank)
            remedy = "their scale would be wrong. Write the r, lora_alpha and patterns that they were trained with"
            self.problems.append(f"{count} of {len(files)} tensors, the first {first}: {remedy}")
        ranks = {half.rank for half in self._halves.values()} or {self._of_top.rank}
        self.lora = self._of_top
        if max(ranks) != self._of_top.rank:
            of_one = replace(self._of_top, rank=max(ranks), alpha=1.0)
            self.lora = replace(of_one, alpha=self._of_top.scale / of_one.scale)
        self.scale = self.lora.scale
        self._show()

    def _outermost(self) -> dict[str, int]:
        """Wrappers around the experts of each layer, by the experts' module."""
        outermost: dict[str, int] = {}
        for name in self._headers:
            half = _HALF.fullmatch(name)
            match = half and _EXPERTS.fullmatch(half[1])
            if match:
                depth = match[2].count(".base_layer") + 1
                outermost[match[1]] = max(outermost.get(match[1], 0), depth)
        return outermost

    def _place(self, name: str, info: TensorInfo, outer: Mapping[str, int]) -> None:
        half = _HALF.fullmatch(name)
        experts = half and _EXPERTS.fullmatch(half[1])
        if half is None:
            theirs = name.removeprefix(PEFT).replace(".base_layer.", ".")
            if name.startswith(PEFT) and theirs in self._table.hf_tensors:
                self.base_copies.append((name, theirs))
            else:
                self._halves[name] = _Half(info, 1.0, self._of_top.rank)  # a value head
            return
        if experts is None or not self._table.model.moe:
            rank = info.shape[0] if half[2] == "A" else info.shape[-1]
            if self._rank_fits(name, half[1], rank):
                in_files = f"{half[1]}.".replace(*OF_MODULE[::-1]).removesuffix(".")
                module = in_files if f"{in_files}.weight" in self._table.hf_tensors else half[1]
                self._halves[adapter_name(module, half[2])] = _Half(info, self._factor(half[1], half[2]), rank)
            return
        depth = outer[experts[1]] - 1 - experts[2].count(".base_layer")
        wrapped = self._wrapped(experts[1], outer[experts[1]])
        if wrapped is None:
            self.problems.append(
                f"{name}: target_parameters={self._config.get('target_parameters')} do not say of which parameter"
            )
            return
        stack = wrapped[depth]
        self._place_experts(name, info, stack, half[2], experts[1])

    def _wrapped(self, experts: str, count: int) -> list[Stack] | None:
        """The parameters of the module ``experts`` that are wrapped, the innermost first; None: nobody knows."""
        stacks = expert_parameters(self._table.family)
        if count == len(stacks):
            return list(stacks)
        names = [f"{experts}.{stack.name.rpartition('.')[2]}" for stack in stacks]
        targets = self._config.get("target_parameters") or []
        named = [
            stack
            for stack, name in zip(stacks, names, strict=True)
            if any(name == target or name.endswith(f".{target}") for target in targets)
        ]
        return named if len(named) == count else None

    def _place_experts(self, name: str, info: TensorInfo, stack: Stack, which: str, experts: str) -> None:
        model = self._table.model
        module = f"{experts}.{stack.name.rpartition('.')[2]}"
        match = _LAYER.match(f"{experts}.")
        count = num_experts(model)
        layer = int(match[1]) if match else -1
        stored = info.shape[0] if which == "A" else info.shape[-1]
        if match is None or stored % count:
            self.problems.append(f"{name}: shape {info.shape} is not of {count} experts of a layer")
            return
        rank = stored // count
        if not self._rank_fits(name, module, rank):
            return
        blocks = self._blocks(stack, rank)
        for place, tensor in enumerate(stack.holds):
            outputs = tensor.shape(model)[0]
            for expert in range(count):
                own = rank // len(stack.holds) if blocks else rank
                self._halves[adapter_name(module_of(tensor).format(l=layer, e=expert), which)] = _Half(
                    info,
                    self._factor(module, which),
                    own,
                    count,
                    StackedPart(stack, name, expert, place, outputs),
                    (place * own, (place + 1) * own) if blocks else None,
                )

    def _blocks(self, stack: Stack, rank: int) -> bool:
        """Whether each of ``stack.holds`` has ranks of its own, as what we write has: asked of every layer's B."""
        if len(stack.holds) == 1 or rank % len(stack.holds):
            return False
        if (stack, rank) not in self._in_blocks:
            layers = list(self._of_stack(stack, rank))
            self._in_blocks[stack, rank] = any(filled for filled, _ in layers) and all(block for _, block in layers)
        return self._in_blocks[stack, rank]

    def _of_stack(self, stack: Stack, rank: int) -> Iterator[tuple[bool, bool]]:
        """(whether it is not 0, whether it is block diagonal) of B of the parameter in each layer."""
        own = rank // len(stack.holds)
        outer = self._outermost()
        model = self._table.model
        experts = num_experts(model)
        for module, count in outer.items():
            wrapped = self._wrapped(module, count)
            if wrapped is None or stack not in wrapped:
                continue
            inner = module + ".base_layer" * (count - 1 - wrapped.index(stack))
            info = self._headers.get(adapter_name(inner, "B"))
            if info is None or info.shape[-1] != rank * experts:
                continue
            b = self._read_stored(info.name).reshape(-1, rank, experts)
            diagonal = True
            for place, tensor in enumerate(stack.holds):
                mine = b[StackedPart(stack, "", 0, place, tensor.shape(model)[0]).rows]
                if mine[:, : place * own].any() or mine[:, (place + 1) * own :].any():
                    diagonal = False
            yield bool(b.any()), diagonal

    def _rank_fits(self, name: str, module: str, rank: int) -> bool:
        said = number_for(module, self._config.get("rank_pattern"), self._config["r"])
        if rank != said:
            self._of_other_rank.append(f"{name}, have the rank {rank}, and the settings say r={said}")
        return bool(rank == said)

    def _factor(self, module: str, which: str) -> float:
        """What B is multiplied by, so that its scale is that of ``r`` and ``lora_alpha``."""
        if which == "A":
            return 1.0
        rank = number_for(module, self._config.get("rank_pattern"), self._config["r"])
        alpha = number_for(module, self._config.get("alpha_pattern"), self._config["lora_alpha"])
        factor = replace(self._of_top, rank=rank, alpha=float(alpha)).scale / self._of_top.scale
        return 1.0 if isclose(factor, 1.0) else factor

    def pad(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Give every adapter the rank ``lora.rank``, and zeros to those of ``wanted`` that PEFT left out by layer.

        Zeros in both A and B have no gradient, so that no step of training moves them.

        wanted: shapes by name.  Left out are those of layers that ``layers_to_transform`` does not name.  Where one of
        gate and up is wanted, and B of the other is 0, this is no adapter.
        """
        self._pad = self.lora.rank
        for name in [name for name in self._halves if name not in wanted and name.endswith(".lora_B.weight")]:
            if self._halves[name].part is not None and not self._whole(name).any():
                del self._halves[name]
                self._halves.pop(name.removesuffix("B.weight") + "A.weight", None)
        kept = self._config.get("layers_to_transform")
        if kept is not None and kept != []:
            layers = {kept} if isinstance(kept, int) else set(kept)
            for name in wanted.keys() - self._halves.keys():
                match = _LAYER.match(name.removeprefix(PEFT))
                if match and int(match[1]) not in layers:
                    self._absent[name] = wanted[name]
        self._show()

    def _show(self) -> None:
        tensors = {}
        for name, half in self._halves.items():
            rank = self._pad or half.rank
            shape = half.info.shape
            inner: tuple[int, ...]
            if half.part is not None:
                inner = (half.part.size, rank) if name.endswith("B.weight") else (rank, shape[1])
            elif _HALF.fullmatch(name):
                inner = (shape[0], rank) if name.endswith("B.weight") else (rank, *shape[1:])
            else:
                inner = shape
            dtype = half.info.dtype if half.factor == 1.0 else torch.float32
            tensors[name] = TensorInfo(name, dtype, inner, half.info.file, half.info.begin, half.info.end)
        some = next(iter(self._headers.values()))
        for name, shape in self._absent.items():
            tensors[name] = TensorInfo(name, some.dtype, shape, some.file, some.begin, some.end)
        self.tensors = tensors  # type: ignore[assignment]

    def _read_stored(self, name: str) -> Tensor:
        info = self._headers[name]
        out = torch.empty(info.shape, dtype=info.dtype)
        self._read(info, TensorSlice.whole(info.shape), out)
        return out

    def holds_copy(self, stored: str, base: HfCheckpoint, name: str) -> bool:
        """Whether the stored tensor is tensor ``name`` of ``base``, cast to its dtype."""
        info = self._headers[stored]
        other = base.tensors[name]
        if info.shape != other.shape:
            return False
        for window in windows_of(info):
            held = torch.empty(window.shape, dtype=info.dtype)
            theirs = torch.empty(window.shape, dtype=other.dtype)
            self._read(info, window, held)
            base.read_into(name, window, theirs)
            if not torch.equal(held, theirs.to(held.dtype)):
                return False
        return True

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """As ``HfCheckpoint.read_into``."""
        out.copy_(view_of(self._whole(name), region))

    def _whole(self, name: str) -> Tensor:
        if name in self._absent:
            return torch.zeros(self._absent[name])
        half = self._halves[name]
        of_b = name.endswith(".lora_B.weight")
        held = self._stored(half.info.name)
        if half.part is not None:
            if of_b:
                held = held.reshape(len(held), -1, half.experts)[half.part.rows, :, half.part.expert]
            else:
                held = held.reshape(half.experts, -1, held.shape[1])[half.part.expert]
            if half.block is not None:
                held = held[:, slice(*half.block)] if of_b else held[slice(*half.block)]
        if half.factor != 1.0:
            held = held.float() * half.factor
        missing = (self._pad or half.rank) - half.rank
        if missing and _HALF.fullmatch(name):
            zeros = torch.zeros(held.shape[0], missing) if of_b else torch.zeros(missing, held.shape[1])
            held = torch.cat([held, zeros.to(held.dtype)], dim=1 if of_b else 0)
        return held
