"""How the ranks of a world find one another: at the run's store, and over the interface at which it listens."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.device_details import interfaces
from mcore_rl.parallel.plain_objects import refuse_foreign_objects
from mcore_rl.parallel.secret_store import Prefixed, SecretStore, StoreAccess

_kept: list[Prefixed] = []  # torch keeps only the C++ half of a Python store, and asks it as long as a group lives


def listen_towards(host: str) -> None:
    """Lets groups that this process makes from now on listen at the interface from which it reaches ``host``."""
    os.environ.update(interfaces(host))


def join_group(
    access: StoreAccess, name: str, platform: Platform, rank: int, world_size: int, timeout_s: float
) -> None:
    """Join the default process group of ``torch.distributed``.  Every rank must call it.

    name: of the group in the store; no other group may have it.  timeout_s: how long a collective waits for a rank.
    Changes this process: collectives listen at the store's interface alone, and carry no objects but plain ones.
    """
    refuse_foreign_objects()
    listen_towards(access.host)
    _kept.append(Prefixed(name, SecretStore(access, timeout_s)))
    dist.init_process_group(
        platform.backend,
        store=_kept[-1],
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
