"""Training workers in this process: what they are handed is pickled and taken apart as a worker would."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.shared_batch import ShardRefs
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.watchdog import Watchdog

LEADER: Any = SimpleNamespace(_leads=True)
NEVER = Watchdog(WatchdogConfig())


class InProcessGroup(TrainGroup):
    """Of ``dp`` ranks.  methods: by name, what a rank answers to (rank, input, *arguments).  told: of ``all``."""

    def __init__(self, dp: int, **methods: Callable[..., Any]) -> None:
        ranks = ["here"] * dp
        super().__init__("role", ranks, Layout.of(parse_layout(""), dp), ranks, [Path(os.devnull)] * dp, NEVER)
        self.told: list[str] = []
        self.methods = {"on_ranks": on_rank} | methods

    @property
    def neighbours(self) -> list[list[int]]:
        coordinates = list(range(self.layout.dp))
        return [coordinates[start : start + 2] for start in range(0, len(coordinates), 2)]

    async def all(self, method: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self.told.append(method.__name__)

    def put(self, shards: Sequence[Shard]) -> Any:
        return [pickle.dumps(shard, protocol=5) for shard in shards]

    async def map(
        self, method: Callable[..., Any], inputs: Sequence[ShardRefs[Any]], *args: Any, **_: Any
    ) -> tuple[list[Any], Any]:
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
