"""One integer for each tensor of a model: rule, layer and expert, so that millions of them are columns of int32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcore_rl.arrays import Int32Array
from mcore_rl.config.model import ModelConfig
from mcore_rl.families.rules import Rule, Stage


class TensorIds:
    """Numbers the tensors of ``rules``: rule by rule, layer by layer, expert by expert."""

    def __init__(self, rules: Sequence[Rule], model: ModelConfig) -> None:
        self._in_layer = np.array([rule.stage is Stage.layer for rule in rules])
        # The place of a rule outside the layers.
        before = (Stage.first, Stage.tower)
        self._place = np.array([-1 if rule.stage in before else model.num_layers for rule in rules])
        self._per_expert = np.array([rule.per_expert for rule in rules])
        num_experts = 1 if model.moe is None else model.moe.num_experts
        self._experts = np.where(self._per_expert, num_experts, 1)
        numbered = {Stage.layer: model.num_layers, Stage.tower: 0 if model.vision is None else model.vision.depth}
        sizes = np.array([numbered.get(rule.stage, 1) for rule in rules], dtype=np.int64) * self._experts
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        assert self._starts[-1] < 2**31, "more tensors than 32 bits number"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def encode(self, rule: int, layers: NDArray[np.integer], experts: NDArray[np.integer]) -> Int32Array:
        """Ids of tensors of rule number ``rule``; layer and expert are 0 for a tensor without them."""
        numbers: Int32Array = (self._starts[rule] + layers * self._experts[rule] + experts).astype(np.int32)
        return numbers

    def decode(self, ids: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(rule, layer, expert) of each id; 0 for a tensor without layer or expert."""
        rule = np.searchsorted(self._starts, ids, side="right").astype(np.int32) - 1
        layer, expert = np.divmod(ids - self._starts[rule], self._experts[rule])
        return rule, layer.astype(np.int32), expert.astype(np.int32)

    def places(self, ids: Int32Array) -> Int32Array:
        """The place of each in the model: -1 before the layers, its layer, or the number of layers behind them."""
        rule, layer, _ = self.decode(ids)
        return np.where(self._in_layer[rule], layer, self._place[rule]).astype(np.int32)
