"""Names of torchvision, in a process of vLLM's where it is not installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Language models that vLLM has in one file with a vision tower: architecture, its class's name, too -> vLLM's module.
BESIDE_A_TOWER = {"Qwen3_5ForCausalLM": "qwen3_5", "Qwen3_5MoeForCausalLM": "qwen3_5"}
_NAMED = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def stand_in() -> None:
    """Lets vLLM's classes with a vision tower be imported without torchvision, which they name for videos alone."""
    if find_spec("torchvision") is not None:
        return
    for name in _NAMED:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
