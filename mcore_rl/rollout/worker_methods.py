"""The methods that this package adds to vLLM's workers, for callers that must not import vLLM.

A caller names a method here: ``engine.call_workers(WeightReceiverMethods.sync_receive, version)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypedDict, TypeVar

from mcore_rl.errors import SyncError
from mcore_rl.proofs.differences import Differences

T = TypeVar("T")

# Names of the classes (``worker_extension_cls``), because to import them is to import vLLM.
WEIGHT_RECEIVER = "mcore_rl.rollout.receiver.worker_extension.WeightReceiver"
HELD_WEIGHTS = "mcore_rl.rollout.receiver.held_weights.HeldWeights"


class Answer(TypedDict, Generic[T], total=False):
    """``result``, or ``failed`` with the message: methods of ``WeightReceiver`` do not raise, see there."""

    result: T
    failed: str


class WeightReceiverMethods(Protocol):
    """Of ``receiver.worker_extension.WeightReceiver``."""

    def sync_open(self, opening: bytes) -> Answer[int]:
        """Join the channel that ``opening``, a pickled ``weight_channel.Opening``, tells of; an open one is left.

        Blocks until all others join.  Returns this worker's rollout rank.  Fails where the sender's plan is another,
        nobody comes, or vLLM's model is none of the plan's.
        """
        ...

    def sync_receive(self, version: int) -> Answer[None]:
        """Take part in update ``version``, from its first byte to its last.

        Fails with the first cause, whoever it was; this worker then refuses to run, and the channel must be opened
        again, until an update is complete.
        """
        ...

    def sync_fingerprints(self) -> Answer[Sequence[tuple[str, int, int]]]:
        """(name, slot or -1, fingerprint) of all that this worker executes with, as it was before any packing."""
        ...

    def sync_copies(self) -> Answer[Mapping[str, str]]:
        """Names among the fingerprints that are copies of a stored tensor -> that tensor."""
        ...


class HeldWeightsMethods(Protocol):
    """Of ``receiver.held_weights.HeldWeights``."""

    def held_differences(self, directory: str, layout: str) -> Differences:
        """What this worker executes with otherwise than the files of ``directory`` say, before any packing.

        directory: a Hugging Face checkpoint.  layout: the engine's, as a user writes it.

        Raises WeightMapError where vLLM's model is not what the family's table says of it.
        """
        ...


def answer_of(answer: Answer[T]) -> T:
    """The result; raises SyncError with what the worker failed of."""
    if "failed" in answer:
        raise SyncError(answer["failed"])
    return answer["result"]
