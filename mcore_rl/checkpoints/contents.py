"""Describes a checkpoint on disk, Hugging Face or Megatron, from its headers and metadata; reads no element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.convert import HF, open_hf, open_megatron
from mcore_rl.checkpoints.distcp import METADATA, DistributedCheckpoint
from mcore_rl.checkpoints.megatron_checkpoint import StoredKeys
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.checkpoints.stacked import stored_tensors
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import CONFIG
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.table import Table

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Contents:
    """One checkpoint.

    kind: ``hugging face`` or ``megatron``.  family: ``unknown`` without a config.json.  num_experts: per layer; 0: no
    experts.  num_parameters: elements of the model's weights, without padding where the model is known.  dtypes: dtype
    -> bytes.  num_others: entries that are not weights (optimizer, random state).  notes: for people.
    """

    kind: str
    family: str
    num_layers: int
    num_experts: int
    num_parameters: int
    dtypes: dict[str, int]
    num_bytes: int
    num_tensors: int
    num_files: int
    num_others: int
    notes: tuple[str, ...]


def inspect(directory: Path, config: Path | None = None) -> Contents:
    """The contents of ``directory``, a checkpoint of either kind.  config: the directory of config.json, if another.

    Without a config.json, a Megatron checkpoint is described by its keys alone.  Raises as ``convert.open_hf`` and
    ``convert.open_megatron`` do.
    """
    if not directory.is_dir():
        raise CheckpointError(str(directory), ["is not a directory. Give that of a checkpoint"])
    if not (directory / METADATA).exists():
        return _hugging_face(directory)
    if config is None and not (directory / HF / CONFIG).exists():
        return _unknown_megatron(directory)
    source = open_megatron(directory, config)
    stored = [source.stored.tensors[key] for key in source.used_keys]
    notes = [_stacked(source.keys)]
    if source.head is Head.value:
        notes.append("ends in a value head: a critic")
    return Contents(
        kind="megatron",
        family=source.table.family.name,
        num_layers=source.table.model.num_layers,
        num_experts=_num_experts(source.table),
        num_parameters=sum(prod(spec.shape) for spec in source.tensors.values()),
        **_sizes(stored),
        num_files=len(source.stored.files),
        num_others=len(source.stored.tensors) - len(stored) + len(source.stored.others),
        notes=tuple(notes),
    )


def _hugging_face(directory: Path) -> Contents:
    checkpoint, table = open_hf(directory)
    known = stored_tensors(table, checkpoint)
    infos = [info for name, info in checkpoint.stored.items() if name in known]
    checkpoint.close()
    return Contents(
        kind="hugging face",
        family=table.family.name,
        num_layers=table.model.num_layers,
        num_experts=_num_experts(table),
        num_parameters=sum(prod(info.shape) for info in infos),
        **_sizes(infos),
        num_files=len({info.file for info in infos}),
        num_others=len(checkpoint.stored) - len(infos),
        notes=("output projection tied to the embedding",) if table.model.tie_output else (),
    )


def _unknown_megatron(directory: Path) -> Contents:
    with DistributedCheckpoint.open(directory) as stored:
        keys = StoredKeys(stored.tensors)
        held = {key: stored.tensors[key] for key in keys.names}
        layers = keys.num_layers_named
        experts = 0
        for key, name in keys.names.items():
            shape = held[key].shape
            if name.stem.startswith("decoder.layers.") and name.layer is None:
                layers = max(layers, shape[0])
                shape = shape[1:]
            if "{e}" in name.stem:
                experts = max(experts, shape[0] if name.expert is None else name.expert + 1)
        return Contents(
            kind="megatron",
            family=UNKNOWN,
            num_layers=layers,
            num_experts=experts,
            num_parameters=sum(prod(tensor.shape) for tensor in held.values()),
            **_sizes(held.values()),
            num_files=len(stored.files),
            num_others=len(stored.tensors) - len(held) + len(stored.others),
            notes=(_stacked(keys), f"no {HF}/{CONFIG} says what model it is: --config DIR holds it against one"),
        )


def _num_experts(table: Table) -> int:
    return 0 if table.model.moe is None else table.model.moe.num_experts


def _stacked(keys: StoredKeys) -> str:
    return "all layers in one tensor each (homogeneous)" if keys.stacked else "a tensor for each layer"


def _sizes(tensors: Collection[TensorSpec]) -> dict[str, Any]:
    """The fields of ``Contents`` that count ``tensors``."""
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.num_bytes
    return {"dtypes": dict(dtypes.most_common()), "num_bytes": dtypes.total(), "num_tensors": len(tensors)}
