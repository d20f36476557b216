"""Runs a step on every rank and raises on all of them when it fails on one.

For steps without collectives (writing files, reading them): without this, a rank that raises would leave the others
waiting at the next collective until its time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore_rl.ground.errors import McoreRLError, WorkerError, error_named

T = TypeVar("T")


def together(step: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """The result of ``step()``, after it has succeeded on every rank of ``group`` (None: all).

    Collective, and a barrier; ``step`` itself must not be collective.  device: of the tensors for the group's
    collectives.  Without a process group there is only this rank.

    Raises this rank's own error; else the error of the lowest rank that failed: itself if it is an McoreRLError, or a
    WorkerError that names the rank.
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
            reports: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(reports, _report(error), group=group)
            if error is None:
                rank, (kind, *words) = next((rank, report) for rank, report in enumerate(reports) if report)
                error = error_named(kind, words) if kind else WorkerError(f"rank {rank}: {words[0]}")
                error.add_note(f"Raised on rank {rank}")
    if error is not None:
        raise error
    return result[0]


def _report(error: Exception | None) -> list[str]:
    """``error`` as plain text (see ``plain_objects``): [its type, or nothing if it is not this package's, words...]."""
    if error is None:
        return []
    if isinstance(error, McoreRLError):
        return [type(error).__name__, *error.plain()]
    return ["", f"{type(error).__name__}: {error}"]
