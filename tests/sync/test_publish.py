"""What a publisher sends, taken apart by hand, without an engine: the live weights, each where vLLM stores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.sync.check import expected_weights
from mcore_rl.sync.members import Address
from mcore_rl.sync.publish import Publisher, message_bytes
from mcore_rl.weights.fingerprint import added, fingerprint
from mcore_rl.weights.messages import messages_to
from mcore_rl.weights.quantised import SCALES, quantise
from mcore_rl.weights.quantised_shards import is_quantised
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of
from tests.support import checkpoints, direct_rollout

NOWHERE = StoreAccess(host="nowhere", port=1, secret=b"")
BUCKET_BYTES = 40_000  # some tensors are larger than a message
CASES = [("llama", "tp=2", "tp=2"), ("qwen2", "tp=2", "tp=1"), ("mixtral", "tp=2,ep=2,etp=1", "tp=2")]


class Chunk(torch.nn.Module):
    """Names and shapes of one Megatron model chunk, and no forward pass."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self.held = {local.name: torch.full(table.shape(local), 9.0) for local in table.tensors(rank)}

    def state_dict(self, **_: object) -> dict[str, Tensor]:  # type: ignore[override]
        return self.held


@dataclass
class Recorder:
    """A transport and both of its ends, for one training rank: keeps a copy of what is sent."""

    address: Address
    sites: None = None
    sent: dict[int, list[Tensor]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    longest: int = 0
    is_full: bool = False

    @property
    def members(self) -> Recorder:
        return self

    def outgoing(self, rank: int, device: torch.device) -> Recorder:
        self.said.append("open")
        return self

    def incoming(self, *_: object) -> Any:
        raise AssertionError("nobody receives here")

    def meet(self, why: str) -> None:
        self.said.append(why)

    def failed(self, error: BaseException, doing: str) -> SyncError:
        return SyncError(f"told: {doing}: {error}")

    def buffer(self, num_bytes: int) -> Tensor:
        if self.is_full:
            raise ValueError("no room")
        self.longest = max(self.longest, num_bytes)
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)  # what is not written shows

    def send(self, message: Tensor, rollout_rank: int) -> None:
        self.sent.setdefault(rollout_rank, []).append(message.clone())

    def flush(self) -> None:
        self.said.append("flush")

    def release(self) -> None:
        self.said.append("release")

    def close(self) -> None:
        self.said.append("close")


@dataclass
class World:
    """A checkpoint, and the publishers of every training rank, which nothing connects."""

    directory: Path
    rollout: RolloutTable
    publishers: list[Publisher]

    def end(self, rank: int) -> Recorder:
        """Of a training rank, that of the channel which is open."""
        outgoing = self.publishers[rank]._outgoing
        assert isinstance(outgoing, Recorder)
        return outgoing

    def received(self, target: int) -> dict[str, Tensor]:
        """What rollout rank ``target`` would hold, written with the plan alone."""
        publisher = self.publishers[0]
        held = {t.name: torch.zeros(self.rollout.shape(t), dtype=publisher.dtype) for t in self.rollout.tensors(target)}
        streams = {rank: iter(self.end(rank).sent[target]) for rank in range(len(self.publishers))}
        for message in messages_to(publisher.plan, target, publisher.message_bytes):
            data = next(streams[message.source_rank])
            assert len(data) == message.num_bytes
            for part in message.parts:
                values = data[part.begin : part.begin + part.num_bytes].view(publisher.dtype)
                tensor = held[part.target] if part.slot is None else held[part.target][part.slot]
                view_of(tensor, part.target_slice).copy_(values.view(part.target_slice.shape))
        assert all(next(stream, None) is None for stream in streams.values()), "more was sent than is wanted"
        return held

    def by_hand(self, target: int) -> dict[str, Tensor]:
        """The same, sliced from the checkpoint by a reference that knows no plan."""
        whole = checkpoints.tensors(self.directory)
        name, model = self.rollout.family.name, self.rollout.model
        tensors = direct_rollout.llama_like(
            lambda key: whole[key].numpy(),  # type: ignore[arg-type,return-value]  # floats do as well
            model,
            self.rollout.layout,
            target,
            bias=name == "qwen2",
            mixtral=name == "mixtral",
        )
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}


def world(
    directory: Path,
    name: str,
    training: str,
    rollout: str,
    dtype: torch.dtype = torch.float32,
    world_size: int = 2,
    quantization: Quantization = Quantization.none,
) -> World:
    checkpoints.write(name, directory)
    table = Table(FAMILIES[name], checkpoints.MODELS[name], parse_layout(training), world_size)
    target = RolloutTable(FAMILIES[name], checkpoints.MODELS[name], parse_rollout_layout(rollout))
    publishers = []
    with HfCheckpoint.open(directory) as checkpoint:
        for rank in range(world_size):
            chunks = [Chunk(table, rank)]
            load_hf(chunks, checkpoint=checkpoint, table=table, rank=rank)
            address = Address(store=NOWHERE, name="x", num_trainers=world_size, num_rollout=target.layout.world_size)
            transport = Recorder(address)
            publisher = Publisher(
                chunks,
                table,
                target,
                rank,
                transport,
                dtype=dtype,
                bucket_bytes=BUCKET_BYTES,
                quantization=quantization,
            )
            publisher.open()
            publishers.append(publisher)
    return World(directory, target, publishers)


@pytest.mark.parametrize(("name", "training", "rollout"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_rollout_rank_is_sent_what_it_stores(
    tmp_path: Path, name: str, training: str, rollout: str, dtype: torch.dtype
) -> None:
    made = world(tmp_path, name, training, rollout, dtype)
    published = [publisher.publish(3) for publisher in made.publishers]
    for target in range(made.rollout.layout.world_size):
        received, expected = made.received(target), made.by_hand(target)
        assert received.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(received[key], tensor.to(dtype)), key
    stored = made.rollout.bytes_stored(dtype.itemsize).sum()
    assert sum(one.num_bytes for one in published) == stored
    for rank, one in enumerate(published):
        assert (one.version, one.bytes_over_bound) == (3, 1.0)
        assert one.gb_per_s > 0 and one.pack_s + one.wait_s <= one.seconds
        assert made.end(rank).longest <= made.publishers[rank].message_bytes == BUCKET_BYTES // 8
        assert made.end(rank).said == ["open", "update 3", "flush", "applied", "release"]


def test_what_is_sent_is_what_the_weights_are_at_that_moment(tmp_path: Path) -> None:
    """Not what they were when the plan was made; and dead padding of the vocabulary is not sent."""
    made = world(tmp_path, "llama", "tp=2", "tp=1")
    for publisher in made.publishers:
        for tensor in publisher.tensors.values():
            tensor.mul_(2)
        publisher.publish(1)
    expected = made.by_hand(0)
    assert all(torch.equal(tensor, 2 * expected[key]) for key, tensor in made.received(0).items())


@pytest.mark.parametrize(("name", "training", "rollout"), CASES)
def test_fingerprints_add_up_to_those_of_what_is_stored(tmp_path: Path, name: str, training: str, rollout: str) -> None:
    made = world(tmp_path, name, training, rollout, torch.bfloat16)
    parts = [publisher.fingerprints() for publisher in made.publishers]
    assert expected_weights(made.publishers[0], 2).values.keys() >= set().union(*parts)
    for target in range(made.rollout.layout.world_size):
        for key, tensor in made.by_hand(target).items():
            stored = tensor.to(torch.bfloat16)
            slots = {-1: stored} if "routed_experts" not in key else dict(enumerate(stored))
            for slot, values in slots.items():
                sums = sum(part.get((target, key, slot), 0) for part in parts)
                assert added(sums) == fingerprint(values, (0,) * values.dim()), (key, slot)


@pytest.mark.parametrize("scheme", [each for each in Quantization if each is not Quantization.none], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_fingerprints_are_of_the_bytes_and_scales_that_ranks_have_quantised(
    tmp_path: Path, name: str, scheme: Quantization
) -> None:
    made = world(tmp_path, name, "tp=1", "tp=2", torch.bfloat16, world_size=1, quantization=scheme)
    prints = expected_weights(made.publishers[0], 2).values
    assert prints.keys() == made.publishers[0].fingerprints().keys()
    held = [made.by_hand(target) for target in range(2)]
    stored = [tensor for tensor in made.rollout.tensors(0) if is_quantised(tensor.rule)]
    assert len(stored) == 4 * made.rollout.model.num_layers
    for tensor in stored:
        for slot, rank in product([*range(len(tensor.experts))] or [-1], range(2)):
            shard = held[rank][tensor.name].bfloat16()
            its_bytes, its_scales = quantise(shard if slot < 0 else shard[slot], scheme)
            assert prints[rank, tensor.name, slot] == fingerprint(its_bytes.view(torch.uint8), (0, 0))
            assert prints[rank, tensor.name + SCALES, slot] == fingerprint(its_scales, (0, 0))


def test_a_failure_is_told_and_the_channel_is_closed(tmp_path: Path) -> None:
    made = world(tmp_path, "llama", "tp=2", "tp=1")
    publisher, end = made.publishers[1], made.end(1)
    end.is_full = True
    with pytest.raises(SyncError, match=r"^told: publishing version 6: no room$"):
        publisher.publish(6)
    assert end.said == ["open", "update 6", "close"]
    with pytest.raises(AssertionError, match="open the channel first"):
        publisher.publish(7)
    publisher.open(attempt=2)
    assert made.end(1).address.name == "x/2", "a place that no attempt before has written to"


def test_an_address_that_was_not_made_from_the_layouts_is_refused(tmp_path: Path) -> None:
    made = world(tmp_path, "llama", "tp=2", "tp=1")
    publisher = made.publishers[0]
    publisher.transport = Recorder(Address(store=NOWHERE, name="x", num_trainers=2, num_rollout=3))
    with pytest.raises(SyncError, match=r"for 2 training and 3 rollout ranks, the plan for 2 and 1\. Make the Address"):
        publisher.opening()


@pytest.mark.parametrize(("tp", "share"), [(1, 8), (2, 8), (4, 16)])
def test_messages_leave_room_for_what_a_worker_has_in_hand(tp: int, share: int) -> None:
    """Two messages, mapped, and of up to tp ranks what their parts of one tensor write: two buckets in all."""
    table = Table(FAMILIES["llama"], checkpoints.MODELS["llama"], parse_layout(f"tp={tp}"))
    assert message_bytes(table, 1 << 20, None) == (1 << 20) // share
    assert message_bytes(table, 1 << 20, Sites((0,), (0,), (0,))) == (1 << 20) // 2, "one packed, two received"
