"""The reshard plan in two stages and in rounds: what every member sends, receives and passes on in each round.

Stage one moves every part to the member that receives for its rollout rank (``Sites.landing``): the training rank on
the same device, or the rollout rank itself where it has a device of its own.  Stage two, on that device, hands the
round's message to the rollout rank.  All members go through the same rounds, so that each can give all transfers of a
round to the vendor's library at once, through one communicator.  A round has two legs:

first   from the training ranks that hold the parts
second  inside a node, from the member that received a part for one rollout rank to those whose ranks want it too

The rounds follow the layers, but take the first layer of every pipeline stage together, then the second of each, and
mix the tensors in them, so that in every round all ranks have something to send.  The embedding comes last.  In a round
no rollout rank gets more than ``max_bytes``, and no member sends more to others; but a round has at least one part.

Every member makes the same rounds from the same plan, without negotiation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from mcore_rl.ground.arrays import Int32Array, Int64Array
from mcore_rl.weights.messages import Message, MessagePart
from mcore_rl.weights.reshard import ReshardPlan
from mcore_rl.weights.rollout_table import itemsize_of
from mcore_rl.weights.sites import DIRECT
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows

ALIGNMENT = 16  # bytes, of each piece in a message: for any dtype, and wide copies
GOLDEN = 0.6180339887498949  # multiples of it are far from each other, modulo 1
CUTS = 4  # what a member sends of a part at once is at most max_bytes / CUTS, so that all have their share of a round


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive bytes of a rollout rank's message of a round, which one member has and another receives.

    sender, receiver: the members; the same one where it is only copied.  rollout_rank: whose message it is.
    begin: where it begins in that message; only the receiver knows, else 0.
    parts: what it consists of; their ``begin`` counts from that of the block.
    relay, copied_from: of a block that is passed on, the rollout rank whose message the sender has the parts in, and
    where in it each begins.  Else ``DIRECT``, and they are the sender's own parameters.
    """

    sender: int
    receiver: int
    rollout_rank: int
    begin: int
    num_bytes: int
    parts: tuple[MessagePart, ...]
    relay: int = DIRECT
    copied_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """What one member does in a round.

    number: of the round.  legs: the blocks that it sends, receives or copies in the first and in the second leg; both
    sides of a transfer have them in the same order.  lands: the bytes of each rollout rank's message that it receives.
    """

    number: int
    legs: tuple[list[Block], list[Block]] = field(default_factory=lambda: ([], []))
    lands: dict[int, int] = field(default_factory=dict)


class Rounds:
    """All rounds of ``plan``, whose ``Sites`` are known.

    Columns, one entry for each piece (a row of the plan, or a window of one), in the order of the rounds:
    row, window, round: int32 [pieces].  num_bytes: int64 [pieces].  sender, landing: int64 [pieces], members.
    """

    def __init__(self, plan: ReshardPlan, max_bytes: int) -> None:
        assert plan.sites is not None, "rounds are for ranks whose sites are known"
        self.plan = plan
        self.max_bytes = max_bytes
        self.sites = plan.sites
        landing = self.sites.landing[plan.target_rank]
        sender = np.where(plan.relay == DIRECT, plan.source_rank, self.sites.landing[np.maximum(plan.relay, 0)])
        fans = self._fans(sender, sender != landing)
        self._windows = [list(self._cut(number, int(fan))) for number, fan in enumerate(fans)]
        counts = np.array([len(each) for each in self._windows])[plan.geometry]
        row = np.repeat(np.arange(len(plan), dtype=np.int32), counts)
        window = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
        sizes = [[self._bytes_of(number, each) for each in windows_] for number, windows_ in enumerate(self._windows)]
        starts = np.cumsum([0, *(len(each) for each in sizes)])
        flat = np.array([size for each in sizes for size in each], dtype=np.int64)
        num_bytes = flat[starts[plan.geometry[row]] + window]

        unit = self._units(row, window, sender)
        order = np.argsort(unit, kind="stable")
        self.row = row[order]
        self.window = window[order]
        self.num_bytes = num_bytes[order]
        self.landing = landing[self.row]
        self.sender = sender[self.row]
        self.round = self._rounds(np.flatnonzero(np.diff(unit[order], prepend=-1, append=-1)))

    def __len__(self) -> int:
        return int(self.round[-1]) + 1 if len(self.round) else 0

    def _itemsize(self, geometry: int) -> int:
        return itemsize_of(self.plan.rollout.rules[self.plan.geometries[geometry].target_rule], self.plan.itemsize)

    def _bytes_of(self, geometry: int, window: list[tuple[TensorSlice, TensorSlice]]) -> int:
        return sum(target.num_elements for _, target in window) * self._itemsize(geometry)

    def _fans(self, sender: Int64Array, away: NDArray[np.bool_]) -> Int64Array:
        """To how many others a member sends a tensor: the most for each geometry, int64 [geometries], at least 1."""
        plan = self.plan
        keys, place = np.unique(sender[away] * len(plan.source_ids) + plan.source[away], return_inverse=True)
        fans = np.ones(len(plan.geometries), dtype=np.int64)
        if len(keys):
            np.maximum.at(fans, plan.geometry[away], np.bincount(place)[place])
        by_source = np.array([[g.source_rule, g.source_shard] for g in plan.geometries])
        same = np.unique(by_source, axis=0, return_inverse=True)[1].reshape(-1)
        most = np.ones(same.max(initial=0) + 1, dtype=np.int64)
        np.maximum.at(most, same, fans)
        return most[same]  # one for all geometries of a source: equal contents are cut alike

    def _cut(self, number: int, fan: int) -> Iterator[list[tuple[TensorSlice, TensorSlice]]]:
        """The windows of a geometry: lists of (region of the source, region of the target), each list small enough."""
        most = max(1, self.max_bytes // (CUTS * fan) // self._itemsize(number))
        window: list[tuple[TensorSlice, TensorSlice]] = []
        held = 0
        for source, target in self.plan.geometries[number].parts:
            for region in windows(target, row_major_strides(target.shape), most):
                if held and held + region.num_elements > most:
                    yield window
                    window = []
                    held = 0
                window.append((region.moved(target.start, source.start), region))
                held += region.num_elements
        yield window

    def _units(self, row: Int32Array, window: Int32Array, sender: Int64Array) -> Int64Array:
        """A number for each piece, in the order of the rounds; the pieces of a window of a source share it.

        So they are in one round, whoever wants them, and what is passed on is there.  sender: of each row.
        """
        plan, stage_of, turn_of = self.plan, *self._turns()
        places = plan.target_ids.places(plan.target)
        rule, _, expert = plan.source_ids.decode(plan.source)
        keys = (window, expert[row], rule[row], stage_of[places][row], turn_of[places][row])
        order = np.lexsort(keys)
        first = np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0)
        unit = np.empty(len(row), dtype=np.int64)
        unit[order] = np.cumsum(first) - 1
        firsts = order[first]  # a piece of each unit
        turn = turn_of[places][row[firsts]]
        by = sender[row[firsts]]
        spread = np.empty(len(firsts), dtype=np.int64)
        spread[np.lexsort((_spread(turn * (1 + by.max(initial=0)) + by), turn))] = np.arange(len(firsts))
        return spread[unit]

    def _turns(self) -> tuple[Int64Array, Int64Array]:
        """(stage, turn) of each place of the model: int64 [layers + 2]; index -1 is before the layers."""
        placement = self.plan.table.placement
        pp = self.plan.table.layout.pp
        by_stage = [[layer for layers in placement[stage::pp] for layer in layers] for stage in range(pp)]
        last = max(map(len, by_stage))
        turn = np.full(self.plan.table.model.num_layers + 2, last)
        stage_of = np.zeros_like(turn)
        for stage, layers in enumerate(by_stage):
            turn[layers] = np.arange(len(layers))
            stage_of[layers] = stage
        turn[-1] = last + 1
        return stage_of, turn

    def _rounds(self, bounds: Int64Array) -> Int32Array:
        """The round of each piece.  bounds: where units begin, which are not split, and the end."""
        rank = self.plan.target_rank[self.row]
        away = self.sender != self.landing
        room = self.num_bytes + ALIGNMENT

        def fits(begin: int, end: int) -> bool:
            span = slice(bounds[begin], bounds[end])
            coming = np.bincount(rank[span], weights=room[span])
            going = np.bincount(self.sender[span][away[span]], weights=room[span][away[span]])
            return bool(max(coming.max(initial=0), going.max(initial=0)) <= self.max_bytes)

        rounds = np.empty(len(self.row), dtype=np.int32)
        last = len(bounds) - 1
        begin = 0
        number = 0
        step = 1
        while begin < last:
            end = begin + 1  # at least one unit
            while end + step <= last and fits(begin, end + step):
                end = end + step
                step = 2 * step
            beyond = min(end + step, last + 1)
            while beyond - end > 1:
                middle = (end + beyond) // 2
                end, beyond = (middle, beyond) if fits(begin, middle) else (end, middle)
            rounds[bounds[begin] : bounds[end]] = number
            begin, number, step = end, number + 1, max(1, (end - begin) // 2)
        return rounds

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that go from one node to another, in all."""
        return int(self.num_bytes[self.sites.nodes[self.landing] != self.sites.nodes[self.sender]].sum())

    def messages_to(self, rollout_rank: int) -> list[Message]:
        """The messages of ``rollout_rank``, one for each round that has parts for it; from who receives for it."""
        landing = int(self.sites.landing[rollout_rank])
        messages = []
        groups = self._groups(self.plan.target_rank[self.row] == rollout_rank)
        for _, together in groupby(groups, lambda group: group.number):
            parts = list[MessagePart]()
            used = 0
            for group in together:
                begin = aligned(used)
                parts += [replace(part, begin=begin + part.begin) for part in group.block.parts]
                used = begin + group.block.num_bytes
            messages.append(Message(landing, rollout_rank, tuple(parts), used))
        return messages

    def of(self, member: int) -> list[Round]:
        """What ``member`` does, in the order of the rounds; rounds in which it does nothing are left out."""
        rounds = dict[int, Round]()
        held = dict[tuple[int, int], dict[tuple[int, ...], int]]()  # (round, rollout rank) -> places in its message
        for group in self._groups((self.sender == member) | (self.landing == member)):
            here = rounds.setdefault(group.number, Round(group.number))
            block = group.block
            begin = 0
            if block.receiver == member:
                begin = aligned(here.lands.get(block.rollout_rank, 0))
                here.lands[block.rollout_rank] = begin + block.num_bytes
                places = held.setdefault((group.number, block.rollout_rank), {})
                places.update({key: begin + at for key, at in zip(group.keys, group.begins, strict=True)})
            copied_from: tuple[int, ...] = ()
            if block.relay != DIRECT and block.sender == member:
                copied_from = group.places_in(held[group.number, block.relay])
            here.legs[block.relay != DIRECT].append(replace(block, begin=begin, copied_from=copied_from))
        return [rounds[number] for number in sorted(rounds)]

    def _groups(self, mask: NDArray[np.bool_]) -> Iterator[_Group]:
        """The pieces of ``mask`` by what becomes a block, in an order that all members share.

        First legs come before second ones, so that what is passed on was received by then.
        """
        pieces = np.flatnonzero(mask)
        relay = self.plan.relay[self.row[pieces]]
        target = self.plan.target_rank[self.row[pieces]]
        columns = (self.round[pieces], relay != DIRECT, target, relay, self.sender[pieces])
        order = np.lexsort((pieces, *reversed(columns)))
        pieces = pieces[order]
        columns = tuple(column[order] for column in columns)
        new = np.any([np.diff(column, prepend=-2) != 0 for column in columns], axis=0)
        bounds = [*np.flatnonzero(new), len(pieces)]
        for begin, end in pairwise(bounds):
            yield self._group(pieces[begin:end], *(int(column[begin]) for column in columns))

    def _group(self, pieces: Int64Array, number: int, _: int, target: int, relay: int, sender: int) -> _Group:
        plan = self.plan
        rows = self.row[pieces]
        parts = list[MessagePart]()
        begins = list[int]()
        used = 0
        for row, window, names in zip(rows.tolist(), self.window[pieces].tolist(), plan.names(rows), strict=True):
            begins.append(aligned(used))
            used = begins[-1]
            geometry = int(plan.geometry[row])
            itemsize = self._itemsize(geometry)
            dtype = plan.rollout.rules[plan.geometries[geometry].target_rule].dtype
            for source_slice, target_slice in self._windows[geometry][window]:
                size = target_slice.num_elements * itemsize
                part = MessagePart(
                    names.chunk, names.source, source_slice, names.target, names.slot, target_slice, used, size, dtype
                )
                parts.append(part)
                used += size
        keys = np.stack([plan.source[rows], plan.contents[plan.geometry[rows]], self.window[pieces]], axis=1).tolist()
        block = Block(sender, int(self.sites.landing[target]), target, 0, used, tuple(parts), relay)
        return _Group(number, block, begins, [tuple(key) for key in keys])


@dataclass(frozen=True)
class _Group:
    """A ``block`` of round ``number``, before it is known where in its message it begins.

    begins, keys: of each piece, where it begins in the block, and what it is, whoever wants it.
    """

    number: int
    block: Block
    begins: list[int]
    keys: list[tuple[int, ...]]

    def places_in(self, places: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
        """Where each part begins in a message with its pieces at ``places``."""
        shifts = [places[key] - begin for key, begin in zip(self.keys, self.begins, strict=True)]
        piece = [bisect_right(self.begins, part.begin) - 1 for part in self.block.parts]
        return tuple(shifts[index] + part.begin for index, part in zip(piece, self.block.parts, strict=True))


def rounds_id(rounds: Rounds) -> str:
    """A hash of all that decides the rounds: two processes with equal hashes do the same."""
    digest = hashlib.sha256(
        repr((rounds.plan.itemsize, rounds.max_bytes, rounds.sites, rounds.plan.geometries)).encode()
    )
    for column in (rounds.row, rounds.window, rounds.round, rounds.sender, rounds.landing):
        digest.update(column.tobytes())
    return digest.hexdigest()


def _spread(groups: Int64Array) -> NDArray[np.float64]:
    """A number in [0, 1) for each entry, such that those of each group are evenly spread, and no two groups alike."""
    order = np.argsort(groups, kind="stable")
    numbers, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    index = np.arange(len(groups)) - np.repeat(starts, counts)
    phases = np.modf(np.arange(len(numbers)) * GOLDEN)[0]
    out = np.empty(len(groups))
    out[order] = (index + np.repeat(phases, counts)) / np.repeat(counts, counts)
    return out


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to where the next piece of a message may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
