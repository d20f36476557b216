"""The recipes there are; or one of them, as yaml to read, or to copy and change.

    mcore-rl recipes
    mcore-rl recipes qwen2_7b_grpo > my_recipes/mine.yaml

A recipe is named as recipe=NAME, in train, sft, plan, rehearse, submit and doctor; docs/baselines.md says what each
reproduces, and what it needs.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="of one, to see it")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.config.launch import program_of, recipe_names, recipe_path
    from mcore_rl.config.yaml_files import read_yaml

    if options.name:
        sys.stdout.write(recipe_path(options.name).read_text(encoding="utf-8"))
        return 0
    table = Table("recipe=", "run by", "on", "what it is", box=None, pad_edge=False)
    for name in recipe_names():
        path = recipe_path(name)
        values = read_yaml(path)
        trainer = {"nnodes": 1, "n_gpus_per_node": 1} | values["trainer"]
        devices = int(trainer["nnodes"]) * int(trainer["n_gpus_per_node"])
        cluster = values.get("recipe", {}).get("cluster")
        place = f"{devices} of {cluster}" if cluster else "any machine"
        about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        table.add_row(name, program_of(path), place, about)
    Console().print(table, highlight=False)
    return 0
