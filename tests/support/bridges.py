"""What mbridge and Megatron-Bridge load and export beside what we do, in Megatron's own models on the CPU.

The models are GPTModels of Transformer Engine's layers, the only ones whose names both bridges know: its Python is
real, its compiled half a stub.  The bridges read the files, split, scatter over gloo, gather and name with their own
code.  Ranks are forked from a server that has imported all of this (tests/support/bridge_imports.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.checkpoints.export import export_stream
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.rules import HfTensor
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import phase
from mcore_rl.training.layers import transformer_engine_lacks
from mcore_rl.training.model import build_chunks, transformer_config
from mcore_rl.weights.binding import bind
from mcore_rl.weights.table import Table
from tests.support import checkpoints, hf_reference
from tests.support.forked import RankProcess, Server, run_ranks
from tests.support.transformer_engine_stub import pretended_accelerator

UNSET = 7.0  # in every parameter before it is loaded
ROUTER_BIAS = "e_score_correction_bias"

Chunks = list[torch.nn.Module]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One bridge, one checkpoint, one layout.  model: its name in ``bridge_cases``."""

    bridge: str
    model: str
    layout: str
    checkpoint: Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Names that differ, of one rank.

    loaded: Megatron's tensors that are not the same bits.  exported: Hugging Face tensors that are not the source's, or
    are on one side alone, where the bridge exports what we loaded.  ours: where we export what the bridge loaded.
    """

    case: Case
    rank: int
    tensors: int
    loaded: list[str]
    exported: list[str]
    ours: list[str]

    @property
    def wrong(self) -> set[str]:
        """All of them."""
        return {*self.loaded, *self.exported, *self.ours}


def write_checkpoint(model: ModelConfig, directory: Path) -> Path:
    """In bfloat16; a router's bias in float32, as DeepSeek publishes it."""
    reference = hf_reference.build(model, torch.bfloat16)
    reference.save_pretrained(directory, max_shard_size="100KB")  # in several files: mbridge asks their index
    for path in directory.glob("*.safetensors"):
        held = load_file(path)
        biases = {name: torch.randn(bias.shape) for name, bias in held.items() if name.endswith(ROUTER_BIAS)}
        save_file(held | biases, path, metadata={"format": "pt"})
    return directory


# ---- processes ----

SERVER = Server(["tests.support.bridge_imports"], {})


class _Process(RankProcess):
    def server(self) -> Server:
        SERVER.ensure_running()
        return SERVER


class _Context(ForkServerContext):
    Process = _Process


def asked(
    cases: Sequence[Case], world_size: int, *, swap: Mapping[str, str] | None = None, without: str = ""
) -> list[Outcome]:
    """Of every rank and case.

    swap: two sources each that are in each other's place in our table, to show what a mistake looks like.
    without: the adaptation of ``bridge_adapters`` that is left out.
    """
    ranks = run_ranks(measure, world_size, (tuple(cases), swap or {}, without), context=_Context())
    return [outcome for outcomes in ranks for outcome in outcomes]


def known() -> dict[str, list[str]]:
    """Bridge -> the families that it says it knows."""
    families: dict[str, list[str]] = run_ranks(_known, 1, context=_Context())[0]
    return families


def _known(_: Rank) -> dict[str, list[str]]:
    import mbridge
    from megatron.bridge import AutoBridge

    types, classes = mbridge.AutoBridge.list_supported_models(), AutoBridge.list_supported_models()
    return {
        "mbridge": [family.name for family in FAMILIES.values() if family.model_type in types],
        "megatron-bridge": [name for name, family in FAMILIES.items() if set(family.architectures) & set(classes)],
    }


def adaptations() -> set[str]:
    """The names of all adaptations."""
    names: set[str] = run_ranks(_adaptations, 1, context=_Context())[0]
    return names


def _adaptations(_: Rank) -> set[str]:
    from tests.support.bridge_adapters import ADAPTATIONS

    return set(ADAPTATIONS)


# ---- what a rank does ----


def measure(rank: Rank, cases: Sequence[Case], swap: Mapping[str, str], without: str) -> list[Outcome]:
    """Of one rank."""
    from tests.support.bridge_adapters import adapted

    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    outcomes = []
    with torch.no_grad(), adapted(without):
        for case in cases:
            parallel = parse_layout(case.layout)
            layout = Layout.of(parallel, rank.world_size)
            groups = init_groups(layout, platform, device_of(platform, 0), seed=1)
            with phase(f"{case.bridge}, {case.model}, {case.layout}"):
                comparison = compared(case, swap, parallel, groups)
            outcomes.append(Outcome(case=case, rank=rank.rank, **comparison))
            destroy_groups()
    return outcomes


def compared(case: Case, swap: Mapping[str, str], parallel: Any, groups: Any) -> dict[str, Any]:
    """What this rank loads and exports, by us and by the bridge of ``case``."""
    from tests.support.bridge_adapters import BRIDGES

    family, model = model_of(json.loads((case.checkpoint / "config.json").read_text()))
    by_table = partial(checkpoints.by_table, family.name)
    table = Table(swapped(family, swap), model, parallel, groups.layout.world_size)
    ours, theirs = (built(model, parallel, groups) for _ in range(2))
    with HfCheckpoint.open(case.checkpoint) as checkpoint:
        load_hf(ours, checkpoint, table, groups.rank)
        source = by_table({name: checkpoint.read(name) for name in checkpoint.tensors})
    other = BRIDGES[case.bridge](case.checkpoint, model, parallel.tp)
    other.load(theirs)
    pairs = list(zip(*(bind(chunks, table, groups.rank) for chunks in (ours, theirs)), strict=True))
    exported = dict(named for bucket in export_stream(theirs, table, groups.rank) for named in bucket)
    return {
        "tensors": len(pairs),
        "loaded": [one.local.name for one, another in pairs if not same(one.tensor, another.tensor)],
        "exported": differences(source, by_table(other.export(ours))),
        "ours": differences(source, exported) if groups.rank == 0 else [],  # which gets them all
    }


def swapped(family: Family, swap: Mapping[str, str]) -> Family:
    """``family`` with both sources of each pair of ``swap`` in each other's place."""
    exchange = {**swap, **{other: one for one, other in swap.items()}}

    def renamed(source: HfTensor) -> HfTensor:
        parts = source.name.split(".")
        return replace(source, name=".".join(exchange.get(part, part) for part in parts))

    rules = tuple(replace(rule, hf=tuple(map(renamed, rule.hf))) for rule in family.weights)
    return replace(family, weights=rules)


def built(model: ModelConfig, parallel: Any, groups: Any) -> Chunks:
    """This rank's model chunks, of Transformer Engine's layers where they have what ``model`` needs, and unset."""
    lacks = transformer_engine_lacks(model, parallel)
    spec = LayerSpec.local if lacks else LayerSpec.transformer_engine
    config = transformer_config(model, parallel, EngineConfig(precision=Precision.bfloat16), spec)
    with pretended_accelerator():
        chunks: Chunks = build_chunks(model, config, parallel, spec, groups, head=Head.lm)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(UNSET)
    return chunks


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, with shape and dtype."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.detach().contiguous().view(torch.uint8) for tensor in (one, other)))


def differences(source: Weights, held: Weights) -> list[str]:
    """Names of tensors that are not the same, or on one side alone."""
    names = sorted(source.keys() | held.keys())
    return [name for name in names if not (name in source and name in held and same(source[name], held[name]))]
