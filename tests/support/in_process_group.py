"""A worker group whose ranks are in this process: what they are handed is pickled and taken apart as a worker would."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mcore_rl.algorithms.token_advantages import compute_advantages
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.shard import Kept, Portion, Shard, Taken
from mcore_rl.runtime.shared_batch import Taking


class InProcessGroup:
    """Of ``dp`` ranks.  methods: by name, what a rank answers to (rank, taken, *arguments).  told: of ``all``."""

    def __init__(self, dp: int, **methods: Callable[..., Any]) -> None:
        self.layout = Layout.of(parse_layout(""), dp)
        self.told: list[str] = []
        self.neighbours = [list(range(dp))[start : start + 2] for start in range(0, dp, 2)]
        self.methods = {"compute_advantages": lambda _, *args: advantages_as_worker(*args)} | methods

    async def all(self, method: str) -> None:
        self.told.append(method)

    def put(self, shards: Sequence[Shard]) -> list[bytes]:
        return [pickle.dumps(shard, protocol=5) for shard in shards]

    async def map(self, method: str, takings: Sequence[Taking], *args: Any) -> tuple[list[Any], list[Any]]:
        assert len(takings) == self.layout.dp
        values, kept = [], []
        for rank, (message, places) in enumerate(takings):
            portion: Portion = pickle.loads(message)
            taken = Taken(portion.batches([pickle.loads(place) for place in places]), portion.told)
            found = self.methods[method](rank, taken, *args)
            value, shard = (found.value, found.shard) if isinstance(found, Kept) else (found, None)
            values.append(pickle.loads(pickle.dumps(value)))
            kept.append(pickle.dumps(shard, protocol=5))
        return values, kept


def advantages_as_worker(taken: Taken, *args: Any) -> Kept:
    """``TrainWorker.compute_advantages`` of a leader."""
    (batch,) = taken.batches
    of_tokens, stats = compute_advantages(batch, taken.told, *args)
    made = Shard.of(batch.lengths_S, **vars(of_tokens))
    return Kept((stats, tuple(made.fields)), made)
