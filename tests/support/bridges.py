"""What mbridge and Megatron-Bridge load and export beside what we do, in Megatron's own models on the CPU.

    python -m tests.support.bridges BRIDGES TRANSFORMER_ENGINE SCRATCH [--families llama ...] [--swap k_proj=v_proj ...]

BRIDGES, TRANSFORMER_ENGINE: folders that ``pip install --no-deps --target`` made (``tools/set_up.sh``).  SCRATCH: an
empty folder, for the checkpoints that are read.  --families: of ``bridge_cases``; all unless given.  --swap: our table
has each of two sources in the other's place, to show what a mistake looks like.

The models are GPTModels of Transformer Engine's layers, the only ones whose names both bridges know: its Python is
real, its compiled half a stub.  The bridges read the files, split, scatter over gloo, gather and name with their own
code.  Prints as JSON {known: bridge -> families, outcomes: [``Outcome``]}.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor
from torch.distributed import distributed_c10d

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.rules import HfTensor
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.phase import phase
from tests.support.transformer_engine_stub import import_transformer_engine

UNSET = 7.0  # in every parameter before it is loaded
ROUTER_BIAS = "e_score_correction_bias"

Chunks = list[torch.nn.Module]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """As the module's docstring says."""

    bridges: str
    transformer_engine: str
    scratch: Path
    families: tuple[str, ...]
    swap: tuple[str, ...]

    def cases(self) -> Iterator[tuple[str, str]]:
        """(bridge, family)."""
        from tests.support.bridge_cases import MODELS

        for bridge, of_bridge in MODELS.items():
            yield from ((bridge, name) for name in of_bridge if not self.families or name in self.families)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Names that differ, of one rank.

    loaded: Megatron's tensors that are not the same bits.  exported: Hugging Face tensors that are not the source's, or
    are on one side alone, where the bridge exports what we loaded.  ours: where we export what the bridge loaded.
    """

    bridge: str
    family: str
    layout: str
    rank: int
    tensors: int
    loaded: list[str]
    exported: list[str]
    ours: list[str]


def write_checkpoints(options: Options) -> None:
    """One of each bridge and family, in bfloat16; a router's bias in float32, as DeepSeek publishes it."""
    from tests.support import hf_reference
    from tests.support.bridge_cases import MODELS

    for bridge, family in options.cases():
        directory = options.scratch / bridge / family
        reference = hf_reference.build(MODELS[bridge][family], torch.bfloat16)
        reference.save_pretrained(directory, max_shard_size="100KB")  # in several files: mbridge asks their index
        for path in directory.glob("*.safetensors"):
            held = load_file(path)
            biases = {name: torch.randn(bias.shape) for name, bias in held.items() if name.endswith(ROUTER_BIAS)}
            save_file(held | biases, path, metadata={"format": "pt"})


# ---- what a rank does ----


class MBridge:
    """mbridge, which was written for transformers 4, for megatron-core before 0.16 and for GPUs."""

    def __init__(self, directory: Path, model: ModelConfig, tp: int) -> None:
        from mbridge import AutoBridge
        from mbridge.models import DeepseekV3Bridge, Qwen2Bridge
        from mbridge.models.ext.deepseek_v3 import dequant_fp8_safetensor_io
        from megatron.core.transformer import MLATransformerConfig
        from transformers import AutoConfig

        # The bridge of a tied Qwen2 writes the tie into its class, where every Qwen after it finds it.
        Qwen2Bridge._DIRECT_MAPPING["output_layer.weight"] = "lm_head.weight"
        # megatron-core 0.16 has that field no more, transformers 5 rope_theta in a field of that name.
        DeepseekV3Bridge.TransformerConfigClass = staticmethod(
            lambda max_position_embeddings, **settings: MLATransformerConfig(**settings)
        )
        dequant_fp8_safetensor_io.safe_open = lambda path, framework, device: safe_open(path, framework)
        config = AutoConfig.from_pretrained(directory)
        config.rope_theta = config.rope_parameters["rope_theta"]
        self._bridge = AutoBridge.from_config(config, make_vocab_size_divisible_by=tp)
        self._bridge.vocab_size = model.vocab_size  # these two are get_model's to set
        self._bridge.padded_vocab_size = -(-model.vocab_size // tp) * tp
        self._directory = str(directory)

    def load(self, chunks: Chunks) -> None:
        self._bridge.load_weights(chunks, self._directory)

    def export(self, chunks: Chunks) -> Weights:
        return {name: tensor.clone() for name, tensor in self._bridge.export_weights(chunks)}


class MegatronBridge:
    """Megatron-Bridge."""

    def __init__(self, directory: Path, model: ModelConfig, tp: int) -> None:
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping

        AutoMapping.register_module_type("Router", "replicated")  # ours
        AutoMapping.register_module_type("NormedRowParallelLinear", "row")
        # What it scatters are views of one tensor.  Their copies in a GPU are contiguous; a CPU needs none, and gloo
        # reads no strides.
        scatter = inspect.unwrap(MegatronParamMapping.scatter_to_tp_ranks)

        @wraps(scatter)
        def scattered(mapping: Any, splits: Sequence[Tensor] | None, *shape_and_place: Any) -> Tensor:
            return scatter(mapping, splits and [split.contiguous() for split in splits], *shape_and_place)

        MegatronParamMapping.scatter_to_tp_ranks = scattered
        self._bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=torch.bfloat16)

    def load(self, chunks: Chunks) -> None:
        self._bridge.load_hf_weights(chunks)

    def export(self, chunks: Chunks) -> Weights:
        named = self._bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
        return {name: tensor.clone() for name, tensor in named}


BRIDGES = {"mbridge": MBridge, "megatron-bridge": MegatronBridge}


def measure(rank: Rank, options: Options) -> dict[str, Any]:
    """What is printed, of one rank."""
    warnings.simplefilter("ignore")
    import_transformer_engine(options.transformer_engine)  # before Megatron is imported, which looks for it then
    sys.path.append(options.bridges)
    with pretended_accelerator():
        import mcore_rl.training.model  # noqa: F401  # and Megatron, which asks Transformer Engine what it has

    from mcore_rl.config.engine import Device
    from mcore_rl.config.parallel import parse_layout
    from mcore_rl.parallel.device import detect, device_of
    from mcore_rl.parallel.groups import destroy_groups, init_groups
    from mcore_rl.parallel.layout import Layout
    from tests.support.bridge_cases import MODELS, WORLD_SIZE, layouts

    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    outcomes = []
    for bridge, family in options.cases():
        for layout in layouts(MODELS[bridge][family]):
            parallel = parse_layout(layout)
            groups = init_groups(Layout.of(parallel, WORLD_SIZE), platform, device_of(platform, 0), seed=1)
            # Megatron-Bridge sends its configurations from stage to stage.
            unpickler = mock.patch.object(distributed_c10d, "_unpickler", pickle.Unpickler)
            with torch.no_grad(), unpickler, phase(f"{bridge}, {family}, {layout}"):
                outcome = compared(bridge, options.scratch / bridge / family, options.swap, parallel, groups)
            outcomes.append(Outcome(bridge=bridge, family=family, layout=layout, rank=rank.rank, **outcome))
            destroy_groups()
    return {"known": known(), "outcomes": [asdict(outcome) for outcome in outcomes]}


def known() -> dict[str, list[str]]:
    """The families that each bridge says it knows."""
    import mbridge
    from megatron.bridge import AutoBridge

    from mcore_rl.families.registry import FAMILIES

    types, classes = mbridge.AutoBridge.list_supported_models(), AutoBridge.list_supported_models()
    return {
        "mbridge": [family.name for family in FAMILIES.values() if family.model_type in types],
        "megatron-bridge": [name for name, family in FAMILIES.items() if set(family.architectures) & set(classes)],
    }


def compared(bridge: str, directory: Path, swap: Sequence[str], parallel: Any, groups: Any) -> dict[str, Any]:
    """What this rank loads and exports, by us and by ``bridge``."""
    from mcore_rl.checkpoints.export import export_stream
    from mcore_rl.checkpoints.hf_directory import HfCheckpoint
    from mcore_rl.checkpoints.load import load_hf
    from mcore_rl.families.registry import model_of
    from mcore_rl.weights.binding import bind
    from mcore_rl.weights.table import Table

    family, model = model_of(json.loads((directory / "config.json").read_text()))
    table = Table(swapped(family, swap), model, parallel, groups.layout.world_size)
    ours, theirs = (built(model, parallel, groups) for _ in range(2))
    with HfCheckpoint.open(directory) as checkpoint:
        load_hf(ours, checkpoint, table, groups.rank)
        source = {name: checkpoint.read(name) for name in checkpoint.tensors}
    other = BRIDGES[bridge](directory, model, parallel.tp)
    other.load(theirs)
    pairs = list(zip(*(bind(chunks, table, groups.rank) for chunks in (ours, theirs)), strict=True))
    exported = dict(named for bucket in export_stream(theirs, table, groups.rank) for named in bucket)
    return {
        "tensors": len(pairs),
        "loaded": [one.local.name for one, another in pairs if not same(one.tensor, another.tensor)],
        "exported": differences(source, other.export(ours)),
        "ours": differences(source, exported) if groups.rank == 0 else [],  # which gets them all
    }


def swapped(family: Family, swap: Sequence[str]) -> Family:
    """``family`` with the sources ONE and OTHER of each ONE=OTHER in each other's place."""
    exchange = {}
    for one, _, other in (each.partition("=") for each in swap):
        exchange |= {one: other, other: one}

    def renamed(source: HfTensor) -> HfTensor:
        parts = source.name.split(".")
        return replace(source, name=".".join(exchange.get(part, part) for part in parts))

    rules = tuple(replace(rule, hf=tuple(map(renamed, rule.hf))) for rule in family.weights)
    return replace(family, weights=rules)


def built(model: ModelConfig, parallel: Any, groups: Any) -> Chunks:
    """This rank's model chunks, of Transformer Engine's layers where they have what ``model`` needs, and unset."""
    from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision
    from mcore_rl.config.role import Head
    from mcore_rl.training.layers import transformer_engine_lacks
    from mcore_rl.training.model import build_chunks, transformer_config

    lacks = transformer_engine_lacks(model, parallel)
    spec = LayerSpec.local if lacks else LayerSpec.transformer_engine
    config = transformer_config(model, parallel, EngineConfig(precision=Precision.bfloat16), spec)
    with pretended_accelerator():
        chunks: Chunks = build_chunks(model, config, parallel, spec, groups, head=Head.lm)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(UNSET)
    return chunks


def pretended_accelerator() -> Any:
    """Transformer Engine asks for one when it is imported, and when its modules are made."""
    return mock.patch.object(torch.cuda, "is_available", return_value=True)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, with shape and dtype."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.detach().contiguous().view(torch.uint8) for tensor in (one, other)))


def differences(source: Weights, found: Weights) -> list[str]:
    """Names of tensors that are not the same, or on one side alone."""
    names = sorted(source.keys() | found.keys())
    return [name for name in names if not (name in source and name in found and same(source[name], found[name]))]


def main() -> None:
    """Print the report of every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bridges", "transformer_engine"):
        parser.add_argument(name)
    parser.add_argument("scratch", type=Path)
    for name in ("--families", "--swap"):
        parser.add_argument(name, nargs="+", default=())
    options = Options(**vars(parser.parse_args()))
    from tests.support.bridge_cases import WORLD_SIZE

    write_checkpoints(options)
    ranks = run_ranks(measure, WORLD_SIZE, (options,))
    outcomes = [outcome for report in ranks for outcome in report["outcomes"]]
    print(json.dumps({"known": ranks[0]["known"], "outcomes": outcomes}))


if __name__ == "__main__":
    main()
