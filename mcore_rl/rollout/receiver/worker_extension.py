"""This package's extension of every vLLM worker (``worker_extension_cls``): receives weights, returns fingerprints.

``RolloutEngine.call_workers`` calls the methods.  Arguments and results are plain values, or bytes of JSON.
``sync.receiver``, which vLLM is given, makes the transport; this module knows only its interface, ``Incoming``.

One call receives a whole update.  It could be split into vLLM's three phases (``start_weight_update``,
``update_weights``, ``finish_weight_update``, v1/worker/gpu_worker.py, 0.32), with an engine of our own registered with
``WeightTransferEngineFactory``.  That engine would make the same calls as ``LiveWeights``, tie vLLM's configuration to
the transport, and keep the engine core answering calls between buckets although it can only wait.

No method raises: vLLM's executor stops reading at the first worker that raises, and mistakes the other workers' answers
for answers to its next call (``collective_rpc`` in v1/executor/multiproc_executor.py, 0.32).  Each method returns an
``Answer``; ``answer_of`` returns its result or raises.

Invariant: from the moment an update begins until one is complete, this worker runs no model.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

from mcore_rl.errors import McoreRLError, RolloutError, SyncError
from mcore_rl.families.registry import FAMILIES
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.rollout.receiver.effective_config import effective_config
from mcore_rl.rollout.receiver.live_weights import LiveWeights
from mcore_rl.rollout.receiver.receive_memory import beside, freed_memory_kept
from mcore_rl.rollout.weight_channel import Incoming, Opening
from mcore_rl.rollout.worker_methods import Answer, WeightReceiverMethods
from mcore_rl.weights.fingerprint import added, fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_to, plan_id
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.rounds import Rounds, rounds_id
from mcore_rl.weights.table import Table

P = ParamSpec("P")
T = TypeVar("T")
Connect = Callable[[Opening, int, Rounds | None], Incoming]


class _Updates:
    """A worker's side of the channel: its weights, and the messages that it expects."""

    def __init__(self, opening: Opening, model: torch.nn.Module, vllm_config: Any, rank: int, connect: Connect) -> None:
        self.rank = opening.first_rank + rank
        self.dtype = getattr(torch, opening.dtype)
        table = Table(FAMILIES[opening.family], opening.model, opening.parallel, opening.world_size)
        latent = bool(vllm_config.model_config.use_mla)
        rollout = RolloutTable(FAMILIES[opening.family], opening.model, opening.rollout, latent_attention=latent)
        plan = plan_reshard(table, rollout, self.dtype.itemsize, opening.sites)
        rounds = None if opening.sites is None else Rounds(plan, opening.message_bytes)
        made = plan_id(plan, opening.message_bytes) if rounds is None else rounds_id(rounds)
        if made != opening.plan:
            remedy = (
                f"Install one version of mcore_rl on both sides; make the RolloutTable with latent_attention={latent}"
            )
            raise SyncError(f"Rollout rank {self.rank} makes another reshard plan than the trainer. {remedy}")
        self.live = LiveWeights(model, vllm_config, rollout, self.rank)
        self.expected: list[Message] = (
            messages_to(plan, self.rank, opening.message_bytes) if rounds is None else rounds.messages_to(self.rank)
        )
        self.bucket_bytes = opening.bucket_bytes
        self.incoming = connect(opening, self.rank, rounds)

    def receive(self) -> None:
        """Receive one update; all members have met before."""
        with freed_memory_kept():
            self._receive_slices()

    def _receive_slices(self) -> None:
        self.live.start()
        complete = self._unpacked()
        if self.live.on_cpu:
            complete = beside(complete, self.live.num_bytes, self.bucket_bytes // 2)
        with closing(complete):  # after a failure, end the other thread before telling the other members
            for module in complete:
                self.live.process(module)
        if unwritten := self.live.unwritten():
            raise SyncError(f"Nothing, or not all, came for {', '.join(unwritten[:5])}, {len(unwritten)} in all")
        self.live.finish()

    def _unpacked(self) -> Generator[nn.Module]:
        """Write the messages as they come; yields each module when it is complete."""
        wanted = [(message.source_rank, message.num_bytes) for message in self.expected]
        incoming = self.incoming.messages(wanted)
        for message, data in zip(self.expected, incoming, strict=True):
            for part in message.parts:
                values = data[part.begin : part.begin + part.num_bytes].view(self._dtype_of(part))
                module = self.live.write(
                    part.target, part.slot, part.target_slice, values.view(part.target_slice.shape)
                )
                if module is not None:
                    yield module

    def _dtype_of(self, part: MessagePart) -> torch.dtype:
        dtype: torch.dtype = self.dtype if part.dtype is None else getattr(torch, part.dtype)
        return dtype


class WeightReceiver:
    """Mixed into vLLM's worker class, which has ``rank``, ``vllm_config``, ``model_runner`` and ``execute_model``.

    Abstract but for its transport, which a subclass makes (``sync.receiver``).
    """

    rank: int
    vllm_config: Any
    model_runner: Any

    def sync_open(self, opening: bytes) -> Answer[int]:
        """See ``WeightReceiverMethods.sync_open``."""
        return _answer(self._sync_open, opening)

    def sync_receive(self, version: int) -> Answer[None]:
        """See ``WeightReceiverMethods.sync_receive``."""
        return _answer(self._sync_receive, version)

    def sync_configuration(self) -> Answer[EffectiveConfig]:
        """See ``WeightReceiverMethods.sync_configuration``."""
        return _answer(lambda: effective_config(self.model_runner.get_model()))

    def sync_fingerprints(self) -> Answer[Sequence[tuple[str, int, int]]]:
        """See ``WeightReceiverMethods.sync_fingerprints``."""
        return _answer(self._sync_fingerprints)

    def sync_copies(self) -> Answer[Mapping[str, str]]:
        """See ``WeightReceiverMethods.sync_copies``."""
        return _answer(lambda: dict(self._sync_channel().live.names_of_heads))

    def _sync_open(self, opening: bytes) -> int:
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # stacks into the engine's log, if it hangs
        self._sync_close()
        asked = Opening.unpacked(opening)
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        model = self.model_runner.get_model()
        self.sync_updates = _Updates(asked, model, self.vllm_config, rank, self._sync_connect)
        return self.sync_updates.rank

    def _sync_connect(self, opening: Opening, rank: int, rounds: Rounds | None) -> Incoming:
        """The transport's end of rollout rank ``rank``."""
        raise NotImplementedError

    def _sync_close(self) -> None:
        updates = self.__dict__.pop("sync_updates", None)
        if updates is not None:
            updates.incoming.close()

    def _sync_receive(self, version: int) -> None:
        updates = self._sync_channel()
        doing = f"receiving version {version}"
        self.__dict__["execute_model"] = _refusal(f"it stopped while {doing}")
        try:
            updates.incoming.begin(version)
            updates.receive()
            updates.incoming.finish()
        except BaseException as error:  # report any error to the other members
            updates.live.put_back()
            failure = updates.incoming.failed(error, doing)
            self._sync_close()
            self.__dict__["execute_model"] = _refusal(str(failure))
            raise failure from error
        self.__dict__.pop("execute_model")

    def _sync_fingerprints(self) -> list[tuple[str, int, int]]:
        entries = []
        with torch.no_grad():
            for name, slot, parts in self._sync_channel().live.executed():
                total = added(*(fingerprint(values, start) for start, values in parts))
                entries.append((name, -1 if slot is None else slot, total))
        return entries

    def _sync_channel(self) -> _Updates:
        updates: _Updates | None = self.__dict__.get("sync_updates")
        if updates is None:
            raise SyncError("No channel is open: make a Publisher, and call sync_open with its opening")
        return updates


if TYPE_CHECKING:
    _METHODS: type[WeightReceiverMethods] = WeightReceiver


def _answer(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> Answer[T]:
    try:
        return {"result": call(*args, **options)}
    except Exception as error:  # noqa: BLE001  raised by ``answer_of``
        return {"failed": str(error) if isinstance(error, McoreRLError) else f"{type(error).__name__}: {error}"}


def _refusal(cause: str) -> Callable[..., Any]:
    def execute_model(*_: object, **__: object) -> Any:
        raise RolloutError(f"The weights are only partly updated: {cause}. Complete an update before generating")

    return execute_model
