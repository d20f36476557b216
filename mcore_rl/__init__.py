"""RL post-training for large MoE and dense language models, on Megatron-core.

``mcore_rl.train``, ``sft``, ``prefer`` and ``reward`` run what the commands of these names run (``api.py``).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_API = ("RunResult", "prefer", "reward", "sft", "train")


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mcore_rl.api"), name)  # seconds, and only where it is asked for
