"""Which way weights take from the trainer to the engines of a run."""

from __future__ import annotations

from mcore_rl.config.run import RunConfig
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.runtime.placement import Places
from mcore_rl.sync.members import Address
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport


def weight_transport(
    config: RunConfig, platform: Platform, places: Places, store: StoreAccess, name: str = "weights"
) -> Transport:
    """Through memory that all map on one host without accelerators; else in rounds, by the places of the ranks.

    store: where the members meet, under a name that no others have used.
    """
    trainer, layout = config.trainer, config.rollout.layout
    address = Address(
        store=store,
        name=name,
        num_trainers=trainer.world_size,
        num_rollout=layout.world_size,
        timeout_s=trainer.timeout_s,
        join_timeout_s=trainer.timeout_s,
    )
    if not platform.is_accelerator and trainer.nnodes == 1:
        return SharedMemoryTransport(address=address)
    return RoutedTransport(address=address, platform=platform, sites=places.sites(layout, trainer.placement))
