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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import McoreRLError, RolloutError, SyncError
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.rollout.vllm.effective_config import effective_config
from mcore_rl.rollout.vllm.receiver import plain_experts
from mcore_rl.rollout.vllm.receiver.live_adapters import LiveAdapters
from mcore_rl.rollout.vllm.receiver.live_weights import LiveWeights
from mcore_rl.rollout.vllm.receiver.multimodal_loader import MultimodalWorker
from mcore_rl.rollout.vllm.receiver.receive_memory import beside, freed_memory_kept
from mcore_rl.rollout.vllm.worker_methods import Answer, WeightReceiverMethods
from mcore_rl.rollout.weight_channel import Incoming, Opening
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.fingerprint import added, fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_to, plan_id
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.rounds import Rounds, rounds_id
from mcore_rl.weights.table import Table

P = ParamSpec("P")
T = TypeVar("T")
plain_experts.install()  # a worker imports this before it builds its model
Connect = Callable[[Opening, int], Incoming]


class _Plan:
    """What this worker is sent of the tensors of ``rollout``: its messages, and the rounds in which they come.

    planned: the hash of the sender's plan.  Raises SyncError if this process makes another one.
    """

    def __init__(self, opening: Opening, table: Table, rollout: RolloutTable, rank: int, planned: str) -> None:
        self.dtype: torch.dtype = getattr(torch, opening.dtype)
        plan = plan_reshard(table, rollout, self.dtype.itemsize, opening.sites)
        rounds = None if opening.sites is None else Rounds(plan, opening.message_bytes)
        made = plan_id(plan, opening.message_bytes) if rounds is None else rounds_id(rounds)
        if made != planned:
            remedy = "Install one version of mcore_rl on both sides, and tell the RolloutTable of latent attention"
            raise SyncError(f"Rollout rank {rank} makes another reshard plan than the trainer. {remedy}")
        self.messages: list[Message] = (
            messages_to(plan, rank, opening.message_bytes) if rounds is None else rounds.messages_to(rank)
        )
        self.rounds = [] if rounds is None else rounds.of(opening.world_size + rank)

    def received(self, incoming: Incoming) -> Iterator[tuple[MessagePart, Tensor]]:
        """Each part with its values, of its shape, valid until the next one."""
        wanted = [(message.source_rank, message.num_bytes) for message in self.messages]
        for message, data in zip(self.messages, incoming.messages(wanted, self.rounds), strict=True):
            for part in message.parts:
                dtype = self.dtype if part.dtype is None else getattr(torch, part.dtype)
                values = data[part.begin : part.begin + part.num_bytes].view(dtype)
                yield part, values.view(part.target_slice.shape)


class _Updates:
    """A worker's side of the channel: its weights, and the messages that it expects."""

    def __init__(self, opening: Opening, runner: Any, vllm_config: Any, rank: int, connect: Connect) -> None:
        self.rank = opening.first_rank + rank
        family = (FAMILIES | PICTURES)[opening.family]
        table = Table(family, opening.model, opening.parallel, opening.world_size)
        latent = bool(vllm_config.model_config.use_mla)
        rollout = RolloutTable(family, opening.model, opening.rollout, latent_attention=latent)
        self.plan = _Plan(opening, table, rollout, self.rank, opening.plan)
        self.language_plan: _Plan | None = None
        if opening.language_plan is not None:
            language = RolloutTable(family, opening.model, opening.rollout, latent_attention=latent, tower=False)
            self.language_plan = _Plan(opening, table, language, self.rank, opening.language_plan)
        self.live = LiveWeights(runner.get_model(), vllm_config, rollout, self.rank, opening.quantization)
        self.adapters: LiveAdapters | None = None
        if opening.adapters is not None:
            trained = AdapterTable(table, opening.adapters.lora)
            held = RolloutAdapterTable(rollout, trained, opening.adapters.adapter)
            self.adapter_plan = _Plan(opening, trained, held, self.rank, opening.adapters.plan)
            self.adapters = LiveAdapters(runner.lora_manager._adapter_manager, held, self.rank)
        self._has_base = False
        self.bucket_bytes = opening.bucket_bytes
        self.incoming = connect(opening, self.rank)

    def receive(self) -> None:
        """Receive one update; all members have met before."""
        if self.adapters is None or not self._has_base:
            later = self.language_plan if self._has_base else None
            with freed_memory_kept():
                self._receive_slices(later or self.plan, tower=later is None)
        if self.adapters is not None:
            self._receive_adapters(self.adapters)
        self._has_base = True

    def _receive_slices(self, plan: _Plan, *, tower: bool) -> None:
        self.live.start(tower=tower)
        complete = self._unpacked(plan)
        if self.live.on_cpu:
            complete = beside(complete, self.live.num_bytes, self.bucket_bytes // 2)
        with closing(complete):  # after a failure, end the other thread before telling the other members
            for module in complete:
                self.live.process(module)
        _demand_all(self.live.unwritten())
        self.live.finish()

    def _unpacked(self, plan: _Plan) -> Generator[nn.Module]:
        """Write the messages as they come; yields each module when it is complete."""
        for part, values in plan.received(self.incoming):
            module = self.live.write(part.target, part.slot, part.target_slice, values)
            if module is not None:
                yield module

    def _receive_adapters(self, adapters: LiveAdapters) -> None:
        adapters.start()
        for part, values in self.adapter_plan.received(self.incoming):
            adapters.write(part.target, part.slot, part.target_slice, values)
        _demand_all(adapters.unwritten())

    def executed(self) -> Iterator[tuple[str, int | None, Iterator[tuple[tuple[int, ...], Tensor]]]]:
        """See ``LiveWeights.executed``; of the adapters, too."""
        yield from self.live.executed()
        if self.adapters is not None:
            yield from self.adapters.executed()


def _demand_all(unwritten: Sequence[str]) -> None:
    if unwritten:
        raise SyncError(f"Nothing, or not all, came for {', '.join(unwritten[:5])}, {len(unwritten)} in all")


class WeightReceiver(MultimodalWorker):
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
        self.sync_updates = _Updates(asked, self.model_runner, self.vllm_config, rank, self._sync_connect)
        return self.sync_updates.rank

    def _sync_connect(self, opening: Opening, rank: int) -> Incoming:
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
            for name, slot, parts in self._sync_channel().executed():
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
