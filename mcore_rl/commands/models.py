"""The models that are known by name: nothing of them is downloaded to plan, verify or submit.

    mcore-rl models
    mcore-rl models mixtral-8x22b           one of them, with its layouts for each kind of accelerator
    mcore-rl models Qwen/Qwen2.5-0.5B       any of the Hub: is it supported, and what is it, by its config.json alone
    mcore-rl verify --model mixtral-8x22b --preset h100_80gb

Any other checkpoint of these families works as well, from its own config.json; docs/models.md says which families.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl.config.bounds import PathKind
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.hub.names import MODEL, hub_name, named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="of one, or its Hub id, to see it")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.families.checkpoints import find_checkpoint, known_checkpoints

    if hub_name(options.name, MODEL):
        return _of_the_hub(options.name)
    if options.name:
        model = find_checkpoint(options.name, MODEL_CONFIGS)
        path = MODEL_CONFIGS / model.family / f"{model.name}.yaml"
        sys.stdout.write(path.read_text(encoding="utf-8"))
        return 0
    table = Table("name", "family", "Hugging Face id", "GPUs of its presets", box=None, pad_edge=False)
    for each in known_checkpoints(MODEL_CONFIGS).values():
        presets = ", ".join(f"{name}: {preset.num_gpus}" for name, preset in each.presets.items())
        table.add_row(each.name, each.family, each.hf_id, presets)
    Console().print(table, highlight=False)
    return 0


def _of_the_hub(name: str) -> int:
    """Shows what the config.json of a model of the Hub says.  Raises ConfigError if it cannot be had or trained."""
    from mcore_rl.config.hub_files import local_paths
    from mcore_rl.families.checkpoints import known_checkpoints
    from mcore_rl.families.config_json import read_config
    from mcore_rl.families.registry import model_of
    from mcore_rl.hub.selection import ModelPart

    (folder,) = local_paths("NAME", name, PathKind("directory", hub=MODEL), part=ModelPart.config)
    family, model = model_of(read_config(Path(folder)))
    known = [each.name for each in known_checkpoints(MODEL_CONFIGS).values() if each.hf_id == name.partition("@")[0]]
    table = Table("", named(folder), box=None, pad_edge=False)
    table.add_row("family", family.model_type)
    table.add_row("layers", str(model.num_layers))
    table.add_row("hidden size", str(model.hidden_size))
    table.add_row("heads", f"{model.num_attention_heads}, {model.num_query_groups} of keys and values")
    table.add_row("experts", f"{model.moe.num_experts}, {model.moe.top_k} per token" if model.moe else "none")
    table.add_row("context", f"{model.max_position_embeddings:,} tokens")
    table.add_row("known here as", ", ".join(known) or "no name, and no layouts: mcore-rl plan --search finds them")
    Console().print(table, highlight=False)
    return 0
