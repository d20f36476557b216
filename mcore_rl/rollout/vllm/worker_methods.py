"""The methods that this package adds to vLLM's workers, for callers that must not import vLLM.

A caller names a method here: ``engine.call_workers(WeightReceiverMethods.sync_receive, version)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypedDict, TypeVar

from mcore_rl.ground.errors import SyncError
from mcore_rl.proofs.differences import Differences
from mcore_rl.proofs.effective_config import EffectiveConfig

T = TypeVar("T")

# Names of the classes (``worker_extension_cls``), because importing them would import vLLM.
WEIGHT_RECEIVER = "mcore_rl.sync.receiver.SyncReceiver"
HELD_WEIGHTS = "mcore_rl.rollout.vllm.receiver.held_weights.HeldWeights"


class Answer(TypedDict, Generic[T], total=False):
    """``result``, or ``failed`` with the message: methods of ``WeightReceiver`` do not raise, its module says why."""

    result: T
    failed: str


class WeightReceiverMethods(Protocol):
    """The methods of ``receiver.worker_extension.WeightReceiver``."""

    def sync_open(self, opening: bytes) -> Answer[int]:
        """Joins the channel of ``opening``, a packed ``weight_channel.Opening``; leaves a channel that was open.

        Blocks until all others join.  Returns this worker's rollout rank.  Fails if the sender has another plan, if
        others do not join, or if vLLM's model does not match the plan.
        """
        ...

    def sync_receive(self, version: int) -> Answer[None]:
        """Receives the whole update ``version``.

        Fails with the first cause among all members.  This worker then refuses to generate until an update is complete,
        for which the channel must be opened again.
        """
        ...

    def sync_configuration(self) -> Answer[EffectiveConfig]:
        """The configuration that this worker's model computes with, read back from its modules; needs no channel."""
        ...

    def sync_fingerprints(self) -> Answer[Sequence[tuple[str, int, int]]]:
        """(name, slot or -1, fingerprint) of every weight that this worker executes with, unpacked."""
        ...

    def sync_copies(self) -> Answer[Mapping[str, str]]:
        """Maps the names of copies among the fingerprints to the stored tensors that they copy."""
        ...


class HeldWeightsMethods(Protocol):
    """The methods of ``receiver.held_weights.HeldWeights``."""

    def held_differences(self, directory: str, layout: str, quantization: str = "none") -> Differences:
        """The differences between this worker's weights, unpacked, and the files of ``directory``.

        directory: a Hugging Face checkpoint.  layout: the engine's, as a user writes it.  quantization: the engine's;
        what it quantises is compared with the files' numbers after the reference quantiser.
        Raises WeightMapError if vLLM's model does not match the family's table.
        """
        ...

    def held_config(self) -> EffectiveConfig:
        """The configuration that this worker's model computes with, read back from its modules."""
        ...


def answer_of(answer: Answer[T]) -> T:
    """The result of ``answer``.  Raises SyncError with the worker's message if it failed."""
    if "failed" in answer:
        raise SyncError(answer["failed"])
    return answer["result"]
