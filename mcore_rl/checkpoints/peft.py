"""Adapters in PEFT's directories: ``adapter_config.json`` and ``adapter_model.safetensors``, out and in.

Names and shapes are PEFT's for a model whose experts are modules of their own; PEFT converts them by itself where
transformers keeps the experts of a layer in one tensor (peft/utils/transformers_weight_conversion.py, 0.21).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.checkpoints.export import export_stream
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import read_header
from mcore_rl.config.lora import ALL_LINEAR, LoraConfig
from mcore_rl.config.role import Head
from mcore_rl.errors import CheckpointError
from mcore_rl.weights.adapter_table import AdapterTable, all_linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS = "adapter"  # the folder of an export with merged weights that has them by themselves
# Fields with which PEFT computes something else than ``W x + scale * B (A x)`` on whole linear layers, and the values
# with which it does not.  ``lora_dropout`` changes training alone.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "megatron_config": (None,),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# First values of A and B for which PEFT changes the base, too: what it then saves belongs to that other base.
OF_ANOTHER_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


def adapter_config(table: AdapterTable, base: str) -> dict[str, Any]:
    """What PEFT reads of the adapters of ``table``.  base: the model's directory or name."""
    lora, targets = table.lora, table.lora.target_modules
    if targets == [ALL_LINEAR]:  # PEFT would take the heads of other models, too
        targets = sorted({name.rpartition(".")[2] for name in all_linear(table.base)})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if table.head is Head.lm else "TOKEN_CLS",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": targets,
        "exclude_modules": list(lora.exclude_modules) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """``adapter_config.json``.  Raises CheckpointError: it is missing, unreadable, or of adapters of another kind."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{CONFIG} cannot be read: {error}. Give a directory that PEFT saved"
        raise CheckpointError(str(directory), [problem]) from error
    if not isinstance(config, dict):
        raise CheckpointError(str(directory), [f"{CONFIG} is no JSON object. Give a directory that PEFT saved"])
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"{CONFIG}: peft_type={config.get('peft_type')}: only LORA is read")
    for name in ("r", "lora_alpha"):
        value, types = config.get(name), (int,) if name == "r" else (int, float)
        if value is None or type(value) not in types or value <= 0:
            problems.append(f"{CONFIG}: {name}={value}: is no number over 0. Give a directory that PEFT saved")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(OF_ANOTHER_BASE):
        remedy = "Save them with path_initial_model_for_weight_conversion, as adapters of the model's own"
        problems.append(f"{CONFIG}: init_lora_weights={init}: the adapters are of weights that PEFT changed. {remedy}")
    for name, plain in PLAIN.items():
        if config.get(name) not in plain:
            problems.append(f"{CONFIG}: {name}={config[name]}: computes what is not computed here. Train without it")
    if problems:
        raise CheckpointError(str(directory), problems)
    return dict(config)


def lora_of(config: Mapping[str, Any]) -> LoraConfig:
    """The adapters that ``config`` (``read_adapter_config``) describes."""
    targets = config.get("target_modules") or []
    return LoraConfig(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=[targets] if isinstance(targets, str) else list(targets),
        exclude_modules=list(config.get("exclude_modules") or []),
    )


@torch.no_grad()
def save_peft(chunks: Sequence[torch.nn.Module], table: AdapterTable, rank: int, directory: Path, base: str) -> None:
    """Write the adapters of ``chunks`` as the new ``directory``; rank 0 writes, and holds all adapters.

    Collective over the world.  base: the model that they are for, as PEFT names it.
    """
    tensors: dict[str, Tensor] = {}
    for bucket in export_stream(chunks, table, rank):
        tensors |= {name: tensor.cpu().contiguous() for name, tensor in bucket}
    if rank == 0:
        write_peft(tensors, table, directory, base)


def write_peft(tensors: Mapping[str, Tensor], table: AdapterTable, directory: Path, base: str) -> None:
    """Write whole ``tensors``, by their names in PEFT's files, as the new ``directory``, which gets its name last.

    CheckpointError: what was written reads back differently.
    """
    fresh = directory.with_name(directory.name + ".incomplete")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, fresh / WEIGHTS, {"format": "pt"})
    write_adapter_config(table, fresh, base)
    with open_adapters(fresh) as written:
        wrong = [name for name, tensor in tensors.items() if not _same_bits(written.read(name), tensor)]
    if wrong:
        raise CheckpointError(str(fresh), [f"tensor {name} reads back differently. Write it again" for name in wrong])
    fresh.rename(directory)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def write_adapter_config(table: AdapterTable, directory: Path, base: str) -> None:
    """Write what PEFT reads of the adapters of ``table`` into ``directory``.  base: see ``adapter_config``."""
    text = json.dumps(adapter_config(table, base), indent=2)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def open_adapters(directory: Path) -> HfCheckpoint:
    """The tensors of ``adapter_model.safetensors``.  Raises CheckpointError if it cannot be read."""
    tensors, problems = read_header(directory / WEIGHTS)
    if problems:
        raise CheckpointError(str(directory), problems)
    return HfCheckpoint(directory, tensors)


def open_peft(directory: Path, table: AdapterTable) -> HfCheckpoint:
    """The adapters in ``directory``, checked against ``table``.

    Raises CheckpointError with every violation: settings or shapes of other adapters; a tensor that is missing, or that
    is of a layer that ``table`` does not adapt.
    """
    config, lora = read_adapter_config(directory), table.lora
    ours = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora}
    theirs = {"use_rslora": False} | config
    problems = [
        f"{CONFIG}: {name}={theirs[name]}, and the run has {value}. Write the file's"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    checkpoint = open_adapters(directory)
    problems += _mismatches(checkpoint, table)
    if problems:
        raise CheckpointError(str(directory), problems)
    return checkpoint


def _mismatches(checkpoint: HfCheckpoint, table: AdapterTable) -> Iterator[str]:
    remedy = "Give adapters of this model, and target_modules as they were"
    for name, info in table.hf_tensors.items():
        if info.absent_ok and name not in checkpoint.tensors:
            continue
        if name not in checkpoint.tensors:
            yield f"{WEIGHTS}: tensor {name} of shape {info.shape} is missing. {remedy}"
        elif checkpoint.tensors[name].shape != info.shape:
            shape = checkpoint.tensors[name].shape
            yield f"{WEIGHTS}: tensor {name} has shape {shape}, and {info.shape} here. {remedy}"
    for name in checkpoint.tensors.keys() - table.hf_tensors.keys():
        yield f"{WEIGHTS}: tensor {name} is of no layer that is adapted here. {remedy}"
