"""What trainers and vLLM's workers say to each other about weights: needs no vLLM, for Megatron's processes import it.

``receiver.worker_extension`` is the workers' side, ``mcore_rl.sync`` the trainers' and all transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.errors import SyncError


class Incoming(Protocol):
    """The receiving end of a transport, of one rollout rank.  What it raises, ``failed`` explains."""

    def begin(self, version: int) -> None:
        """Meet all who send and receive."""
        ...

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """For each (training rank, bytes) its message, uint8 [bytes]; good until the next one is asked for.

        place: memory for message number n, uint8, of its size; asked once for each, in order, and not for much more
        than is on its way.  A transport that has messages in memory of its own yields that, and asks for none.
        """
        ...

    def finish(self) -> None:
        """Say that all is applied, and wait until all others said so."""
        ...

    def failed(self, error: BaseException, doing: str) -> SyncError:
        """Tell everybody, and learn from them what came first."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a worker must know to take part.  Pickled, it is the argument of ``sync_open``.

    family: its name.  parallel, world_size: of training.  rollout: of all engines together; first_rank: the first
    rollout rank of this engine.  dtype: torch's name of that of the weights as they are sent.  message_bytes: the most
    in one message.  in_place: of ``messages_to``.  bucket_bytes: half of it may be on its way, half wait to be
    packed.  plan: ``messages.plan_id`` of the sender.  connect: makes the transport's end of a rollout rank.
    """

    family: str
    model: ModelConfig
    parallel: ParallelConfig
    world_size: int
    rollout: RolloutLayout
    first_rank: int
    dtype: str
    message_bytes: int
    in_place: bool
    bucket_bytes: int
    plan: str
    connect: Callable[[int], Incoming]
