"""What benchmarks/convert.py measures of mbridge and Megatron-Bridge.

    python -m benchmarks.converters.bridges BRIDGES CONVERTER MODEL CHECKPOINT SCRATCH RESULT [--repetitions 3]

BRIDGES: the folder that has them.  Both get bare parameters under the names of Transformer Engine's layers, which a CPU
cannot have; their own code loads and saves them.  Megatron-Bridge imports Transformer Engine and triton:
``AcceleratorStub`` answers every import of these with a class that does nothing.  What they saved is held against the
source by checksums; that they put each weight where we do is proven in tests/parity/test_bridges.py.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.convert import Row, cheapest, described, peak, read_all, removed, same
from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.plain_objects import data_classes
from mcore_rl.weights.table import Table

# What these converters' ranks tell each other, (module, name).
SENT = {("torch", "Size"), ("torch", "bfloat16"), ("torch", "device")}
Calls = tuple[torch.nn.Module, Callable[[], object], Callable[[Path], object]]  # module, load, save
# The class by whose name Megatron-Bridge tells how a parameter is split, by the last part of the module's name.
SPLITS = {
    "word_embeddings": "VocabParallelEmbedding",
    "linear_qkv": "TELayerNormColumnParallelLinear",
    "linear_proj": "TERowParallelLinear",
    "linear_fc1": "TELayerNormColumnParallelLinear",
    "linear_fc2": "TERowParallelLinear",
    "output_layer": "ColumnParallelLinear",
    "router": "TopKRouter",
}


def bare_module(table: Table) -> torch.nn.Module:
    """bfloat16 parameters under the names that Transformer Engine's layers give them; no module can compute."""
    spelt = (
        (".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
        (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"),
    )
    root = torch.nn.Module()
    for local in table.tensors(0):
        name = local.name
        for ours, theirs in spelt if table.model.moe is None else spelt[:1]:
            name = name.replace(ours, theirs)
        before, separator, after = name.partition(".local_experts.")
        if separator:
            expert, linear, kind = after.split(".")
            name = f"{before}.{linear}.{kind}{expert}"
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.ModuleList() if part == "layers" else torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.ones(table.shape(local), dtype=torch.bfloat16)))
    for index, layer in enumerate(root.get_submodule("decoder.layers").children()):
        layer.layer_number = index + 1  # type: ignore[assignment]
    return root


class _Nothing(type):
    """A class that has every attribute, each another such class, and can be made of anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)}
        return _Nothing(name, (), members)


class _StubModule(types.ModuleType):
    __getattr__ = _Nothing.__getattr__


class AcceleratorStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``transformer_engine``, ``triton`` and every module in them, which hold whatever is asked of them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        mine = name.split(".")[0] in ("transformer_engine", "triton")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__, module.__version__ = [], "1.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def of_mbridge(directory: Path) -> Calls:
    """mbridge's own loading and saving."""
    from mbridge import AutoBridge

    table = described(directory)
    bridge = AutoBridge.from_pretrained(str(directory))
    bridge.vocab_size = bridge.padded_vocab_size = table.model.vocab_size  # get_model's to set
    module = bare_module(table)
    return (
        module,
        lambda: bridge.load_weights([module], str(directory)),
        lambda out: bridge.save_weights([module], str(out)),
    )


def of_megatron_bridge(directory: Path) -> Calls:
    """Megatron-Bridge's own loading and saving."""
    import torch._dynamo  # what looks for these itself is imported before the stub is there
    import torch._inductor.config
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel  # noqa: F401

    sys.meta_path.insert(0, AcceleratorStub())
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_model import GPTModel

    table = described(directory)
    model, module = table.model, bare_module(table)
    config = types.SimpleNamespace(
        num_moe_experts=model.moe.num_experts if model.moe else None,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        gated_linear_unit=True,
        attention_output_gate=False,
        expert_model_parallel_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        share_embeddings_and_output_weights=model.tie_output,
        multi_latent_attention=False,
        moe_grouped_gemm=True,
    )
    for name, part in list(module.named_modules()):
        if name and not isinstance(part, torch.nn.ModuleList):
            part.__class__, part.config = type(_split_of(name), (torch.nn.Module,), {}), config  # type: ignore[assignment]
    module.__class__ = type("GPTModelBare", (GPTModel,), {})
    module.config, module.share_embeddings_and_output_weights = config, model.tie_output  # type: ignore[assignment]
    bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=torch.bfloat16)
    return module, lambda: bridge.load_hf_weights([module]), lambda out: bridge.save_hf_weights([module], str(out))


def _split_of(name: str) -> str:
    last = name.split(".")[-1]
    if "experts" in name.split(".") and last in ("linear_fc1", "linear_fc2"):
        return "TEColumnParallelGroupedLinear" if last == "linear_fc1" else "TERowParallelGroupedLinear"
    return SPLITS.get(last, "RMSNorm" if "norm" in last else "Module")


CONVERTERS = {"mbridge": of_mbridge, "megatron-bridge": of_megatron_bridge}


def measure(
    rank: Rank, bridges: Path, converter: str, name: str, directory: Path, scratch: Path, repetitions: int
) -> list[Row]:
    """The rows of ``converter`` on the checkpoint ``directory``."""
    sys.path.append(str(bridges))
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    module, load, save_into = CONVERTERS[converter](directory)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())

    def save() -> None:
        (scratch / "saved").mkdir()
        save_into(scratch / "saved")
        for path in (scratch / "saved").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    rows = []
    read_all(directory)
    with torch.no_grad(), data_classes(SENT):
        for what, run in (("load", load), ("save", save)):
            sizes: dict[str, int] = {}
            with peak(platform, sizes):
                run()
            if what == "save":
                same(directory, scratch / "saved")
            seconds, processor_s = cheapest(run, repetitions, before=partial(removed, scratch))
            removed(scratch)
            rows.append(
                Row(
                    model=name,
                    what=f"{what}, {converter}",
                    num_bytes=num_bytes,
                    seconds=seconds,
                    processor_s=processor_s,
                    **sizes,
                )
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; an error is a traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bridges", type=Path)
    parser.add_argument("converter", choices=list(CONVERTERS))
    parser.add_argument("model")
    for name in ("checkpoint", "scratch", "result"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args(arguments)
    wanted = (given.bridges, given.converter, given.model, given.checkpoint, given.scratch, given.repetitions)
    rows = run_ranks(measure, 1, wanted)[0]
    given.result.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
