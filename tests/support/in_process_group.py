"""Training workers in this process: what they are handed is pickled and taken apart as a worker would."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mcore_rl.algorithms.process_rewards import ProcessStats, process_stats
from mcore_rl.algorithms.token_advantages import compute_advantages
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.shared_batch import ShardRefs
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.worker_values import RankAdvantages


class InProcessGroup(TrainGroup):
    """Of ``dp`` ranks.  methods: by name, what a rank answers to (rank, input, *arguments).  told: of ``all``."""

    def __init__(self, dp: int, **methods: Callable[..., Any]) -> None:
        computed = {"compute_advantages": lambda _, *args: advantages_of(*args), "process_stats": stats_of}
        self.ranks = InProcessWorkers(dp, computed | methods)
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


def stats_of(_: int, given: WorkerInput[None]) -> WorkerOutput[ProcessStats]:
    """``TrainWorker.process_stats`` of a leader."""
    return WorkerOutput(process_stats(*given.batches))


def advantages_of(given: WorkerInput[Any], *args: Any) -> WorkerOutput[RankAdvantages]:
    """``TrainWorker.compute_advantages`` of a leader."""
    (batch,) = given.batches
    of_tokens, stats = compute_advantages(batch, given.payload, *args)
    made = Shard.of(batch.lengths_S, **vars(of_tokens))
    return WorkerOutput(RankAdvantages(stats, tuple(made.fields)), made)
