"""Where nobody should start anything, and somebody does: a parent with habits and variables of its own.

What a shell in the background, a CI runner, a job of Slurm or a torchrun leave to what they start, all at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# None: not set.
VARIABLES: dict[str, str | None] = {
    "HOME": None,
    "LANG": None,
    "LC_ALL": "C",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "error::UserWarning:mcore_rl",
    # of somebody's terminal
    "COLUMNS": "40",
    "FORCE_COLOR": "1",
    "TERM": "dumb",
    # of a machine with accelerators, and of a habit
    "CUDA_VISIBLE_DEVICES": "7",
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    # of a torchrun or an srun around
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    # of other runs
    "RAY_ADDRESS": "192.0.2.1:6379",
    "HF_HOME": "/nonexistent",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "WANDB_MODE": "disabled",
}
# Which tests leave as they are, for none depends on them.
HARMLESS = ("HOME", "CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE")


def under_hostile_parent(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """``command`` with SIGINT and SIGHUP ignored and files that nobody else may read, and its environment."""
    script = "trap '' INT HUP; umask 077; exec \"$@\""
    given = {name: text for name, text in (os.environ | VARIABLES).items() if text is not None}
    return ["sh", "-c", script, "sh", *command], given
