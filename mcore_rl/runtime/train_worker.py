"""One training process of a role: it joins its process group, builds its engine, and runs the controller's calls.

It is thin: ``training/`` computes, ``weights/`` and ``sync/`` decide which weights go where.  The controller imports
this module for the types of its calls, so the methods that need Megatron import it, which takes 3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mcore_rl.algorithms.own_scores import OwnScores, own_scores, sums_per_sequence
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.checkpoints.export import save_hf
from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.peft import ADAPTERS, open_peft, save_peft, write_adapter_config
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.checkpoints.rank_state import SIDECAR_FILES
from mcore_rl.checkpoints.rest import keep_rest
from mcore_rl.checkpoints.state_writer import StateWriter, Written
from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import PublishedLora, is_the_base
from mcore_rl.config.role import Head, Moves
from mcore_rl.config.rollout import Quantization, RolloutLayout
from mcore_rl.config.stages import is_field
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import HIDDEN, Denominators, SequenceScores, TrainBatch
from mcore_rl.parallel.device import Memory, detect, device_of, memory, set_device
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.meeting import join_group
from mcore_rl.parallel.phase import mark_phases
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.runtime.answers import Answering
from mcore_rl.runtime.shard import Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.worker_values import RoleSpec, SequenceAdvantages, TrainResults
from mcore_rl.sync.check import Expected, expected_weights
from mcore_rl.sync.publish import Published, Publisher
from mcore_rl.sync.transport import Transport
from mcore_rl.training.offload import Moved, OffloadPart
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

if TYPE_CHECKING:
    from mcore_rl.training.engine import Loss

LOCAL = 0  # Ray shows each worker its own accelerator, and no other


class TrainWorker(Answering):
    """Rank ``rank`` of ``world_size``; the class of a Ray actor."""

    def __init__(self, rank: int, world_size: int, log: Path) -> None:
        super().__init__(rank, log)
        self.world_size = world_size
        self._stack = ExitStack()
        self._publisher: Publisher | None = None

    def device_ids(self) -> list[str]:
        """The accelerators that Ray gave to this worker."""
        import ray

        return [str(index) for index in ray.get_gpu_ids()]

    def join(self, store: StoreAccess, spec: RoleSpec, timeout_s: float) -> None:
        """Joins the process groups of ``spec``'s layout; every worker of the role must call it."""
        from mcore_rl.parallel.groups import init_groups

        self.spec = spec
        self.platform = detect(spec.engine.device)
        set_device(self.platform, LOCAL)
        join_group(store, f"world of {spec.role}", self.platform, self.rank, self.world_size, timeout_s)
        layout = Layout.of(spec.parallel, self.world_size)
        device = device_of(self.platform, LOCAL)
        self.groups = init_groups(layout, self.platform, device, spec.engine.seed)

    def build(self) -> None:
        """Builds the engine, with the checkpoint's weights."""
        from mcore_rl.training.distillation import Teacher
        from mcore_rl.training.engine import Engine

        spec = self.spec
        family, model = model_of(read_config(spec.directory), pictures=spec.pictures)
        self.table = Table(family, model, spec.parallel, self.world_size, head=spec.head)
        self.adapters = adapters = AdapterTable(self.table, spec.lora) if spec.lora else None
        self.trained = adapters or self.table  # the tensors that train
        self.engine = Engine(
            spec.role,
            model,
            spec.parallel,
            spec.engine,
            self.groups,
            self.platform,
            head=spec.head,
            trainable=spec.trains,
            adapters=adapters,
            train_tower=spec.train_tower,
        )
        self._writer = StateWriter(self.platform)
        for name, directory in spec.beside.items():
            self._load(directory)
            self.engine.snapshots.take(name)
        self._load(spec.directory)
        if spec.teacher is not None and self.groups.is_last_stage:
            each = spec.teacher
            self.engine.teacher = Teacher.load(
                each.directories, each.precision, model, self.groups, self.platform, each.numbers
            )
        if adapters is not None and adapters.lora.path is not None:
            with open_peft(Path(adapters.lora.path), adapters) as checkpoint:
                self.engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=adapters, rank=self.rank))

    def _load(self, directory: Path) -> None:
        """Loads the weights of a Hugging Face checkpoint."""
        with open_weights(directory, pictures=self.spec.pictures) as checkpoint:
            self.engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=self.table, rank=self.rank))

    def shares_prompts(self) -> bool:
        """Whether the engine computes a prompt once for all of its samples."""
        return self.engine.shares_prompts

    def score(
        self,
        given: WorkerInput[Sequence[int] | None],
        makes: Sequence[str],
        temperature: float,
        snapshots: Sequence[str | None],
    ) -> WorkerOutput[SequenceScores | None]:
        """Scores each batch, or makes its hidden states; the shard holds what ``makes`` names, of all batches.

        given: of a single batch, the payload may be the lengths of other sequences that end with the same responses;
        the fields are then theirs.
        makes: as in ``config.stages.Pass``.  snapshots: the name of frozen weights for each batch; None: the live ones.
        The value is sums over the trained tokens of a single batch.  Only the leader of each data-parallel coordinate
        returns them; its peers have the same.
        """
        self.onload([OffloadPart.weights])
        parts = [self._scored(*each, makes, temperature) for each in zip(given.batches, snapshots, strict=True)]
        if not self.spec.trains:
            self.rest()
        if not self._leads:
            return WorkerOutput(None)
        if len(parts) > 1:
            return WorkerOutput(None, Shard.joined([shard for _, shard in parts]))
        ((sums, shard),) = parts
        return WorkerOutput(sums, shard if given.payload is None else shard.behind(given.payload))

    def _scored(
        self, batch: TrainBatch, snapshot: str | None, makes: Sequence[str], temperature: float
    ) -> tuple[SequenceScores | None, Shard]:
        if HIDDEN in makes:
            return None, Shard.of_hidden(batch, self.engine.hidden_states(batch, snapshot=snapshot))
        scores = self.engine.score(
            batch,
            temperature=temperature,
            with_entropy="entropy_S" in makes,
            record_routing="routing_TLK" in makes,
            snapshot=snapshot,
        )
        scored_T = scores.values_T if self.spec.head is Head.value else scores.logprobs_T
        assert scored_T is not None
        shard = Shard.of(batch.lengths_S, **{makes[0]: scored_T}, routing_TLK=scores.routing_TLK)
        return sums_per_sequence(batch, scored_T, scores.entropy_T) if self._leads else None, shard

    def on_ranks(
        self, given: WorkerInput[Any], function: Callable[..., Mapping[str, Any]], *arguments: Any
    ) -> WorkerOutput[dict[str, Any] | None]:
        """``function(batch, payload, *arguments)``: the shard holds its fields, and the value is the rest.

        Only leaders compute it.
        """
        if not self._leads:
            return WorkerOutput(None)
        (batch,) = given.batches
        made = function(batch, given.payload, *arguments)
        fields = {name: value for name, value in made.items() if is_field(name)}
        rest = {name: value for name, value in made.items() if name not in fields}
        return WorkerOutput(rest, Shard.of(batch.lengths_S, **fields) if fields else None)

    def train(
        self,
        given: WorkerInput[SequenceAdvantages],
        loss: Loss,
        denominators: Sequence[Denominators],
        temperature: float,
        with_entropy: bool,
        kl_to: str | None,
        distill: DistillConfig | None,
        with_scores: bool,
        numbers: StepNumbers,
    ) -> WorkerOutput[TrainResults | None]:
        """``Engine.train_step`` on each minibatch, in order.

        Rank 0 returns the results, which are of all ranks; with ``with_scores``, each leader the scores of its
        sequences of the first minibatch.
        """
        overlaps = self.spec.engine.overlaps_offload(accelerator=self.platform.is_accelerator)
        self.engine.memory.onload(behind=[OffloadPart.optimizer] if overlaps else [])
        results = []
        scores = list[OwnScores]()
        for number, (batch, given_S, counts) in enumerate(zip(given.batches, given.payload, denominators, strict=True)):
            result = self.engine.train_step(
                finish(batch, given_S, numbers),
                loss,
                counts,
                temperature=temperature,
                with_entropy=with_entropy,
                kl_to=kl_to,
                distill=distill,
                with_scores=with_scores and number == 0,
            )
            if result.scores is not None and self._leads:
                scores.append(own_scores(batch, result.scores))
            results.append(replace(result, scores=None))
        own = asdict(memory(self.platform))
        device = self.groups.device
        self.rest()
        of_ranks = torch.empty(self.world_size, len(own), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(of_ranks, torch.tensor([list(own.values())], device=device))
        memories = [Memory(**dict(zip(own, row, strict=True))) for row in of_ranks.tolist()]
        if self.rank == 0:
            return WorkerOutput(TrainResults(results, memories, scores))
        return WorkerOutput(TrainResults([], [], scores) if scores else None)

    def rest(self) -> None:
        """Training is over until the next step: on a shared device, offloads all but weights that engines need."""
        if self.spec.shares_device:
            parts = [part for part in OffloadPart if part is not OffloadPart.weights or not self.spec.publishes]
            self.engine.memory.offload(parts, behind=[OffloadPart.optimizer] if self.spec.leaves_behind else [])

    def take_snapshot(self, name: str, moves: Moves) -> None:
        """Keeps the first weights as ``name``.  moves: how ``move_snapshot`` will change the copy."""
        self.engine.snapshots.take(name, moves, base=is_the_base(self.spec.lora, moves))

    def move_snapshot(self, name: str) -> None:
        """Updates the frozen weights ``name`` from the live ones."""
        self.onload([OffloadPart.weights])
        self.engine.snapshots.move(name)
        self.rest()

    def offload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> Moved:
        """Moves ``parts`` to host memory, to free the device."""
        return self.engine.memory.offload(parts)

    def onload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart)) -> Moved:
        """Moves ``parts`` back to the device; methods that compute call it by themselves."""
        return self.engine.memory.onload(parts)

    def num_state_bytes(self) -> int:
        """The bytes that this rank's ``save_state`` writes to disk."""
        from mcore_rl.training.run_state import num_state_bytes

        return num_state_bytes(self.engine, self.trained)

    def save_state(self, directory: Path, behind: bool) -> None:
        """Writes the state that this rank needs to resume into the empty ``directory``; ``saved`` tells the outcome.

        behind: return once the state is copied to host memory, else once it is written.
        """
        from mcore_rl.training.run_state import begin_save

        begin_save(
            self.engine, self.trained, directory, self._writer, behind=behind, beside=partial(self._beside, directory)
        )

    def saved(self) -> Written | None:
        """The outcome of the last ``save_state``; None while it is still writing."""
        return self._writer.outcome()

    def _beside(self, directory: Path) -> None:
        """Adds the sidecar files, so that the checkpoint alone can be converted to a Hugging Face checkpoint."""
        if self.rank == 0:
            beside = directory / SIDECAR_FILES
            beside.mkdir()
            sees = self.table.model.vision is not None
            copy_sidecar_files(self.spec.directory, beside, self.engine.dtype, head=self.table.head, pictures=sees)
            if sees or (self.adapters is None and self.table.head is not Head.value):
                keep_rest(self.spec.directory, beside, tower=not sees)
            if self.adapters is not None:
                write_adapter_config(self.adapters, beside, str(self.spec.directory))

    def load_state(self, directory: Path) -> bool:
        """Loads what ``save_state`` of all ranks wrote.  True: in this layout, so that training resumes bit for bit."""
        from mcore_rl.training.run_state import load_run_state

        self.onload([OffloadPart.weights, OffloadPart.optimizer])
        alike = load_run_state(self.engine, self.trained, directory)
        self.rest()
        return alike

    def save_hf(self, target: Path, source: Path) -> None:
        """Writes the live weights as a Hugging Face checkpoint to ``target``, complete or not at all; collective.

        Adapters are merged, and also in ``target``'s folder ``ADAPTERS``, as PEFT saves them.
        """
        self.onload([OffloadPart.weights])
        save_hf(self.engine.models, self.table, self.rank, target, source, dtype=self.engine.dtype)
        if self.adapters is not None:
            save_peft(self.engine.models, self.adapters, self.rank, target / ADAPTERS, str(source))

    def connect(
        self,
        transport: Transport,
        layout: RolloutLayout,
        dtype: Precision,
        bucket_bytes: int,
        form: PublishedLora,
        quantization: Quantization,
    ) -> None:
        """Makes this rank a member of the weight channel to the rollout ranks.

        dtype: of vLLM's weights.  form: in which engines get adapters, if there are any.  quantization: of the engines.
        """
        family = self.table.family
        model = self.table.model
        if self._publisher is not None:  # engines joined or left
            self._publisher.close()
        self._publisher = Publisher(
            self.engine.models,
            self.table,
            RolloutTable(family, model, layout, latent_attention=self.platform.is_accelerator),
            self.rank,
            transport,
            dtype=getattr(torch, dtype.value),
            bucket_bytes=bucket_bytes,
            adapters=self.adapters if form is PublishedLora.adapter else None,
            quantization=quantization,
            frozen_tower=self.spec.pictures and not self.spec.train_tower,
        )

    def configuration(self) -> EffectiveConfig:
        """The configuration that this rank's modules compute with."""
        from mcore_rl.training.effective_config import effective_config

        return effective_config(self.engine.models, self.engine.model, self.engine.head)

    def opening(self, first_rank: int, attempt: int) -> bytes:
        """Calls ``Publisher.opening`` on this rank."""
        return self.publisher.opening(first_rank, attempt)

    def open(self, attempt: int) -> None:
        """Calls ``Publisher.open`` on this rank."""
        self.publisher.open(attempt)

    def publish(self, version: int) -> Published:
        """Calls ``Publisher.publish`` on this rank, with the weights on the device."""
        self.onload([OffloadPart.weights])
        return self.publisher.publish(version)

    def expected(self, version: int) -> Expected:
        """Calls ``check.expected_weights``, with the weights on the device."""
        self.onload([OffloadPart.weights])
        return expected_weights(self.publisher, version)

    def start_profile(self) -> None:
        """Starts to trace what this process computes, by torch's profiler, with its phases."""
        self._profile = torch.profiler.profile()
        self._profile.start()
        mark_phases(torch.profiler.record_function)

    def stop_profile(self, directory: Path) -> None:
        """Writes the trace since ``start_profile``, for Perfetto or chrome://tracing."""
        mark_phases(None)
        self._profile.stop()
        directory.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(directory / f"{self.spec.role}-rank-{self.rank}.json"))

    def checksum(self) -> int:
        """A checksum of this rank's weights and optimizer state; equal bits give equal sums."""
        self.onload([OffloadPart.weights, OffloadPart.optimizer])
        tensors = [*(p for chunk in self.engine.models for p in chunk.parameters())]
        if self.engine.optimizer is not None:
            tensors += self.engine.optimizer.state_tensors()
        total = 0
        for tensor in tensors:
            words = tensor.detach().cpu().contiguous().view(torch.uint8).to(torch.int64)
            total = (total * 31 + int((words * torch.arange(1, words.numel() + 1).view(words.shape)).sum())) % 2**61
        return total

    @property
    def publisher(self) -> Publisher:
        """This rank's publisher; ``connect`` must have been called."""
        assert self._publisher is not None, "connect first"
        return self._publisher

    @property
    def _leads(self) -> bool:
        coords = self.groups.coords
        return coords.tp == coords.pp == coords.cp == 0
