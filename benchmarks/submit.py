"""How long ``launch/slurm/submit.py --dry-run`` takes: it is typed by people, and must not load what a run loads."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "launch/slurm/submit.py", "cluster=nvidia_h100", "model.path=MODEL", "--dry-run"]
RECIPES = ("arithmetic_grpo", "qwen2_7b_grpo", "mixtral_8x22b_rloo")
TIMES = 7
TARGET_S = 1.0


def seconds(recipe: str) -> float:
    started = time.perf_counter()
    subprocess.run([*COMMAND, f"recipe={recipe}"], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> int:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    worst = 0.0
    for recipe in RECIPES:
        taken = [seconds(recipe) for _ in range(TIMES)]
        worst = max(worst, statistics.median(taken))
        print(f"{recipe:20} median {statistics.median(taken):.2f} s, fastest {min(taken):.2f} s")
    print(f"slowest median {worst:.2f} s (target {TARGET_S:g} s)")
    return 0 if worst <= TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
