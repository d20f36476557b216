"""Training workers in this process: what they are handed is pickled and taken apart as a worker would."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.shared_batch import ShardRefs
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import TrainWorker

LEADER: Any = SimpleNamespace(_leads=True)


class InProcessGroup(TrainGroup):
    """Of ``dp`` ranks.  methods: by name, what a rank answers to (rank, input, *arguments).  told: of ``all``."""

    def __init__(self, dp: int, **methods: Callable[..., Any]) -> None:
        self.ranks = InProcessWorkers(dp, {"on_ranks": on_rank} | methods)
        super().__init__(self.ranks)  # type: ignore[arg-type]

    @property
    def told(self) -> list[str]:
        return self.ranks.told


class InProcessWorkers:
    """A ``WorkerGroup`` whose workers are in this process."""

    def __init__(self, dp: int, methods: dict[str, Callable[..., Any]]) -> None:
        self.layout = Layout.of(parse_layout(""), dp)
        self.told: list[str] = []
        self.neighbours = [list(range(dp))[start : start + 2] for start in range(0, dp, 2)]
        self.methods = methods

    async def all(self, method: Callable[..., Any], *args: Any) -> None:
        self.told.append(method.__name__)

    def put(self, shards: Sequence[Shard]) -> list[bytes]:
        return [pickle.dumps(shard, protocol=5) for shard in shards]

    async def map(
        self, method: Callable[..., Any], inputs: Sequence[ShardRefs[Any]], *args: Any
    ) -> tuple[list[Any], list[bytes]]:
        assert len(inputs) == self.layout.dp
        values, shards = [], []
        for rank, refs in enumerate(inputs):
            portion: Portion[Any] = pickle.loads(refs.portion)
            given = WorkerInput(portion.join([pickle.loads(shard) for shard in refs.shards]), portion.payload)  # type: ignore[arg-type]
            output = self.methods[method.__name__](rank, given, *args)
            assert isinstance(output, WorkerOutput)
            values.append(pickle.loads(pickle.dumps(output.value)))
            shards.append(pickle.dumps(output.shard, protocol=5))
        return values, shards


def on_rank(_: int, *given: Any) -> WorkerOutput[Any]:
    """``TrainWorker.on_ranks`` of a leader."""
    return TrainWorker.on_ranks(LEADER, *given)
