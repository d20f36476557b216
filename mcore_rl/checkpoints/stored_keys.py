"""The keys of Megatron checkpoints, in whatever dialect they were saved, and which tensor of a model each one holds.

Megatron-core writes a layer's tensors under ``decoder.layers.{l}.`` or, where all layers are alike, those of all layers
under ``decoder.layers.`` with the layer as the first dimension ("homogeneous"; transformer/transformer_block.py,
``sharded_state_dict``).  Experts are stacked under ``mlp.experts.experts.``, or stand one by one below it.  Norms that
Transformer Engine fuses are named after the projection behind them, by local layers too.  Some tools put ``model.`` or
``module.`` before all of it.

A key is parsed into a stem, which is the name of a ``Rule``, and the layer and expert in it; a layer or expert that is
not in the key is an index into the tensor's first dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rl.weights.names import canonical

LAYER = "decoder.layers.{l}."
_PREFIX = re.compile(r"^(?:model\.|module\.)+")
_LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))$")
_NAMED_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
# What a training run saves beside the model.
_NOT_THE_MODEL = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.|^opt_param_scheduler|^rng_state|^rerun_state|^mtp\.|_extra_state(?:/|$)"
)
_ADAPTER = re.compile(r"\.adapters?\.|\.lora_[AB]\.")


@dataclass(frozen=True)
class Name:
    """A parsed key.  stem: name of a rule.  layer, expert: None if the key names none (it has none, or holds all)."""

    stem: str
    layer: int | None
    expert: int | None


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is stored: under ``key``, at index ``lead`` of the first dimensions."""

    key: str
    lead: tuple[int, ...]


def parse(key: str) -> Name | None:
    """The parsed ``key``; None if it holds no weight of the model."""
    key = _PREFIX.sub("", key)
    if _NOT_THE_MODEL.search(key):
        return None
    match = _LAYER.match(key)
    if match is None:
        stem = canonical(key)
        return None if stem is None else Name(stem, None, None)
    layer, rest = match.groups()
    named = canonical(LAYER + rest)
    if named is None:
        return None
    rest = named.removeprefix(LAYER)
    expert = _EXPERT.match(rest) or _NAMED_EXPERT.match(rest)
    if expert is not None:
        rest = f"mlp.experts.local_experts.{{e}}.{expert.group(2)}"
    number = expert.group(1) if expert is not None else None
    return Name(LAYER + rest, None if layer is None else int(layer), None if number is None else int(number))


def is_adapter(key: str) -> bool:
    """Whether ``key`` holds a part of an adapter (LoRA), which is trained beside frozen weights."""
    return _ADAPTER.search(key) is not None


class StoredKeys:
    """The parsed keys of one checkpoint."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.names = {key: name for key in keys if (name := parse(key)) is not None}
        self._keys = {name: key for key, name in self.names.items()}

    @property
    def stacked(self) -> bool:
        """Whether layers are the first dimension of tensors, not parts of keys."""
        return any(name.stem.startswith(LAYER) and name.layer is None for name in self._keys)

    @property
    def num_layers_named(self) -> int:
        """Number of layers named in keys; 0 if layers are stacked."""
        return 1 + max((name.layer for name in self._keys if name.layer is not None), default=-1)

    def find(self, stem: str, layer: int | None, expert: int | None) -> TensorLocation | None:
        """The location of rule ``stem``'s tensor for ``layer`` and ``expert`` (None: it has none); None if absent."""
        for by_layer in (layer, None) if layer is not None else (None,):
            for by_expert in (expert, None) if expert is not None else (None,):
                key = self._keys.get(Name(stem, by_layer, by_expert))
                if key is not None:
                    lead = (layer if by_layer is None else None, expert if by_expert is None else None)
                    return TensorLocation(key, tuple(index for index in lead if index is not None))
        return None
