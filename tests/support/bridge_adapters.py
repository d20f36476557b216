"""mbridge and Megatron-Bridge behind one face, and what each is given so that it runs on a CPU, with these versions.

Imported behind Transformer Engine (tests/support/bridge_imports.py).  Each of ADAPTATIONS is left out once by
``bridge_cases.LIMITS``, which shows with which versions it is needed, and what for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mbridge import AutoBridge as MBridgeOf
from mbridge.models import DeepseekV3Bridge
from mbridge.models.ext.deepseek_v3 import dequant_fp8_safetensor_io
from megatron.bridge import AutoBridge as MegatronBridgeOf
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    MegatronParamMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import safe_open
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import AutoConfig

from mcore_rl.config.model import ModelConfig
from mcore_rl.training.model import padded_vocab_size
from tests.support.bridge_cases import LIMITS

Chunks = list[torch.nn.Module]
Weights = dict[str, Tensor]


class MBridge:
    """mbridge, which was written for transformers 4, for megatron-core before 0.16 and for GPUs."""

    def __init__(self, directory: Path, model: ModelConfig, tp: int) -> None:
        config = AutoConfig.from_pretrained(directory)
        config.rope_theta = config.rope_parameters["rope_theta"]  # where transformers 5 keeps it
        self._bridge = MBridgeOf.from_config(config, make_vocab_size_divisible_by=tp)
        self._bridge.vocab_size = model.vocab_size  # these two are get_model's to set
        self._bridge.padded_vocab_size = padded_vocab_size(model.vocab_size, tp)
        self._directory = str(directory)

    def load(self, chunks: Chunks) -> None:
        self._bridge.load_weights(chunks, self._directory)

    def export(self, chunks: Chunks) -> Weights:
        return {name: tensor.clone() for name, tensor in self._bridge.export_weights(chunks)}


class MegatronBridge:
    """Megatron-Bridge, which reads sizes from Megatron's configuration and knows grouped experts."""

    def __init__(self, directory: Path, model: ModelConfig, tp: int) -> None:
        self._bridge = MegatronBridgeOf.from_hf_pretrained(str(directory), torch_dtype=torch.bfloat16)
        self._model = model

    def load(self, chunks: Chunks) -> None:
        self._tell_sizes(chunks)
        with grouped_experts(chunks):
            self._bridge.load_hf_weights(chunks)

    def export(self, chunks: Chunks) -> Weights:
        self._tell_sizes(chunks)
        with grouped_experts(chunks):
            named = self._bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
            return {name: tensor.clone() for name, tensor in named}

    def _tell_sizes(self, chunks: Chunks) -> None:
        """Write into Megatron's configuration what our layers do not take from there.

        That is whether the output is tied, a field of the bridge's own configuration (0.3.1 asks the model where it
        has none), and the sizes of linear attention.
        """
        linear = self._model.linear_attention
        for chunk in chunks:
            chunk.config.share_embeddings_and_output_weights = self._model.tie_output
            for name, value in vars(linear).items() if linear else ():
                setattr(chunk.config, f"linear_{name}", value)


@contextmanager
def grouped_experts(chunks: Chunks) -> Iterator[None]:
    """Experts that are modules of their own, under the names that Transformer Engine's have: the same parameters."""
    layers = [each for chunk in chunks for each in chunk.modules() if isinstance(each, MoELayer)]
    apart = [layer.experts for layer in layers]
    for layer, experts in zip(layers, apart, strict=True):
        if isinstance(experts, SequentialMLP):
            layer.experts = torch.nn.Module()
            for name, kind in (
                ("linear_fc1", "TEColumnParallelGroupedLinear"),
                ("linear_fc2", "TERowParallelGroupedLinear"),
            ):
                linear = type(kind, (torch.nn.Module,), {})()
                linear.config = layer.config
                for place, expert in enumerate(experts.local_experts):
                    for end, parameter in getattr(expert, name).named_parameters():
                        linear.register_parameter(f"{end}{place}", parameter)
                layer.experts.add_module(name, linear)
    try:
        yield
    finally:
        for layer, experts in zip(layers, apart, strict=True):
            layer.experts = experts


BRIDGES = {"mbridge": MBridge, "megatron-bridge": MegatronBridge}


def _latent_config(max_position_embeddings: int, **settings: Any) -> MLATransformerConfig:
    return MLATransformerConfig(**settings)


def _opened_on_cpu(path: str, framework: str, device: str) -> Any:
    return safe_open(path, framework)


_merge = DeepseekV3Bridge._weight_merge_across_tp


def _merged(bridge: DeepseekV3Bridge, name: str, parts: list[Tensor], param: Tensor) -> Tensor:
    whole: Tensor = parts[0] if name.endswith("_down_proj.weight") else _merge(bridge, name, parts, param)
    return whole


_scatter = MegatronParamMapping.scatter_to_tp_ranks


def _scattered(mapping: Any, splits: Sequence[Tensor] | None, *shape_and_place: Any) -> Tensor:
    parts: Tensor = _scatter(mapping, splits and [split.contiguous() for split in splits], *shape_and_place)
    return parts


MODULE_TYPES = AutoMapping._MODULE_TYPE_REGISTRY
# Our classes, by how Megatron's in their place are split.
OURS = {
    "column": {"PackedAttention", "PackedGatedDeltaNet"},
    "row": {"NormedRowParallelLinear", "ExpertOutputLinear"},
    "replicated": {"Router"},
}
# Name -> what is put in the place of something of theirs.  A patch undoes itself.
ADAPTATIONS: dict[str, Callable[[], Any]] = {
    # megatron-core 0.16 has the field max_position_embeddings no more.
    "fields of megatron-core 0.16": lambda: mock.patch.object(
        DeepseekV3Bridge, "TransformerConfigClass", staticmethod(_latent_config)
    ),
    "files read on a CPU": lambda: mock.patch.object(dequant_fp8_safetensor_io, "safe_open", _opened_on_cpu),
    # Transformer Engine marks the weights of all its linears as split, also those that every tensor rank has whole.
    "down projections that are whole": lambda: mock.patch.object(DeepseekV3Bridge, "_weight_merge_across_tp", _merged),
    "our classes": lambda: mock.patch.dict(MODULE_TYPES, {split: MODULE_TYPES[split] | OURS[split] for split in OURS}),
    # Megatron's norm behind the delta rule is zero-centred, ours is not.
    "a norm that is not zero-centred": lambda: mock.patch.multiple(
        RMSNorm2ZeroCenteredRMSNormMapping,
        hf_to_megatron=AutoMapping.hf_to_megatron,
        megatron_to_hf=AutoMapping.megatron_to_hf,
    ),
    # What it scatters are views of one tensor.  Their copies in a GPU are contiguous; a CPU makes none, and gloo reads
    # no strides.
    "contiguous parts": lambda: mock.patch.object(MegatronParamMapping, "scatter_to_tp_ranks", _scattered),
    # It sends its configurations from stage to stage; ours are to send plain data alone.
    "objects sent": lambda: mock.patch.object(distributed_c10d, "_unpickler", pickle.Unpickler),
}


NEEDED = {limit.without for limit in LIMITS.values() if limit.now}  # with the versions that are installed


@contextmanager
def adapted(without: str = "") -> Iterator[None]:
    """All ADAPTATIONS that are needed but ``without``."""
    assert not without or without in ADAPTATIONS, without
    with ExitStack() as stack:
        for name, patch in ADAPTATIONS.items():
            if name in NEEDED and name != without:
                stack.enter_context(patch())
        yield
