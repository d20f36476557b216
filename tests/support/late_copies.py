"""``Copies`` that are made at the last moment at which they must be done: a stand-in for a slow link.

Until then the target holds bytes that are NaN in every dtype, so that whoever does not wait computes with them; and a
source that is written to, or a storage that is freed too early, is seen when the copy is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

NAN_BYTE = 0xFF


@dataclass
class LateCopies:
    """forgets: ``wait`` or ``order``, which then does nothing, as if it had not been called.  log: what was called."""

    forgets: str = ""
    log: list[str] = field(default_factory=list)
    _pairs: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    _num_made: int = 0

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> LateCopied:
        """Remembers ``pairs``, and spoils the targets."""
        self._pairs.append(list(pairs))
        for target, _ in self._pairs[-1]:
            target.fill_(NAN_BYTE)
        self.log.append("start")
        return LateCopied(self, len(self._pairs))

    def make(self, up_to: int) -> None:
        """Makes the first ``up_to`` copies, in the order in which they were started."""
        for pairs in self._pairs[self._num_made : up_to]:
            for target, source in pairs:
                assert target.untyped_storage().nbytes(), "the target of a copy was freed before the copy was done"
                assert source.untyped_storage().nbytes(), "the source of a copy was freed before the copy was done"
                target.copy_(source)
        self._num_made = max(self._num_made, up_to)

    def are_made(self, up_to: int) -> bool:
        """Whether the first ``up_to`` were made."""
        return self._num_made >= up_to


@dataclass
class LateCopied:
    """The first ``number`` copies of ``copies``."""

    copies: LateCopies
    number: int

    def done(self) -> bool:
        return self.copies.are_made(self.number)

    def wait(self) -> None:
        self._ask("wait")

    def order(self) -> None:
        self._ask("order")

    def _ask(self, verb: str) -> None:
        self.copies.log.append(verb)
        if verb != self.copies.forgets:
            self.copies.make(self.number)
