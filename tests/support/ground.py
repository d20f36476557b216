"""What every test stands on, whoever started pytest: signals, umask, locale and environment.

A shell starts what it puts in the background with SIGINT ignored, a CI runner has a umask and a locale of its own, a
job of Slurm is full of variables, and every process that a test starts inherits all that.  Here it is put right once,
before any test module is imported.  ``tests/e2e/test_hostile_parent.py`` runs a slice of the gate where it is not.
"""

from __future__ import annotations

import os
import signal
import sys

# By which somebody else's job, habit or machine would speak to torch, Ray, vLLM, transformers, wandb, rich or Python.
# Masks of devices stay: on a shared machine they say which devices the tests may have.
FOREIGN = (
    "COLUMNS", "FORCE_COLOR", "GIT_", "HF_", "HYDRA_", "LANGUAGE", "LC_", "LINES", "LOCAL_RANK", "MASTER_", "MKL_",
    "MPI", "NCCL_", "NO_COLOR", "OMPI_", "OMP_", "PMI", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONUTF8",
    "PYTHONWARNINGS", "RANK", "RAY_", "SBATCH_", "SLURM", "SRUN_", "TERM", "TOKENIZERS_", "TORCH", "TRANSFORMERS_",
    "TTY_", "VLLM_", "WANDB_", "WORLD_SIZE",
)  # fmt: skip
# OMP_NUM_THREADS: tests compute on a few numbers each, which several threads take three times as long for.
# HF_HUB_OFFLINE: no test asks the Hub of the world; tests/hub asks one of its own.
# OMP_WAIT_POLICY: two processes of pytest share the cores, and threads that wait must not spin on them.
OWN = {
    "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip
UMASK = 0o022


def stand() -> None:
    """Set it all, for this process and for those that it will start."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # these two Python itself ignores
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(UMASK)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ |= OWN
    # Else each process rewrites the asserts of all files of tests again, in 10 s of a core.
    sys.dont_write_bytecode = False


stand()
