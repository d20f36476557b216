"""What patching changes in other people's modules, and who still holds what was there before.

A function that a module has imported by name is not reached by a patch of the module that defines it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator

import torch

PATCHED_TORCH = ("torch", "torch.cuda", "torch.cuda.random", "torch.cuda.streams")
MEGATRON = "megatron.core."
OURS = "mcore_rl."


def replaced_and_held(patch: Callable[[], None]) -> tuple[list[str], list[str]]:
    """The dotted names that ``patch`` changes, and those in Megatron and in our package that keep the original."""
    before = dict(_callables())
    patch()
    after = dict(_callables())
    replaced = {name: value for name, value in before.items() if after.get(name) is not value}
    names = {id(value): name for name, value in replaced.items()}
    held = [
        f"{holder} is still the original {names[id(value)]}"
        for holder, value in [*after.items(), *_defaults(after)]
        if id(value) in names and holder.startswith((MEGATRON, OURS))
    ]
    return sorted(replaced), sorted(held)


def _callables() -> Iterator[tuple[str, object]]:
    """Dotted name and value of every callable in the modules, and in the classes that they define."""
    for module_name, module in list(sys.modules.items()):
        if module_name in PATCHED_TORCH or module_name.startswith((MEGATRON, OURS)):
            for name, value in list(vars(module).items()):
                if callable(value):
                    yield f"{module_name}.{name}", value
                if inspect.isclass(value) and value.__module__ == module_name:
                    inner = [(key, kept) for key, kept in vars(value).items() if callable(kept)]
                    yield from ((f"{module_name}.{name}.{key}", kept) for key, kept in inner)
    for name in dir(torch.Tensor):  # what it inherits counts too
        if callable(value := inspect.getattr_static(torch.Tensor, name)):
            yield f"torch.Tensor.{name}", value


def _defaults(values: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Default arguments of the functions among ``values``."""
    for name, value in values.items():
        if inspect.isfunction(value):
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            yield from ((f"{name}(...)", default) for default in defaults)
