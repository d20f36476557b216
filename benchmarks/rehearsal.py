"""Every recipe rehearsed at its first, middle and last stage: the table of docs/rehearsal.md.

    python benchmarks/rehearsal.py [RECIPE ...] > table.md

One process at a time, so that seconds and memory are each rehearsal's own.  A row is a role on a rank: peak of the
second training step, the planner's figure for the same tensors, their difference, seconds, memory of the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mcore_rl.config.launch import load_recipe, recipe_names
from mcore_rl.rehearsal.rank import ranks_of_stages

ROOT = Path(__file__).parents[1]
HEAD = ("recipe, role", "stage", "peak GiB", "plan GiB", "difference", "microbatches", "s of a core", "MiB")


def roles_of(recipe: str, rank: int) -> list[dict[str, Any]]:
    """The rehearsal's values, by role."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rehearsal.json"
        command = [
            sys.executable,
            str(ROOT / "tools" / "rehearse.py"),
            f"recipe={recipe}",
            f"rank={rank}",
            f"out={out}",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if ran.returncode:
            raise SystemExit(f"{recipe} rank {rank}: {ran.stderr[-4000:]}")
        roles: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["roles"]
    return roles


def row(recipe: str, stages: int, role: dict[str, Any]) -> list[str]:
    peak = role["peaks"][-1]["num_bytes"]
    planned = role["planned"]
    part = role["microbatches"]
    return [
        f"{recipe}, {role['role']}",
        f"{role['stage'] + 1} of {stages}",
        f"{peak / 2**30:.2f}",
        f"{planned['peak'] / 2**30:.2f}",
        f"{100 * planned['difference']:+.1f} %",
        f"{part['rehearsed']} of {part['of']}",
        f"{role['core_seconds']:.0f}",
        f"{role['resident_bytes'] / 2**20:.0f}",
    ]


def main() -> None:
    print("|", " | ".join(HEAD), "|")
    print("|", " | ".join("---" for _ in HEAD), "|", flush=True)
    for recipe in sys.argv[1:] or [name for name in recipe_names() if load_recipe(name).recipe.checkpoint]:
        run = load_recipe(recipe)
        for rank in ranks_of_stages(run.actor.parallel, run.trainer.world_size):
            for role in roles_of(recipe, rank):
                print("|", " | ".join(row(recipe, run.actor.parallel.pp, role)), "|", flush=True)


if __name__ == "__main__":
    main()
