"""Which fields of a configuration a function reads."""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from typing import Any


def spied(config: Any) -> tuple[Any, set[str]]:
    """A copy of the dataclass ``config``, and the set that the names of its fields go to as they are read."""
    read: set[str] = set()
    names = {field.name for field in fields(config)}

    class Spy(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    spy = copy(config)
    spy.__class__ = Spy
    return spy, read
