"""torch's object collectives, of Megatron and of this package, without their pickles' power to run code.

``all_gather_object`` and its kin unpickle what comes over gloo or NCCL, whose ports answer anyone.  Here they make
numbers, text, bytes, lists, tuples, sets and dicts, and refuse the rest: nothing that a pickle names is looked up.
"""

from __future__ import annotations

import pickle

from torch.distributed import distributed_c10d

from mcore_rl.errors import WorkerError


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows no class and no function."""

    def find_class(self, module: str, name: str) -> object:
        """Raises WorkerError: a plain value names nothing."""
        raise WorkerError(f"another rank, or a stranger, sent an object that names {module}.{name}. Send plain values")


def refuse_foreign_objects() -> None:
    """From now on, object collectives of this process take plain values only."""
    assert distributed_c10d._unpickler in (pickle.Unpickler, PlainUnpickler), "torch unpickles in another way"
    distributed_c10d._unpickler = PlainUnpickler
