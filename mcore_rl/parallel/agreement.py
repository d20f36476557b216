"""What fails on one rank fails on all: a step that every rank takes by itself, and its error wherever it happens.

For steps without collectives inside (writing files, reading them): a rank that raises would leave the others waiting
at the next collective until its time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRLError, WorkerError

T = TypeVar("T")


def together(step: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """The result of ``step()``, once it has succeeded on every rank of ``group`` (None: all).

    Collective; ``step`` must not be.  device: where the group's collectives want their tensors.  Also a barrier.
    Without a process group there is only this rank.

    Raises what ``step`` raised here; else, where it raised on another rank, that rank's error if it is an McoreRLError
    (of the lowest such rank), and a WorkerError naming the rank if it is not.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(step())
    except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        error = raised
    if dist.is_initialized():
        failed = torch.tensor(int(error is not None), device=device)
        dist.all_reduce(failed, group=group)
        if failed.item():
            errors: list[Exception | str | None] = [None] * dist.get_world_size(group)
            said = error if error is None or isinstance(error, McoreRLError) else f"{type(error).__name__}: {error}"
            dist.all_gather_object(errors, said, group=group)
            if error is None:
                rank, first = next((rank, said) for rank, said in enumerate(errors) if said is not None)
                error = first if isinstance(first, Exception) else WorkerError(f"rank {rank}: {first}")
                error.add_note(f"Raised on rank {rank}")
    if error is not None:
        raise error
    return result[0]
