"""Adapters in PEFT's directories: ``adapter_config.json`` and ``adapter_model.safetensors``, out and in.

``peft_checkpoint.py`` says how PEFT has the adapters of experts, and reads what it saved.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.checkpoints.export import export_stream
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.peft_checkpoint import (
    PeftCheckpoint,
    in_whole,
    of_text,
    peft_tensors,
    target_fields,
    targets_in_whole,
)
from mcore_rl.checkpoints.rest import part_in
from mcore_rl.checkpoints.safetensors import read_header
from mcore_rl.config.lora import ALL_LINEAR, LoraConfig
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.json_text import read_json
from mcore_rl.weights.adapter_table import AdapterTable, all_linear
from mcore_rl.weights.table import Table

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
UNPICKLE = (
    'If you trust it, write it anew and give NEW: python -c "from peft import AutoPeftModelForCausalLM as M; '
    "M.from_pretrained('DIR', dtype='auto').save_pretrained('NEW')\""
)
ADAPTERS = "adapter"  # the folder of an export with merged weights that has them by themselves
# How somebody who has trained such adapters goes on: PEFT merges them, and the model that it writes is read.
MERGE_FIRST = (
    "Merge them with PEFT, and give NEW, with the tokenizer's files, as the model: python -c \"from peft import "
    "AutoPeftModelForCausalLM as M; M.from_pretrained('DIR', dtype='auto').merge_and_unload().save_pretrained('NEW')\""
)
# Fields with which PEFT computes something else than ``W x + scale * B (A x)`` on whole linear layers, and the values
# with which it does not; and what then helps.
PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), MERGE_FIRST),
    "bias": (("none", None), MERGE_FIRST),
    "modules_to_save": ((None, []), MERGE_FIRST),
    "lora_bias": ((False, None), MERGE_FIRST),
    "layer_replication": ((None, []), MERGE_FIRST),
    "trainable_token_indices": ((None, [], {}), MERGE_FIRST),
    "use_bdlora": ((None, False), MERGE_FIRST),
    "kasa_config": ((None,), MERGE_FIRST),
    "monteclora_config": ((None,), MERGE_FIRST),
    # What these add depends on the tokens, so that no merged weight has it.
    "alora_invocation_tokens": ((None, []), "It cannot be merged either: use it in PEFT, or train plain LoRA again"),
    "arrow_config": ((None,), "It cannot be merged either: use it in PEFT, or give one of the adapters that it routes"),
    "use_qalora": ((False, None), "It cannot be merged either: use it in PEFT, or train plain LoRA again"),
    "megatron_config": ((None,), "Save the adapters from the Hugging Face model, whose layers have other names"),
}
# Fields that are read, and those that change how adapters are trained or begin, and not what they compute:
# ``fan_in_fan_out`` is of GPT-2's layers, and PEFT takes it back for others.
READ = (
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
)
WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "lora_dropout",
    "fan_in_fan_out",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
)
# First values of A and B for which PEFT changes the base, too: what it then saves belongs to that other base.
OF_ANOTHER_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


def adapter_config(table: AdapterTable, base: str) -> dict[str, Any]:
    """What PEFT reads of the adapters of ``table``.  base: the model's directory or name."""
    lora = table.lora
    targets = table.lora.target_modules
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


def peft_config(table: AdapterTable, base: str) -> dict[str, Any]:
    """``adapter_config``, with the experts' layers as transformers 5 has them."""
    config = adapter_config(table, base)
    return config | (target_fields(table) if table.model.moe else {})


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """``adapter_config.json``.  Raises CheckpointError: it is missing, unreadable, or of adapters of another kind."""
    try:
        config = read_json((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{CONFIG} cannot be read: {error}. Give a directory that PEFT saved"
        raise CheckpointError(str(directory), [problem]) from error
    if not isinstance(config, dict):
        raise CheckpointError(str(directory), [f"{CONFIG} is no JSON object. Give a directory that PEFT saved"])
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"{CONFIG}: peft_type={config.get('peft_type')}: only LORA is read")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        types = (int,) if name == "r" else (int, float)
        if value is None or type(value) not in types or value <= 0:
            problems.append(f"{CONFIG}: {name}={value}: is no number over 0. Give a directory that PEFT saved")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(OF_ANOTHER_BASE):
        remedy = "Save them with path_initial_model_for_weight_conversion, as adapters of the model's own"
        problems.append(f"{CONFIG}: init_lora_weights={init}: the adapters are of weights that PEFT changed. {remedy}")
    for name, (plain, remedy) in PLAIN.items():
        if config.get(name) not in plain:
            problems.append(f"{CONFIG}: {name}={config[name]}: computes what is not computed here. {remedy}")
    for name, types in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
        for pattern, value in (config.get(name) or {}).items():
            if type(value) not in types or value <= 0:
                problems.append(
                    f"{CONFIG}: {name}: {pattern}={value}: is no number over 0. Give a directory that PEFT saved"
                )
    if problems:
        raise CheckpointError(str(directory), problems)
    return dict(config)


def lora_of(config: Mapping[str, Any]) -> LoraConfig:
    """The adapters that ``config`` (``read_adapter_config``) describes."""
    targets = config.get("target_modules") or []
    excluded = config.get("exclude_modules") or []
    return LoraConfig(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=[targets] if isinstance(targets, str) else list(targets),
        exclude_modules=[excluded] if isinstance(excluded, str) else list(excluded),
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
    whole = {name: tensor.contiguous().clone() for name, tensor in peft_tensors(tensors, table).items()}
    config = peft_config(table, base)
    if part_in(Path(base)) is not None and table.head is Head.lm:
        whole = {in_whole(name): tensor for name, tensor in whole.items()}
        config["target_modules"] = targets_in_whole(config["target_modules"])
    save_file(whole, fresh / WEIGHTS, {"format": "pt"})
    (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with open_peft(fresh, table) as written:
        wrong = [name for name, tensor in tensors.items() if not _same_bits(written.read(name), tensor)]
    if wrong:
        raise CheckpointError(str(fresh), [f"tensor {name} reads back differently. Write it again" for name in wrong])
    fresh.rename(directory)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def write_adapter_config(table: AdapterTable, directory: Path, base: str) -> None:
    """Write a run's record of its adapters, those of ``table``, into ``directory``.  base: see ``adapter_config``."""
    text = json.dumps(adapter_config(table, base), indent=2)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def open_adapters(directory: Path, table: Table) -> PeftCheckpoint:
    """The adapters of the model of ``table`` in ``directory``.

    Raises CheckpointError with every violation: settings that compute something else; no ``adapter_model.safetensors``;
    a tensor of another rank than the settings say, whose scale would be wrong.
    """
    config = read_adapter_config(directory)
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise CheckpointError(
            str(directory), [f"{PICKLED}: is a pickle, which may run code when it is read. {UNPICKLE}"]
        )
    tensors, problems = read_header(directory / WEIGHTS)
    if problems:
        raise CheckpointError(str(directory), problems)
    of_model = {of_text(name): info for name, info in tensors.items()}
    tensors = {name: replace(info, name=name) for name, info in of_model.items()}
    checkpoint = PeftCheckpoint(directory, tensors, config, table)
    if checkpoint.problems:
        checkpoint.close()
        raise CheckpointError(str(directory), checkpoint.problems)
    return checkpoint


def changed_base(adapters: PeftCheckpoint, base: HfCheckpoint) -> list[str]:
    """A message for each tensor of the model itself in ``adapters`` that is not that of ``base``.

    PEFT saves the embedding and the output projection where they are adapted, or where it thinks that they have grown.
    """
    problems = []
    for stored, name in adapters.base_copies:
        held = base.tensors.get(name)
        if held is None or not adapters.holds_copy(stored, base, name):
            problems.append(
                f"{WEIGHTS}: tensor {stored} is not {name} of {base.directory}: the model changed. {MERGE_FIRST}"
            )
    return problems


def open_peft(directory: Path, table: AdapterTable) -> PeftCheckpoint:
    """The adapters in ``directory``, checked against ``table``, all of the rank and scale of its settings.

    Raises CheckpointError as ``open_adapters`` does, and with every violation: settings or shapes of other adapters; a
    tensor that is missing, or that is of a layer that ``table`` does not adapt.
    """
    checkpoint = open_adapters(directory, table.base)
    ours = table.lora
    theirs = checkpoint.lora
    pairs = {
        "r": (theirs.rank, ours.rank),
        "lora_alpha": (theirs.alpha, ours.alpha),
        "use_rslora": (theirs.use_rslora, ours.use_rslora),
    }
    problems = [
        f"{CONFIG}: {name}={needed}, and the run has {has}. Write the file's"
        for name, (needed, has) in pairs.items()
        if not isclose(needed, has)
    ]
    checkpoint.pad({name: info.shape for name, info in table.hf_tensors.items()})
    problems += _mismatches(checkpoint, table)
    if problems:
        checkpoint.close()
        raise CheckpointError(str(directory), problems)
    return checkpoint


def _mismatches(checkpoint: PeftCheckpoint, table: AdapterTable) -> Iterator[str]:
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
