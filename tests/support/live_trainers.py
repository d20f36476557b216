"""Training ranks that wait for orders, with real Megatron models and publishers; the other half of weight updates."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch.distributed import PrefixStore

from mcore_rl.config.engine import Device
from mcore_rl.config.lora import LoraConfig, PublishedLora
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.towers import PICTURES
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import HOST, Rank
from mcore_rl.parallel.secret_store import SecretStore, StoreAccess, StoreServer
from mcore_rl.proofs.effective_config import EffectiveConfig, joined
from mcore_rl.sync.check import Expected
from mcore_rl.sync.members import Address
from mcore_rl.sync.publish import Published, Publisher
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.transport import Transport
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.messages import MessagePart
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from tests.support.forked import run_ranks
from tests.support.sync_cases import precision_of

BUCKET_BYTES = 40_000  # some tensors are larger than a message
NUM_RANKS = 2


def over_gloo(address: Address) -> RoutedTransport:
    """In rounds between all ranks, as where the rollout ranks have devices, and a node, of their own."""
    sites = Sites((0,) * address.num_trainers, (1,) * address.num_rollout)
    return RoutedTransport(address=address, platform=detect(Device.cpu), sites=sites)


def in_two_stages(address: Address) -> RoutedTransport:
    """In rounds between the training ranks, each on a node of its own, and then through memory that is mapped there."""
    nodes = tuple(range(address.num_trainers))
    hosts = tuple(rank % address.num_trainers for rank in range(address.num_rollout))
    return RoutedTransport(address=address, platform=detect(Device.cpu), sites=Sites(nodes, hosts, hosts))


class _Rank:
    """One training rank; its methods are the orders."""

    def __init__(self, rank: Rank, store: PrefixStore) -> None:
        self.rank, self.store, self.stack = rank, store, ExitStack()
        self.real: dict[tuple[int, str], torch.Tensor] = {}

    def build(
        self,
        name: str,
        model: ModelConfig,
        layout: str,
        weights: Path,
        rollout: str,
        transport: Transport,
        lora: LoraConfig | None,
        form: PublishedLora,
        quantization: Quantization,
        frozen_tower: bool,
    ) -> None:
        from mcore_rl.training.model import DTYPES
        from tests.support import engines

        self.leave()
        self.groups = self.stack.enter_context(engines.groups_of(layout))
        family = (FAMILIES | PICTURES)[name]
        self.table = Table(family, model, parse_layout(layout), self.rank.world_size)
        self.adapters = AdapterTable(self.table, lora) if lora else None
        self.engine = engines.build(
            self.groups, model, engines.config(microbatch_tokens=80) if model.vision else None,
            layout=layout, trainable=False, load=self._loader(weights), adapters=self.adapters,
        )  # fmt: skip
        self.publisher = Publisher(
            self.engine.models,
            self.table,
            RolloutTable(family, model, parse_rollout_layout(rollout), latent_attention=False),  # on the CPU
            self.rank.rank,
            transport,
            dtype=DTYPES[precision_of(name)] if quantization is Quantization.none else torch.bfloat16,
            bucket_bytes=BUCKET_BYTES,
            adapters=self.adapters if form is PublishedLora.adapter else None,
            quantization=quantization,
            frozen_tower=frozen_tower,
        )

    def _loader(self, weights: Path) -> Any:
        from mcore_rl.checkpoints.convert import open_hf
        from mcore_rl.checkpoints.hf_directory import HfCheckpoint
        from mcore_rl.checkpoints.load import load_hf

        sees = self.table.model.vision is not None
        checkpoint = self.stack.enter_context(
            open_hf(weights, pictures=True)[0] if sees else HfCheckpoint.open(weights)
        )
        return partial(load_hf, checkpoint=checkpoint, table=self.table, rank=self.rank.rank)

    def load(self, weights: Path) -> None:
        self.engine.load_weights(self._loader(weights))

    def adapt(self, seed: int, directory: Path, base: Path) -> None:
        """Takes adapters that ``seed`` decides, and writes them as PEFT does."""
        from mcore_rl.checkpoints.peft import save_peft
        from tests.support import adapters

        assert self.adapters is not None
        weights = {name: (1 + seed / 10) * tensor for name, tensor in adapters.drawn(self.adapters).items()}
        adapters.load(self.engine.models, self.adapters, self.rank.rank, weights)
        save_peft(self.engine.models, self.adapters, self.rank.rank, directory, str(base))

    def export(self, directory: Path, source: Path) -> None:
        """As a Hugging Face checkpoint, with the files that stand beside the weights in ``source``."""
        from mcore_rl.checkpoints.export import save_hf

        save_hf(self.engine.models, self.table, self.rank.rank, directory, source)

    def configuration(self) -> EffectiveConfig:
        from mcore_rl.training.effective_config import effective_config

        return effective_config(self.engine.models, self.engine.model)

    def opening(self, first_rank: int, attempt: int) -> bytes:
        return self.publisher.opening(first_rank, attempt)

    def open(self, attempt: int) -> None:
        self.publisher.open(attempt)

    def publish(self, version: int) -> Published:
        return self.publisher.publish(version)

    def expected(self, version: int) -> Expected:
        from mcore_rl.sync.check import expected_weights

        return expected_weights(self.publisher, version)

    def resident(self) -> int:
        return psutil.Process().memory_info().rss

    def hold_back(self, name: str) -> None:
        """From now on, publish what tensor ``name`` is now."""
        kept = {key: tensor for key, tensor in self.publisher.tensors.items() if key[1] == name}
        self.real |= kept
        self.publisher.tensors |= {key: tensor.detach().clone() for key, tensor in kept.items()}

    def swap(self, one: str, other: str) -> None:
        """From now on, publish each for the other where this rank has both."""
        tensors = self.publisher.tensors
        if (0, one) in tensors:
            self.real |= {(0, name): tensors[0, name] for name in (one, other)}
            tensors[0, one], tensors[0, other] = tensors[0, other], tensors[0, one]

    def skip(self, name: str) -> None:
        """From now on, publish zeros for tensor ``name``."""
        live = self.publisher.live

        def without(part: MessagePart) -> torch.Tensor:
            return torch.zeros_like(live(part)) if part.source == name else live(part)

        self.publisher.live = without  # type: ignore[method-assign]

    def mend(self) -> None:
        """Publish what there is."""
        self.publisher.tensors |= self.real
        self.real = {}
        self.publisher.__dict__.pop("live", None)

    def stumble(self, only: int, message: str | None) -> None:
        """On rank ``only``: half-way, the next publishing raises ``message``, or waits until it may ``go_on``."""
        if self.rank.rank != only:
            return
        live, before = self.publisher.live, itertools.count()
        blocks = (block for each in self.publisher.rounds for block in each.legs[0] if block.sender == only)
        middle = sum(len(block.parts) for block in blocks) // 2

        def stumbling(part: MessagePart) -> torch.Tensor:
            if next(before) == middle:
                self.publisher.__dict__.pop("live")
                if message is not None:
                    raise ValueError(message)
                self.store.set("stumbling", b"")
                self.store.wait(["go on"], timedelta(seconds=60))
                self.store.delete_key("go on")
            return live(part)

        self.publisher.live = stumbling  # type: ignore[method-assign]

    def leave(self) -> None:
        if "publisher" in self.__dict__:
            self.publisher.close()
        self.stack.close()


def _serve(rank: Rank, orders: StoreAccess) -> None:
    from tests.support import engines

    shared = SecretStore(orders, 600.0)
    store = PrefixStore("orders", shared)
    with engines.world(rank):
        mine = _Rank(rank, store)
        for number in itertools.count():
            order, args = pickle.loads(store.get(f"order/{number}"))
            try:
                answer = getattr(mine, order)(*args), None
            except Exception as error:  # noqa: BLE001  raised where the order was given
                answer = None, error
            store.set(f"answer/{number}/{rank.rank}", pickle.dumps(answer))
            if order == "leave":
                return


class LiveTrainers:
    """Two training ranks, as ``sync.update.Trainers``; a context manager."""

    def __init__(self) -> None:
        self._numbers, self._channels = itertools.count(), itertools.count()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        run_ranks(_serve, NUM_RANKS, (self.store.access,))

    def __enter__(self) -> LiveTrainers:
        self.store = StoreServer(HOST)
        self._client = SecretStore(self.store.access)
        self._orders = PrefixStore("orders", self._client)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.order("leave"))
        self._thread.join()

    async def order(self, name: str, *args: object) -> list[Any]:
        """Every rank's answer; raises the first error."""
        number = next(self._numbers)
        self._orders.set(f"order/{number}", pickle.dumps((name, args)))
        keys = [f"answer/{number}/{rank}" for rank in range(NUM_RANKS)]
        while not self._orders.check(keys):
            assert self._thread.is_alive(), "the training ranks are gone"
            await asyncio.sleep(0.005)
        answers = [pickle.loads(self._orders.get(key)) for key in keys]
        self.errors = [error for _, error in answers]
        for error in self.errors:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    async def build(
        self,
        name: str,
        model: ModelConfig,
        layout: str,
        weights: Path,
        rollout: str,
        over: Callable[[Address], Transport] = over_gloo,
        lora: LoraConfig | None = None,
        form: PublishedLora = PublishedLora.merged,
        quantization: Quantization = Quantization.none,
        frozen_tower: bool = False,
    ) -> None:
        """Engines of ``layout`` with ``weights``, and publishers to ``rollout`` through a channel of their own.

        lora, form: the adapters that they train, and in which form these are published.  quantization: of the rollout.
        frozen_tower: see ``Publisher``.
        """
        self.channel = f"channel{next(self._channels)}"
        address = Address(
            store=self.store.access,
            name=self.channel,
            num_trainers=NUM_RANKS,
            num_rollout=parse_rollout_layout(rollout).world_size,
        )
        order = ("build", name, model, layout, weights, rollout, over(address), lora, form)
        await self.order(*order, quantization, frozen_tower)

    async def stumbling(self) -> None:
        """Return once a rank that was told to stumble does."""
        while not self._orders.check(["stumbling"]):
            assert self._thread.is_alive(), "the training ranks are gone"
            await asyncio.sleep(0.005)
        self._orders.delete_key("stumbling")

    def go_on(self) -> None:
        """To the rank that stumbles."""
        self._orders.set("go on", b"")

    def process_of(self, rollout_rank: int, attempt: int = 1) -> int:
        """The process that holds a rollout rank, since the channel was opened."""
        member = self._client.get(f"{self.channel}/{attempt}/member/{NUM_RANKS + rollout_rank}")
        return int(msgspec.json.decode(member)[1])

    async def configuration(self) -> EffectiveConfig:
        return joined(await self.order("configuration"))

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        return (await self.order("opening", first_rank, attempt))[0]

    async def open(self, attempt: int) -> None:
        await self.order("open", attempt)

    async def publish(self, version: int) -> list[Published]:
        return await self.order("publish", version)

    async def expected(self, version: int) -> Expected:
        return (await self.order("expected", version))[0]

    async def demand_alive(self) -> None:
        assert self._thread.is_alive(), "the training ranks are gone"
