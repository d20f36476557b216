"""torch's object collectives, of Megatron and of this package, without their pickles' power to run code.

``all_gather_object`` and its kin unpickle what comes over gloo or NCCL, whose ports answer anyone.  Here they make
numbers, text, bytes, lists, tuples, sets and dicts, and refuse the rest: nothing that a pickle names is looked up,
except the plain data classes that a caller lists for as long as it needs them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mcore_rl.ground.errors import WorkerError

_data_classes: frozenset[tuple[str, str]] = frozenset()


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows no class and no function but those of ``data_classes``, and dtypes beside them."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises WorkerError: a plain value names nothing."""
        if (module, name) in _data_classes:
            return super().find_class(module, name)
        if _data_classes and module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise WorkerError(f"another rank, or a stranger, sent an object that names {module}.{name}. Send plain values")


@contextmanager
def data_classes(names: Set[tuple[str, str]]) -> Iterator[None]:
    """Within: object collectives of this process also carry these classes, (module, name) each.

    List only what holds data and does nothing when it is made.
    """
    global _data_classes
    before = _data_classes
    _data_classes = _data_classes | names
    try:
        yield
    finally:
        _data_classes = before


def refuse_foreign_objects() -> None:
    """From now on, object collectives of this process take plain values only."""
    assert distributed_c10d._unpickler in (pickle.Unpickler, PlainUnpickler), "torch unpickles in another way"
    distributed_c10d._unpickler = PlainUnpickler
