"""Puts the rounding of engines in fp8 into transformers' model, one group of layers after another.

What an engine in fp8 does otherwise than one in bfloat16 is three things: its matrices are rounded, what they multiply
is rounded, and its kernels add in an order of their own.  transformers in float32 shows the first two, each alone.

Matrices are exchanged in place.  Products are caught where they are computed (``torch.nn.functional.linear``), since
experts are no modules in transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcore_rl.arrays import Float64Array
from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.rounded_weights import rounded_tensors
from mcore_rl.checkpoints.stacked import expert_parameters
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import Quantization
from mcore_rl.families.family import Family
from mcore_rl.families.stacks import StackedPart, stacked_parts
from mcore_rl.reports.question import ALL, Question, RoundedScores
from mcore_rl.weights.quantised import rounded_activations
from mcore_rl.weights.quantised_shards import LayerGroup, group_of, is_quantised
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.tensor_slice import TensorSlice

LAYERS = "layers."  # begins the name of a layer's tensor in transformers' decoder


class RoundedActivations(TorchFunctionMode):
    """While it is entered, rounds what is multiplied by one of ``matrices``."""

    def __init__(self, quantization: Quantization, matrices: Iterable[Tensor]) -> None:
        super().__init__()
        self.quantization = quantization
        self.addresses = {matrix.data_ptr() for matrix in matrices}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls ``func``; of a product with one of the matrices the input is rounded first."""
        if func is torch.nn.functional.linear and args[1].data_ptr() in self.addresses:
            args = (rounded_activations(args[0], self.quantization), *args[1:])
        return func(*args, **(kwargs or {}))


def rounded_scores(model: Any, question: Question, logprobs_of: Callable[[], Float64Array]) -> dict[str, RoundedScores]:
    """Log-probs of ``model`` after rounding, by group of layers, and of all together; ``model`` is left as it was.

    model: transformers' of ``question.hf``, in float32.  logprobs_of: scores the tokens with it.
    """
    checkpoint, plain = open_hf(question.hf)
    table = RolloutTable(plain.family, plain.model, question.rollout)
    present = {group_of(rule) for rule in table.rules if is_quantised(rule) and table.layers(rule)}
    groups: dict[str, Collection[LayerGroup]] = {ALL: present}
    if len(present) > 1:
        groups |= {group.value: (group,) for group in LayerGroup if group in present}
    place_of = _Places(model, plain.family, plain.model)
    scores = {}
    with checkpoint:
        for name, members in groups.items():
            exchanged: dict[str, Tensor] = {}
            for tensor, values in rounded_tensors(checkpoint, table, question.quantization, members):
                exchanged[tensor] = place_of(tensor)
                exchanged[tensor].copy_(values)
            weights = logprobs_of()
            with RoundedActivations(question.quantization, exchanged.values()):
                scores[name] = RoundedScores(weights=weights, activations=logprobs_of())
            for tensor, there in exchanged.items():
                values = torch.empty(there.shape)
                checkpoint.read_into(tensor, TensorSlice.whole(there.shape), values)
                there.copy_(values)
    return scores


class _Places:
    """Where transformers' decoder has a tensor of the files, as a view of its parameter."""

    def __init__(self, model: Any, family: Family, config: ModelConfig) -> None:
        self.parameters: dict[str, Tensor] = dict(model.get_decoder().named_parameters())
        self.parts: dict[str, StackedPart] = {}
        if config.moe is not None:
            self.parts = stacked_parts(expert_parameters(family), config)

    def __call__(self, name: str) -> Tensor:
        part = self.parts.get(name)
        if part is None:
            return self.parameters[_in_decoder(name)].data
        view: Tensor = part.within(self.parameters[_in_decoder(part.stored)].data[part.expert])
        return view


def _in_decoder(name: str) -> str:
    return name[name.index(LAYERS) :]
