"""What vLLM's workers are extended with: ``rollout``'s receiver of weights, with the transports of this package."""

from __future__ import annotations

import msgspec

from mcore_rl.rollout.vllm.receiver.worker_extension import WeightReceiver
from mcore_rl.rollout.weight_channel import Opening
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Receiving, Transport

TRANSPORTS: dict[str, type[Transport]] = {each.name: each for each in (SharedMemoryTransport, RoutedTransport)}


class SyncReceiver(WeightReceiver):
    """See ``WeightReceiver``; ``rollout.vllm.worker_methods`` names it to vLLM."""

    def _sync_connect(self, opening: Opening, rank: int) -> Receiving:
        transport: Transport = msgspec.json.decode(opening.fields, type=TRANSPORTS[opening.transport])
        return transport.incoming(opening.bucket_bytes, rank)
