"""The interface between trainers and vLLM's workers for weight updates; it needs no vLLM, since trainers import it.

``receiver.worker_extension`` is the workers' side; ``mcore_rl.sync`` is the trainers' side and has all transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import Quantization, RolloutLayout
from mcore_rl.ground.errors import SyncError
from mcore_rl.weights.rounds import Round
from mcore_rl.weights.sites import Sites


class Incoming(Protocol):
    """The receiving end of a transport, on one rollout rank.  Give ``failed`` any error of an update."""

    def begin(self, version: int) -> None:
        """Begins update ``version``: waits until all senders and receivers have begun it."""
        ...

    def messages(self, wanted: Sequence[tuple[int, int]], rounds: Sequence[Round] = ()) -> Iterator[Tensor]:
        """Yields the message for each (member that sends it, bytes) in ``wanted``, uint8, valid until the next one.

        rounds: in which they come, where the transport has rounds.
        """
        ...

    def finish(self) -> None:
        """Ends the update: reports that all messages are applied, and waits until all members reported it."""
        ...

    def failed(self, error: BaseException, doing: str) -> SyncError:
        """Reports ``error``, raised while ``doing``, to all members; returns an error with their first cause."""
        ...

    def close(self) -> None:
        """Leaves the channel."""
        ...


@dataclass(frozen=True, kw_only=True)
class SentAdapters:
    """What a worker must know of adapters that it is sent beside the weights.

    lora: as they are trained.  adapter: their id in vLLM.  plan: as of ``Opening``, of the adapters.
    """

    lora: LoraConfig
    adapter: int
    plan: str


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a worker must know to join a channel.  As JSON (``packed``), it is the argument of ``sync_open``.

    family, model: the name of the model's family, and the model.
    parallel, world_size: the layout of training.
    rollout: the layout of all engines together.
    first_rank: the first rollout rank of this engine.
    dtype: torch's name of the dtype in which weights are sent.
    message_bytes: the most bytes of one message.
    sites: where all ranks are; None: the plan does not depend on it, and there are no rounds.
    bucket_bytes: half of them may be in flight, half may wait to be packed.
    plan: ``messages.plan_id`` of the sender, or ``rounds.rounds_id``.
    language_plan: the same of later updates, where they bring the language model without the vision tower, which is
    frozen; None: they are as the first.
    adapters: that the engine applies; the first update of the channel brings the weights and these, each later one
    these alone.  None: every update brings the weights.
    quantization: in which the engine holds its matrices; weights are sent plain.
    transport, fields: the name of the transport, of which ``sync.receiver`` makes the receiving end, and it as JSON.
    """

    family: str
    model: ModelConfig
    parallel: ParallelConfig
    world_size: int
    rollout: RolloutLayout
    first_rank: int
    dtype: str
    message_bytes: int
    sites: Sites | None
    bucket_bytes: int
    plan: str
    language_plan: str | None = None
    adapters: SentAdapters | None = None
    quantization: Quantization = Quantization.none
    transport: str
    fields: msgspec.Raw

    def packed(self) -> bytes:
        """This opening as JSON; it has the secret of the run's store."""
        return msgspec.json.encode(self)

    @classmethod
    def unpacked(cls, packed: bytes) -> Opening:
        """What was packed.  Raises SyncError if it is anything else; runs nothing of it."""
        try:
            return msgspec.json.decode(packed, type=cls)
        except msgspec.MsgspecError as error:
            remedy = "Install one version of mcore_rl on both sides"
            raise SyncError(f"The weight channel's opening cannot be read: {error}. {remedy}") from error
