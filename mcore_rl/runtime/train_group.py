"""The interface of a role's training workers to the controller: a typed method for each call.

Every method calls all workers of the group, since they compute collectively.  It returns when all have answered, or
raises the first cause (``worker_group.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.algorithms.step_numbers import StepNumbers
from mcore_rl.checkpoints.state_writer import Written
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.role import Moves
from mcore_rl.config.rollout import Quantization, RolloutLayout
from mcore_rl.ground.types import Denominators, SequenceScores
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.proofs.effective_config import EffectiveConfig, joined
from mcore_rl.runtime.shared_batch import ShardRef, ShardRefs
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.runtime.worker_values import RoleSpec, SequenceAdvantages, TrainResults
from mcore_rl.sync.check import Expected
from mcore_rl.sync.publish import Published
from mcore_rl.sync.transport import Transport
from mcore_rl.training.offload import OffloadPart

if TYPE_CHECKING:
    from mcore_rl.training.engine import Loss


class TrainGroup(WorkerGroup[TrainWorker]):
    """The workers that hold one role's model, over its layout.  Lists of results are in the order of the ranks."""

    async def join(self, store: StoreAccess, spec: RoleSpec, timeout_s: float) -> None:
        """Joins the workers in the process groups of ``spec``'s layout.

        store: of the run.  timeout_s: limit of a collective.
        """
        await self.locate()
        await self.all(TrainWorker.join, store, spec, timeout_s)

    async def device_ids(self) -> list[list[str]]:
        """The accelerators that Ray gave to each worker."""
        return await self.all(TrainWorker.device_ids)

    async def build(self) -> None:
        """Builds the engines, with the weights of the role's Hugging Face checkpoint."""
        await self.all(TrainWorker.build)

    async def shares_prompts(self) -> bool:
        """Whether the engines compute a prompt once for all of its samples."""
        return await self.one(0, TrainWorker.shares_prompts)

    async def score(
        self,
        inputs: Sequence[ShardRefs[Sequence[int] | None]],
        makes: Sequence[str],
        *,
        temperature: float,
        snapshots: Sequence[str | None],
    ) -> tuple[list[SequenceScores], list[ShardRef]]:
        """Computes the log-probs or values of every token, or the last hidden states of the trained tokens.

        inputs: for each data-parallel rank, a batch for each of ``snapshots``: the names of frozen weights to score it
        with; None is the live weights.  Their payload: see ``TrainWorker.score``.  makes: as in ``config.stages.Pass``.
        temperature: of the log-probs.
        Returns (sums over each sequence's trained tokens, if there is one batch of log-probs or values; references to
        shards, in the store, that hold the fields).
        """
        sums, shards = await self.map(TrainWorker.score, inputs, makes, temperature, snapshots)
        return [each for each in sums if each is not None], shards

    async def on_ranks(
        self, inputs: Sequence[ShardRefs[Any]], function: Callable[..., Mapping[str, Any]], *arguments: Any
    ) -> tuple[list[dict[str, Any]], list[ShardRef]]:
        """Calls ``function(batch, payload, *arguments)`` on each data-parallel rank, with its batch and payload.

        Returns (what it makes beside fields, of each rank; references to shards, in the store, that hold the fields).
        """
        made, shards = await self.map(TrainWorker.on_ranks, inputs, function, *arguments)
        return [each for each in made if each is not None], shards

    async def train(
        self,
        inputs: Sequence[ShardRefs[SequenceAdvantages]],
        loss: Loss,
        denominators: Sequence[Denominators],
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        kl_to: str | None = None,
        distill: DistillConfig | None = None,
        with_scores: bool = False,
        numbers: StepNumbers = StepNumbers(),  # noqa: B008  frozen
    ) -> TrainResults:
        """Takes one optimizer step on each minibatch, in order; then the workers ``rest``.

        inputs: for each data-parallel rank, its part of every minibatch.  denominators: one per minibatch, over all
        ranks.  with_entropy: the loss receives entropies.  kl_to: the loss receives the exact KL to this snapshot.
        distill: the loss receives this divergence from the teacher.
        with_scores: each rank also returns the ``OwnScores`` of its first minibatch.  numbers: of the whole step.
        """
        results, _ = await self.map(
            TrainWorker.train,
            inputs,
            loss,
            denominators,
            temperature,
            with_entropy,
            kl_to,
            distill,
            with_scores,
            numbers,
        )
        assert results[0] is not None, "rank 0 answers"
        scores = [own for of_rank in results if of_rank is not None for own in of_rank.scores]
        return replace(results[0], scores=scores)

    async def rest(self) -> None:
        """Tells the workers that training is over until the next step: on a shared device, they offload.

        A role whose weights go to the engines keeps those on the device.
        """
        await self.all(TrainWorker.rest)

    async def take_snapshot(self, name: str, moves: Moves) -> None:
        """Keeps the first weights in host memory as ``name``.  moves: how ``move_snapshot`` will change them."""
        await self.all(TrainWorker.take_snapshot, name, moves)

    async def move_snapshot(self, name: str) -> None:
        """Updates the frozen weights ``name`` from the live ones: to a copy of them, or an average with them."""
        await self.all(TrainWorker.move_snapshot, name)

    async def offload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> None:
        """Moves ``parts`` to host memory, to free the devices."""
        await self.all(TrainWorker.offload, parts)

    async def onload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> None:
        """Moves ``parts`` back to the devices; methods that compute do this by themselves."""
        await self.all(TrainWorker.onload, parts)

    async def num_state_bytes(self) -> int:
        """The bytes that ``save_state`` writes to disk, over all ranks."""
        return sum(await self.all(TrainWorker.num_state_bytes))

    async def save_state(self, directory: Path, *, behind: bool) -> None:
        """Writes the state that the ranks need to resume into the empty ``directory``; ``saved`` tells the outcome.

        behind: return once the state is copied to host memory, else once it is written.
        """
        await self.all(TrainWorker.save_state, directory, behind)

    async def saved(self) -> list[Written | None]:
        """The outcome of writing each rank's file; None while it is being written."""
        return await self.all(TrainWorker.saved)

    async def load_state(self, directory: Path) -> bool:
        """Loads what ``save_state`` wrote.  False: it was written in another layout, so bits may differ from now on."""
        return all(await self.all(TrainWorker.load_state, directory))

    async def save_hf(self, target: Path, source: Path) -> None:
        """Writes the live weights as a Hugging Face checkpoint, with the sidecar files of ``source``."""
        await self.all(TrainWorker.save_hf, target, source)

    async def checksum(self) -> list[int]:
        """A checksum of each rank's weights and optimizer state; equal bits give equal sums."""
        return await self.all(TrainWorker.checksum)

    async def start_profile(self) -> None:
        """Starts to trace what the processes compute."""
        await self.all(TrainWorker.start_profile)

    async def stop_profile(self, directory: Path) -> None:
        """Writes each rank's trace since ``start_profile``, for Perfetto or chrome://tracing."""
        await self.all(TrainWorker.stop_profile, directory)

    async def connect(
        self,
        transport: Transport,
        layout: RolloutLayout,
        dtype: Precision,
        bucket_bytes: int,
        form: PublishedLora,
        quantization: Quantization,
    ) -> None:
        """Makes the ranks members of the weight channel to the rollout ranks of ``layout`` in ``dtype``.

        form: in which engines get adapters, if there are any.  quantization: in which they hold their matrices.
        """
        await self.all(TrainWorker.connect, transport, layout, dtype, bucket_bytes, form, quantization)

    async def configuration(self) -> EffectiveConfig:
        """The configuration that the ranks compute with, of all layers."""
        return joined(await self.all(TrainWorker.configuration))

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """``Publisher.opening`` on rank 0."""
        return await self.one(0, TrainWorker.opening, first_rank, attempt)

    async def open(self, attempt: int) -> None:
        """Calls ``Publisher.open`` on every rank."""
        await self.all(TrainWorker.open, attempt)

    async def publish(self, version: int) -> list[Published]:
        """``Publisher.publish``: sends the live weights to the rollout ranks, as ``version``."""
        return await self.all(TrainWorker.publish, version)

    async def expected(self, version: int) -> Expected:
        """``check.expected_weights``, whose result is the same on all ranks."""
        return (await self.all(TrainWorker.expected, version))[0]

    async def demand_alive(self) -> None:
        """Returns once every rank has answered; raises DeadWorkerError if one is gone."""
        await self.all(TrainWorker.host)
