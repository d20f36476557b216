"""How the ranks of a world find one another: at the run's store, and over the interface at which it listens."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.plain_objects import refuse_foreign_objects
from mcore_rl.parallel.secret_store import Prefixed, SecretStore, StoreAccess

LOOPBACK = ("127.0.0.1", "::1")
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_kept: list[Prefixed] = []  # torch keeps only the C++ half of a Python store, and asks it as long as a group lives


def join_group(
    access: StoreAccess, name: str, platform: Platform, rank: int, world_size: int, timeout_s: float
) -> None:
    """Join the default process group of ``torch.distributed``.  Every rank must call it.

    name: of the group in the store; no other group may have it.  timeout_s: how long a collective waits for a rank.
    Changes this process: collectives listen at the store's interface alone, and carry no objects but plain ones.
    """
    refuse_foreign_objects()
    os.environ.update(interfaces(access.host))
    _kept.append(Prefixed(name, SecretStore(access, timeout_s)))
    dist.init_process_group(
        platform.backend,
        store=_kept[-1],
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def interfaces(host: str) -> dict[str, str]:
    """The variables that keep collectives on the interface where this machine reaches ``host``, but for those set.

    Gloo would listen at whatever the host's name resolves to.  NCCL and RCCL are told only where all stay on one
    machine: between machines they may use several interfaces, and which is for the site to say.
    """
    name = interface_to(host)
    wanted = {GLOO_INTERFACE: name, NCCL_INTERFACE: name if host in LOOPBACK else None}
    return {key: value for key, value in wanted.items() if value is not None and key not in os.environ}


def interface_to(host: str) -> str | None:
    """The interface from which this machine reaches ``host``; None if it cannot be told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host, 9))
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = (name for name, addresses in psutil.net_if_addrs().items() if own in {each.address for each in addresses})
    return next(names, None)
