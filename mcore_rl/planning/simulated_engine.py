"""An engine of a simulation: continuous batching as vLLM does it, in whole decode steps.

A step gives every running sequence one token and costs what ``EngineCosts`` says.  Between two events (a sequence ends,
the cache is full, the engine is asked for something) the cost of step ``j`` is known in closed form, so that the
simulation computes many steps at once, exactly.  What happens within a step takes effect at its end.

Where the cache is full, the sequence that began last gives its blocks up and waits at the front of the queue.  They can
still be read until others take them (vLLM 0.32, v1/core/kv_cache_manager.py), so that only as much is computed again as
was taken meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil, inf


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """The seconds of an engine's steps, and what its cache holds.

    A decode step of ``r`` sequences whose cache holds ``h`` tokens takes
    ``fixed_s[r] + max(stream_s[r] + token_s * h, product_s * r)``: scheduling and small collectives; weights and cache
    read from memory; or matrix products, where they take longer.

    fixed_s, stream_s: by the number of running sequences, from 0 to the most that run together.
    prefill_s: of a prompt's token.  capacity: tokens of the cache.  slot: tokens of cache that a sequence takes besides
    its own, for a state of constant size.
    """

    fixed_s: tuple[float, ...]
    stream_s: tuple[float, ...]
    token_s: float
    product_s: float
    prefill_s: float
    capacity: float = inf
    slot: float = 0.0

    @property
    def most(self) -> int:
        """How many sequences run together at most."""
        return len(self.stream_s) - 1

    def decode_s(self, running: int, held: float, steps: int) -> float:
        """Seconds of ``steps`` steps of ``running`` sequences, which hold ``held`` tokens at the first."""
        product = self.product_s * running
        stream = self.stream_s[running]
        growth = self.token_s * running
        reading = stream + self.token_s * held
        bound = 0  # the first steps, in which products take longer
        if product > reading:
            bound = steps if growth == 0 else min(steps, ceil((product - reading) / growth))
        rest = steps - bound
        read = rest * reading + growth * (bound * rest + rest * (rest - 1) / 2)
        return steps * self.fixed_s[running] + bound * product + read


@dataclass(slots=True, kw_only=True)
class Response:
    """A response under way.

    group: to which it belongs.  length: in all.  prompt: tokens of its prompt.  prefilled: of the prompt, read already
    for another response of the group.  made: tokens when it last began to run.  begun: the engine's step at that time.
    left: tokens that the engine's cache had taken in all when it gave up its blocks; None: it never did.
    """

    group: int
    length: int
    prompt: int
    prefilled: bool = False
    made: int = 0
    begun: int = 0
    left: float | None = None


class SimulatedEngine:
    """One engine.  clock: the end of its last step.  busy_s: seconds in which it computed."""

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.clock = self.busy_s = 0.0
        self.num_preemptions = self.outstanding = 0
        self.waiting: deque[Response] = deque()
        self._running: dict[int, Response] = {}  # in the order in which they began
        self._ends: list[tuple[int, int]] = []  # (step at whose end it is whole, number), a heap
        self._numbers = count()
        self._step = 0
        self._held = self._taken = 0.0  # tokens in the cache, and tokens that ever came into it
        self._segment: tuple[int, float] | None = None  # (steps to the next event, its time)

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._running and not self.waiting

    def submit(self, sequence: Response) -> None:
        """Queue ``sequence``; ``resume`` lets it run."""
        self.outstanding += 1
        self.waiting.append(sequence)

    def advance(self, time: float) -> list[Response]:
        """Compute to the end of the first step at or after ``time``; returns the sequences that became whole."""
        if self._segment is not None and self.clock < time:
            steps, end = self._segment
            if time < end:
                steps = self._steps_until(time, steps)
                end = self.clock + self.costs.decode_s(len(self._running), self._held, steps)
            self.busy_s += end - self.clock
            self.clock = end
            self._step += steps
            self._hold(steps * len(self._running))
        self._segment = None
        self.clock = max(self.clock, time)
        return list(self._take_whole())

    def recompute(self, time: float) -> None:
        """Read every running sequence again, as after a change of the weights; from ``time``."""
        self.clock = max(self.clock, time)
        self._taken += self.costs.capacity  # nothing of before can be read
        self._spend(self.costs.prefill_s * (self._held - self.costs.slot * len(self._running)))

    def resume(self) -> tuple[list[Response], float | None]:
        """Go on: waiting sequences that fit begin to run.

        Returns (those that begin now, the time of the next event; None if nothing runs).
        """
        begun = list(self._admit())
        while self._running and self._room() < 1:
            self._preempt()
        self._segment = None
        if not self._running:
            return begun, None
        steps = max(1, min(self._ends[0][0] - self._step, self._room()))
        end = self.clock + self.costs.decode_s(len(self._running), self._held, steps)
        self._segment = steps, end
        return begun, end

    def _steps_until(self, time: float, most: int) -> int:
        """The fewest steps, at most ``most``, after which it is ``time`` or later."""
        low = 0
        high = most
        while high - low > 1:
            middle = (low + high) // 2
            reached = self.clock + self.costs.decode_s(len(self._running), self._held, middle) >= time
            low, high = (low, middle) if reached else (middle, high)
        return high

    def _take_whole(self) -> Iterator[Response]:
        while self._ends and self._ends[0][0] <= self._step:
            _, number = heapq.heappop(self._ends)
            if number in self._running:
                sequence = self._running.pop(number)
                self._held -= self._tokens(sequence) + sequence.length
                self.outstanding -= 1
                yield sequence
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Ends of sequences that no longer run leave the top of the heap."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)

    def _tokens(self, sequence: Response) -> float:
        """What its cache holds beside the response."""
        return self.costs.slot + sequence.prompt

    def _room(self) -> int:
        """Steps that the cache has room for; as many as one likes where a sequence runs alone."""
        running = len(self._running)
        return (
            2**62 if running <= 1 or self.costs.capacity == inf else int((self.costs.capacity - self._held) / running)
        )

    def _admit(self) -> Iterator[Response]:
        while self.waiting and len(self._running) < self.costs.most:
            sequence = self.waiting[0]
            needed = self._tokens(sequence) + sequence.made
            # Room for a token of each besides, so that none has to leave at once.
            if self._running and self._held + needed + len(self._running) + 1 > self.costs.capacity:
                break
            self.waiting.popleft()
            sequence.begun = self._step
            number = next(self._numbers)
            self._running[number] = sequence
            heapq.heappush(self._ends, (self._step + sequence.length - sequence.made, number))
            read: float = sequence.made + sequence.prompt * (not sequence.prefilled)
            if sequence.left is not None:
                read = min(read, self._taken - sequence.left)
            self._hold(needed)
            self._spend(self.costs.prefill_s * read)
            yield sequence

    def _preempt(self) -> None:
        """The sequence that began last gives up its cache and waits at the front, to be read again."""
        _, sequence = self._running.popitem()
        sequence.made += self._step - sequence.begun
        sequence.prefilled = False
        sequence.left = self._taken
        self._held -= self._tokens(sequence) + sequence.made
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        self._drop_stale()

    def _hold(self, tokens: float) -> None:
        self._held += tokens
        self._taken += tokens

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy_s += seconds
