"""One member's way through the rounds of an update: what it packs, sends, receives and passes on.

The same code runs in training ranks and, where rollout ranks have devices of their own, in vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.sync.exchange import Exchange, Transfer
from mcore_rl.sync.transport import Parameters
from mcore_rl.weights.rounds import Block, Round, aligned
from mcore_rl.weights.sites import DIRECT


class RoundTrip:
    """Takes ``member`` through the rounds of one update; what it sends is packed into a buffer that goes with it.

    parameters: None for a rollout rank, which sends only what it received.
    """

    def __init__(self, exchange: Exchange, member: int, parameters: Parameters | None) -> None:
        self._exchange, self._member, self._parameters = exchange, member, parameters
        self._packed = self._empty()

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._exchange.device)

    def messages(
        self, rounds: Sequence[Round], space: Callable[[int, int], Tensor], *, ahead: bool
    ) -> Iterator[dict[int, Tensor]]:
        """Yields the messages of each round, by rollout rank, uint8, when they are whole.

        space: gives the memory for a message (rollout rank, bytes), which may be used again two rounds later.
        ahead: the first leg of the next round is under way meanwhile.
        """
        whole: dict[int, Tensor] | None = None
        for each in rounds:
            messages = {rank: space(rank, num_bytes) for rank, num_bytes in each.lands.items()}
            works = self._leg(each.legs[0], messages)
            if whole is not None:
                yield whole
            self._exchange.wait(works)
            self._exchange.wait(self._leg(each.legs[1], messages))
            whole = messages
            if not ahead:
                yield whole
                whole = None
        if whole is not None:
            yield whole

    @torch.no_grad()
    def _leg(self, blocks: Sequence[Block], messages: dict[int, Tensor]) -> list[tuple[int, Any]]:
        """Copies what stays here, packs what is sent, and begins all transfers of a leg."""
        sends, receives, used = list[Transfer](), list[Transfer](), 0
        leaving = [block for block in blocks if block.sender == self._member != block.receiver]
        self._make_room(sum(aligned(block.num_bytes) for block in leaving))
        for block in blocks:
            if block.receiver == self._member:
                place = messages[block.rollout_rank][block.begin : block.begin + block.num_bytes]
                if block.sender == self._member:
                    self._pack(block, messages, place)
                else:
                    receives.append(Transfer(block.sender, place))
                continue
            data = self._whole(block, messages)
            if data is None:
                data = self._packed[used : used + block.num_bytes]
                used += aligned(block.num_bytes)
                self._pack(block, messages, data)
            sends.append(Transfer(block.receiver, data))
        return self._exchange.start(sends, receives)

    def _make_room(self, num_bytes: int) -> None:
        if len(self._packed) < num_bytes:
            self._packed = self._empty()  # first, so that both are never there at once
            self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._exchange.device)

    def _whole(self, block: Block, messages: dict[int, Tensor]) -> Tensor | None:
        """The bytes of ``block`` where they lie, if they lie there as they are sent; else None."""
        if block.relay != DIRECT:
            shifts = {at - part.begin for at, part in zip(block.copied_from, block.parts, strict=True)}
            if len(shifts) > 1:
                return None
            (begin,) = shifts
            held = messages[block.relay]
            return held[begin : begin + block.num_bytes]
        if len(block.parts) > 1:
            return None
        assert self._parameters is not None, "a rollout rank has no parameters to send"
        (part,) = block.parts
        live = self._parameters.live(part)
        if live.is_contiguous() and live.dtype == self._parameters.dtype_of(part):
            return live.view(-1).view(torch.uint8)
        return None

    def _pack(self, block: Block, messages: dict[int, Tensor], into: Tensor) -> None:
        for number, part in enumerate(block.parts):
            space = into[part.begin : part.begin + part.num_bytes]
            if block.relay == DIRECT:
                assert self._parameters is not None, "a rollout rank has no parameters to send"
                space = space.view(self._parameters.dtype_of(part)).view(part.target_slice.shape)
                space.copy_(self._parameters.live(part))
            else:
                begin = block.copied_from[number]
                space.copy_(messages[block.relay][begin : begin + part.num_bytes])
