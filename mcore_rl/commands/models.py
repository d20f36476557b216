"""The models that are known by name: nothing of them is downloaded to plan, verify or submit.

    mcore-rl models
    mcore-rl models mixtral-8x22b           one of them, with its layouts for each kind of accelerator
    mcore-rl verify --model mixtral-8x22b --preset h100_80gb

Any other checkpoint of these families works as well, from its own config.json; docs/models.md says which families.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from mcore_rl.config.resources import MODEL_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="of one, to see it")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.families.checkpoints import find_checkpoint, known_checkpoints

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
