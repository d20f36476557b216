"""The training workers of a role: everything that a controller can ask of them, each as a method with types.

Every method asks all workers of the group, since what they compute is collective; a call returns when all have
answered, or raises the first cause (``worker_group.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mcore_rl.algorithms.selection import Moments
from mcore_rl.algorithms.step_numbers import StepNumbers
from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.checkpoints.state_writer import Written
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.role import Moves
from mcore_rl.config.roles import ActorConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.shard import Shard
from mcore_rl.runtime.shared_batch import ShardRef, ShardRefs
from mcore_rl.runtime.train_worker import (
    RankAdvantages,
    RoleSpec,
    SequenceAdvantages,
    SequencesInStep,
    TrainResults,
    TrainWorker,
)
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.sync.check import Expected
from mcore_rl.sync.publish import Published
from mcore_rl.sync.transport import Transport
from mcore_rl.training.offload import OffloadPart
from mcore_rl.types import Denominators, SequenceScores

if TYPE_CHECKING:
    from mcore_rl.training.engine import Loss


class TrainGroup:
    """One role's model over its layout.  Lists of results are in the order of the ranks."""

    def __init__(self, workers: WorkerGroup[TrainWorker]) -> None:
        self.workers = workers

    @property
    def role(self) -> str:
        """Its name, in directories, logs and messages."""
        return self.workers.role

    @property
    def layout(self) -> Layout:
        """Where each rank stands."""
        return self.workers.layout

    @property
    def hosts(self) -> Sequence[str]:
        """The machine of each rank."""
        return self.workers.hosts

    def title(self, rank: int) -> str:
        """What messages call a rank."""
        return self.workers.title(rank)

    @property
    def neighbours(self) -> list[list[int]]:
        """The data-parallel coordinates, those together that share a shard; see ``WorkerGroup``."""
        return self.workers.neighbours

    def put(self, shards: Sequence[Shard]) -> list[ShardRef]:
        """References to ``shards`` in Ray's store."""
        return self.workers.put(shards)

    def close(self) -> None:
        """End the processes."""
        self.workers.close()

    async def join(self, spec: RoleSpec, timeout_s: float) -> None:
        """Bring the workers into the process groups of ``spec``'s layout.  timeout_s: of a collective."""
        await self.workers.locate()
        address, port = await self.workers.one(0, TrainWorker.rendezvous)
        await self.workers.all(TrainWorker.join, address, port, spec, timeout_s)

    async def device_ids(self) -> list[list[str]]:
        """The accelerators that Ray gave to each worker."""
        return await self.workers.all(TrainWorker.device_ids)

    async def build(self) -> None:
        """Build the engines, with the weights of the role's Hugging Face checkpoint."""
        await self.workers.all(TrainWorker.build)

    async def score(
        self,
        inputs: Sequence[ShardRefs[None]],
        field: str,
        *,
        temperature: float,
        with_entropy: bool,
        snapshot: str | None,
    ) -> tuple[list[SequenceScores], list[ShardRef]]:
        """Log-probs or values of every token, which stay in the store as ``field`` of the returned shards.

        inputs: one batch for each data-parallel rank.  temperature: of the distribution that was sampled from.
        snapshot: whose weights score; None is the live ones.  Returns the sums over each sequence's trained tokens.
        """
        found, shards = await self.workers.map(TrainWorker.score, inputs, field, temperature, with_entropy, snapshot)
        return [scores for scores in found if scores is not None], shards

    async def compute_advantages(
        self, inputs: Sequence[ShardRefs[Outcomes]], algorithm: AlgorithmConfig, kl_coef: float
    ) -> tuple[list[RankAdvantages], list[ShardRef]]:
        """Each data-parallel rank's part of the advantages; what is said of tokens stays in the returned shards.

        inputs: one batch for each data-parallel rank, with the outcomes of its sequences.
        """
        found, shards = await self.workers.map(TrainWorker.compute_advantages, inputs, algorithm, kl_coef)
        return [each for each in found if each is not None], shards

    async def select_tokens(
        self,
        inputs: Sequence[ShardRefs[SequencesInStep]],
        config: ActorConfig,
        numbers: StepNumbers,
        moments: Moments,
    ) -> tuple[list[NDArray[np.float32]], list[ShardRef]]:
        """The largest keys of each data-parallel rank (``algorithms/selection.py``); all stay in the returned shards.

        inputs: one batch for each data-parallel rank.  config: names the loss.  numbers, moments: of the step.
        """
        found, shards = await self.workers.map(TrainWorker.select_tokens, inputs, config, numbers, moments)
        return [each for each in found if each is not None], shards

    async def train(
        self,
        inputs: Sequence[ShardRefs[SequenceAdvantages]],
        loss: Loss,
        denominators: Sequence[Denominators],
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        kl_to: str | None = None,
        numbers: StepNumbers = StepNumbers(),  # noqa: B008  frozen
    ) -> TrainResults:
        """One optimizer step on each minibatch, in order; then the workers rest.

        inputs: of each data-parallel rank, its part of every minibatch.  denominators: of each minibatch, over all
        ranks.  with_entropy: the loss sees entropies.  kl_to: the snapshot to which the loss sees the exact KL.
        numbers: of the whole step.
        """
        found, _ = await self.workers.map(
            TrainWorker.train, inputs, loss, denominators, temperature, with_entropy, kl_to, numbers
        )
        assert found[0] is not None, "rank 0 answers"
        return found[0]

    async def rest(self) -> None:
        """Nothing is trained before the next step: offload what the engines do not need."""
        await self.workers.all(TrainWorker.rest)

    async def take_snapshot(self, name: str, moves: Moves) -> None:
        """Keep the weights as they are in host memory, under ``name``; ``move_snapshot`` moves them as ``moves``."""
        await self.workers.all(TrainWorker.take_snapshot, name, moves)

    async def move_snapshot(self, name: str) -> None:
        """Bring the frozen weights ``name`` after the live ones: a copy of them, or an average with them."""
        await self.workers.all(TrainWorker.move_snapshot, name)

    async def offload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> None:
        """To host memory, before the devices are another's."""
        await self.workers.all(TrainWorker.offload, parts)

    async def onload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> None:
        """Back to the devices; whatever computes does so by itself."""
        await self.workers.all(TrainWorker.onload, parts)

    async def num_state_bytes(self) -> int:
        """Bytes of disk that ``save_state`` takes, over all ranks."""
        return sum(await self.workers.all(TrainWorker.num_state_bytes))

    async def save_state(self, directory: Path, *, behind: bool) -> None:
        """Write all that the ranks need to go on into the empty ``directory``; ``saved`` says what became of it.

        behind: return once it is copied to host memory, else once it is written.
        """
        await self.workers.all(TrainWorker.save_state, directory, behind)

    async def saved(self) -> list[Written | None]:
        """What became of each rank's file; None while it is being written."""
        return await self.workers.all(TrainWorker.saved)

    async def load_state(self, directory: Path) -> bool:
        """Take over what ``save_state`` wrote; False if it was in another layout, where bits may differ from now on."""
        return all(await self.workers.all(TrainWorker.load_state, directory))

    async def save_hf(self, target: Path, source: Path) -> None:
        """Write the live weights as a Hugging Face checkpoint, with the sidecar files of ``source``."""
        await self.workers.all(TrainWorker.save_hf, target, source)

    async def checksum(self) -> list[int]:
        """Of each rank's weights and optimizer: equal bits, equal sums."""
        return await self.workers.all(TrainWorker.checksum)

    async def start_profile(self) -> None:
        """Trace what the processes compute from now on."""
        await self.workers.all(TrainWorker.start_profile)

    async def stop_profile(self, directory: Path) -> None:
        """Write each rank's trace since ``start_profile``, for Perfetto or chrome://tracing."""
        await self.workers.all(TrainWorker.stop_profile, directory)

    async def connect(self, transport: Transport, layout: RolloutLayout, bucket_bytes: int) -> None:
        """Make the ranks members of the channel to the rollout ranks of ``layout``."""
        await self.workers.all(TrainWorker.connect, transport, layout, bucket_bytes)

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """``Publisher.opening``, of rank 0."""
        return await self.workers.one(0, TrainWorker.opening, first_rank, attempt)

    async def open(self, attempt: int) -> None:
        """``Publisher.open``."""
        await self.workers.all(TrainWorker.open, attempt)

    async def publish(self, version: int) -> list[Published]:
        """``Publisher.publish``: the live weights to the rollout ranks, as ``version``."""
        return await self.workers.all(TrainWorker.publish, version)

    async def expected(self, version: int) -> Expected:
        """``check.expected_weights``, on which all ranks agree."""
        return (await self.workers.all(TrainWorker.expected, version))[0]
