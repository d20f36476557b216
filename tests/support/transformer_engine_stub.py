"""Transformer Engine's own Python without its compiled half: do our layers construct, and have the names that we bind?

    python -m tests.support.transformer_engine_stub FOLDER

FOLDER: what ``pip install --no-deps --target`` made of the wheel, which is Python alone.  The extension is a stub: no
module computes, but all are made as on a GPU.  Every tiny model of the families, on the meta device, under two layouts,
is built by Megatron's layers over Transformer Engine's and bound to our tables.  Prints model -> layout -> outcome.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch
from zlib import crc32

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.config.megatron_versions import megatron_version

VERSIONS = {"0.16.1": "2.11.0", "0.19.2": "2.20.2"}  # megatron-core's -> its own
FOLDER = Path(sys.prefix) / f"transformer_engine-{VERSIONS[megatron_version()]}"  # by tools/set_up.sh
ABSENT = ("onnx", "onnx_ir", "onnxscript", "triton")  # what its Python imports, and what only its kernels need
ENUMS = (
    "CommOverlapAlgo", "CommOverlapType", "DType", "Float8BlockScaleTensorFormat", "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout", "NVTE_Softmax_Type",
    "NVTEScalingMode",
)  # fmt: skip
CLASSES = ("CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "FP8TensorMeta")
LAYOUTS = {"tp=1": 1, "tp=2": 2}
EXPERT_LAYOUTS = {"tp=1": 1, "tp=2,ep=2": 2}


class Stub(types.ModuleType):
    """A module, and a package, that has everything."""

    __path__ = ()  # a package
    __version__ = "3.7.1"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


class Member(str):
    """A member of a C++ enumeration: its own text, and a number as others have."""

    def __int__(self) -> int:
        return crc32(self.encode()) >> 1


class Names(type):
    """Of an enumeration: every name is there, and its members are those that were asked for."""

    def __init__(cls, *arguments: Any) -> None:
        super().__init__(*arguments)
        cls.__members__: dict[str, Member] = {}

    def __getattr__(cls, name: str) -> Member:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.__members__.setdefault(name, Member(f"{cls.__name__}.{name}"))


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a ``Stub`` for every package of ``ABSENT``."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Stub:
        module = Stub(spec.name)
        if spec.name.startswith("triton"):
            module.jit = lambda function=None, **_: function if callable(function) else lambda inner: inner
            module.autotune = module.heuristics = lambda *_, **__: lambda function: function
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_transformer_engine(folder: str) -> None:
    """Make ``import transformer_engine.pytorch`` succeed, on what it asks a Hopper and cuDNN 9.20."""
    import torch._dynamo.testing
    import torch._inductor.compile_fx

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: the shared libraries are not loaded
    sys.path.insert(0, folder)
    sys.meta_path.append(Absent())
    extension = Stub("transformer_engine_torch")
    for name in ENUMS:
        setattr(extension, name, Names(name, (), {}))
    for name in CLASSES:
        setattr(extension, name, type(name, (), {}))
    for kind, tensors in (("Fwd", ("INPUT", "WEIGHT", "OUTPUT")), ("Bwd", ("GRAD_OUTPUT", "GRAD_INPUT"))):
        order = [f"GEMM{i}_{tensor}" if kind == "Fwd" else f"{tensor}{i}" for i in (1, 2, 3) for tensor in tensors]
        setattr(extension, f"FP8{kind}Tensors", type(kind, (), {name: place for place, name in enumerate(order)}))
    extension.get_cudnn_version = lambda: 92000
    sys.modules["transformer_engine_torch"] = extension
    hopper = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="stub")
    torch.cuda.get_device_properties = lambda *_: hopper
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: "cpu"
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda _: None
    import transformer_engine.pytorch


def pretended_accelerator() -> Any:
    """Within: torch says that there is one.  Transformer Engine asks when it is imported, and when it makes modules."""
    return patch.object(torch.cuda, "is_available", return_value=True)


def outcome(config: dict[str, Any], layout: str, world_size: int) -> dict[str, Any]:
    """What became of one model under one layout."""
    from mcore_rl.config.engine import Device, EngineConfig, LayerSpec
    from mcore_rl.config.parallel import parse_layout
    from mcore_rl.config.role import Head
    from mcore_rl.families.registry import model_of
    from mcore_rl.parallel.device import detect
    from mcore_rl.parallel.groups import destroy_groups, init_groups
    from mcore_rl.parallel.layout import Layout
    from mcore_rl.proofs.effective_config import config_differences, unread
    from mcore_rl.training.layers import transformer_engine_lacks
    from mcore_rl.training.model import build_chunks, transformer_config
    from mcore_rl.weights.binding import bind
    from mcore_rl.weights.table import Table

    (family, model), parallel, spec = model_of(config), parse_layout(layout), LayerSpec.transformer_engine
    if lacks := transformer_engine_lacks(model, parallel):
        return {"lacks": lacks}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        groups = init_groups(Layout.of(parallel, world_size), detect(Device.cpu), torch.device("meta"), seed=0)
        settings = transformer_config(model, parallel, EngineConfig(microbatch_tokens=1024), spec)
        settings.perform_initialization, settings.init_model_with_meta_device = False, True
        settings.use_cpu_initialization = False
        with torch.device("meta"):
            (chunk,) = build_chunks(model, settings, parallel, spec, groups, head=Head.lm)
        bound = bind([chunk], Table(family, model, parallel, world_size), 0)
        mlp = chunk.decoder.layers[-1].mlp
        configs = {"transformer engine": configured(chunk, model)}
        settings = transformer_config(model, parallel, EngineConfig(), LayerSpec.local)
        settings.use_cpu_initialization, settings.perform_initialization = True, False
        with torch.device("meta"):
            (local,) = build_chunks(model, settings, parallel, LayerSpec.local, groups, head=Head.lm)
        configs["local"] = configured(local, model)
        kinds = {type(module).__module__.partition(".")[0] for module in chunk.modules()}
        return {
            "bound": len(bound),
            "parameters": len(list(chunk.parameters())),
            "mlp": type(getattr(mlp, "experts", mlp)).__name__,
            "router": type(getattr(mlp, "router", None)).__module__,
            "transformer_engine": "transformer_engine" in kinds,
            "configured otherwise": config_differences(configs),
            "unread": unread(configs),
        }
    finally:
        destroy_groups()
        dist.destroy_process_group()


def configured(chunk: Any, model: Any) -> dict[str, dict[str, Any]]:
    """What the modules of ``chunk`` tell; they are given frequencies, because the meta device has none."""
    from mcore_rl.training.effective_config import effective_config
    from mcore_rl.training.latent_attention import LatentAttention
    from mcore_rl.training.rope import frequency_sets, inverse_frequencies

    for module in chunk.modules():
        if isinstance(module, LatentAttention):
            width = module.mla.qk_rope_head_dim
            module.inverse_frequencies = inverse_frequencies(model.rope, model.rotary_base, width)
    if model.mla is None:
        (chunk.rotary_pos_emb.inv_freq,) = frequency_sets(model)
    return effective_config([chunk], model)


def main(folder: str) -> None:
    """Print the outcome of every tiny model."""
    from pathlib import Path

    configs = json.loads((Path(__file__).parents[2] / "model_configs" / "hf_configs.json").read_text())
    import_transformer_engine(folder)
    results = {}
    for name, config in configs.items():
        if name.startswith("tiny-"):
            layouts = EXPERT_LAYOUTS if any("expert" in key for key in config) else LAYOUTS
            with pretended_accelerator():
                results[name] = {layout: outcome(config, layout, world_size) for layout, world_size in layouts.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
