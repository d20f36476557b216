"""The memory of one role by pipeline stage: its state, exactly, and what a microbatch needs besides.

1F1B keeps ``pp - stage`` microbatches at stage ``stage`` (arXiv:2104.04473, section 2.2), or all if there are fewer.
The interleaved schedule keeps ``2 (pp - stage - 1) + (vpp - 1) pp + 1`` chunks of microbatches (section 2.2.2, and
``get_pp_rank_microbatches`` in megatron/core/pipeline_parallel/schedules.py, 0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mcore_rl.config.engine import EngineConfig, Recompute
from mcore_rl.config.lora import LoraConfig, PublishedLora, is_the_base
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import ExponentialAverage, Head, Never, Role
from mcore_rl.config.roles import AdaptedConfig, snapshot_of, trains_tower
from mcore_rl.config.run import RunConfig
from mcore_rl.families.flops import PatchGrid, tower_flops
from mcore_rl.planning.activations import (
    Kernels,
    RowBytes,
    TowerBytes,
    head_bytes,
    kernels_of,
    layer_bytes,
    tower_bytes,
)
from mcore_rl.planning.distillation import product_bytes
from mcore_rl.planning.lengths import RowPictures
from mcore_rl.planning.states import (
    GRADIENT_BYTES,
    MAIN_BYTES,
    MOMENT_BYTES,
    ModelSizes,
    StateBytes,
    States,
    family_for,
)
from mcore_rl.weights.rollout_adapters import published_form
from mcore_rl.weights.table import Table


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a role processes in one optimizer step.

    sequences: over all ranks.  longest: tokens of the longest sequence.  mean: mean tokens of a sequence.
    together: sequences that one microbatch must hold, two with pairs.
    shared, samples: tokens of a prompt that are computed once for its samples, and how many those are.
    pictures: those of a sequence.
    """

    sequences: int
    longest: int
    mean: float
    together: int = 1
    shared: int = 0
    samples: int = 1
    pictures: RowPictures = field(default_factory=RowPictures)

    @property
    def again(self) -> float:
        """How often, of a sequence, the ``shared`` tokens are not computed."""
        return 1 - 1 / self.samples

    @property
    def computed(self) -> float:
        """The mean tokens of a sequence that are computed."""
        return self.mean - self.shared * self.again


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The temporary memory of one rank, bytes.

    activations: kept for backward, over all microbatches in flight.  logits: and what the loss keeps.
    working: the largest other temporaries.  teacher: what a teacher in the loss needs on the device.
    full_kl: the gradient of the exact KL to frozen weights in the loss.
    """

    activations: int
    logits: int
    working: int
    teacher: int = 0
    full_kl: int = 0

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return self.activations + self.logits + self.working + self.teacher + self.full_kl


def lora_of(engine: EngineConfig) -> LoraConfig | None:
    """The adapters that a role with these settings trains; None: it trains all its weights, or none."""
    return engine.lora if isinstance(engine, AdaptedConfig) and engine.lora.rank else None


def engine_lora(run: RunConfig, model: ModelConfig) -> LoraConfig | None:
    """The adapters of the policy ``model`` that the rollout engines of ``run`` apply; None: they hold whole weights."""
    lora = run.actor.lora
    form = published_form(lora, run.rollout.published_lora, Table(family_for(model), model))
    return lora if lora.rank and form is PublishedLora.adapter else None


class RolePlan:
    """The memory of one role in its layout.

    name, head, trains, publishes: see ``config.role.Role``.
    model, engine, parallel, world_size: its model, engine settings, layout and number of processes.
    work: what it processes in an optimizer step.
    accelerator: whether it computes on one.
    frozen: the roles whose frozen weights its processes keep in host memory.
    beside: how many further weights of its own it keeps there: of teachers, all but the first.
    with_full_kl: whether its loss has the exact KL to frozen weights.
    states: its states, if they are known already.
    teacher_output: bytes of the output rows of teachers in its loss, of a tensor rank; 0 until somebody says so.

    Raises ConfigError if the layout does not divide the world or the layers.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        engine: EngineConfig,
        parallel: ParallelConfig,
        world_size: int,
        work: Work,
        *,
        accelerator: bool,
        head: Head = Head.lm,
        trains: bool = True,
        publishes: bool = False,
        frozen: Sequence[Role] = (),
        beside: int = 0,
        with_full_kl: bool = False,
        states: States | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.engine = engine
        self.parallel = parallel
        self.work = work
        self.head = head
        self.trains = trains
        self.publishes = publishes
        self.frozen = tuple(frozen)
        self.beside = beside
        self.teacher_output = 0
        self.with_full_kl = with_full_kl
        self.states = states or States(
            ModelSizes(model, head=self.head),
            parallel,
            world_size,
            engine.precision,
            overlap=engine.overlaps_reduction(accelerator=accelerator),
            lora=lora_of(engine),
            frozen_tower=not trains_tower(engine),
        )
        self.sizes = self.states.sizes
        self.layout = self.states.layout
        self.accelerator = accelerator
        self.kernels: Kernels = kernels_of(model, parallel, engine, accelerator=accelerator)

    @cached_property
    def tokens(self) -> int:
        """The most tokens of a microbatch, over its context ranks."""
        sequences = -(-self.work.sequences // self.layout.dp)
        if self.engine.microbatch_tokens is None:
            each = self.engine.microbatch_sequences or 1
            return min(each, sequences) * self.work.longest
        return min(self.engine.microbatch_tokens, sequences * self.work.longest)

    @property
    def rows(self) -> int:
        """The ``tokens`` of one context rank."""
        return -(-self.tokens // self.layout.cp)

    @cached_property
    def microbatch_pictures(self) -> list[PatchGrid]:
        """The most pictures of a microbatch, over the ranks that share them: those of each of its longest sequences."""
        shown = self.work.pictures.most * max(1, self.tokens // self.work.longest)
        budget = self.engine.microbatch_patches
        if not shown or budget is None:
            return list(shown)
        return list(shown[: max(1, budget // (shown[0][0] * shown[0][1]))])

    @cached_property
    def patches(self) -> int:
        """The patches of ``microbatch_pictures`` on the rank of the first stage that encodes most of them, whole."""
        shown = self.microbatch_pictures
        if not shown:
            return 0
        return -(-len(shown) // (self.layout.tp * self.layout.cp)) * shown[0][0] * shown[0][1]

    @property
    def learns_to_see(self) -> bool:
        """Whether it trains a vision tower."""
        return self.trains and self.model.vision is not None and trains_tower(self.engine)

    @cached_property
    def tower_flops(self) -> int:
        """Operations of the vision tower's forward pass on the pictures of a sequence."""
        return tower_flops(self.model, self.work.pictures.mean)

    @cached_property
    def num_microbatches(self) -> int:
        """The microbatches of an optimizer step, for sequences of the mean length."""
        sequences = -(-self.work.sequences // self.layout.dp)
        if self.engine.microbatch_tokens is None:
            count = -(-sequences // (self.engine.microbatch_sequences or 1))
        else:
            count = max(1, round(sequences * self.work.computed / self.tokens + 0.5))
        if self.layout.vpp > 1:
            count = -(-count // self.layout.pp) * self.layout.pp
        return count

    def state(self, stage: int) -> StateBytes:
        """The state of the rank of ``stage`` that holds most."""
        state = self.states.of_stage(stage)
        return state if self.trains else replace(state, gradients=0, optimizer=0)

    @property
    def heaviest(self) -> StateBytes:
        """The state of the stage that has the most bytes."""
        return max((self.state(stage) for stage in range(self.layout.pp)), key=lambda state: state.total)

    def frozen_parts(self, stage: int) -> list[tuple[str, int, bool]]:
        """(name, bytes, exact) of the weights of ``frozen`` and ``beside``, on the rank of ``stage`` that has most."""
        trained = self.states.trained
        size = self._trained_size
        weights = trained.of_stage(stage).weights - trained.outside(stage) * size  # a snapshot has what learns
        means = weights // size * MAIN_BYTES if size < MAIN_BYTES else 0
        return [
            (f"{role.snapshot} weights", weights + means * isinstance(role.moves, ExponentialAverage), True)
            for role in self.frozen
            if not is_the_base(lora_of(self.engine), role.moves)
        ] + [(f"{snapshot_of(number + 1)} weights", weights, True) for number in range(self.beside)]

    @property
    def _trained_size(self) -> int:
        """Bytes of an element of what trains: weights in their dtype, or adapters in float32."""
        return self.kernels.size if self.states.trained is self.states else MAIN_BYTES

    @property
    def saved_bytes(self) -> int:
        """Bytes per element of a checkpoint: main weight, moments, and frozen weights that move."""
        moving = sum(
            MAIN_BYTES if isinstance(role.moves, ExponentialAverage) else self._trained_size
            for role in self.frozen
            if not isinstance(role.moves, Never)
        )
        return MAIN_BYTES + 2 * MOMENT_BYTES + moving if self.trains else 0

    @cached_property
    def _layers(self) -> dict[LayerKind, RowBytes]:
        model = self.model
        kinds = {model.kind(layer) for layer in range(model.num_layers)}
        return {
            kind: layer_bytes(model, self.parallel, self.kernels, kind=kind, longest=self.work.longest)
            for kind in kinds
        }

    @cached_property
    def _head(self) -> RowBytes:
        return head_bytes(self.model, self.parallel, self.kernels, head=self.head)

    def _chunks(self, stage: int) -> list[tuple[int, ...]]:
        return list(self.states.placement[stage :: self.layout.pp])

    def in_flight(self, stage: int) -> float:
        """The microbatches that ``stage`` keeps at once, as a mean over its chunks, which may be a fraction."""
        layout = self.layout
        most = max(1, -(-self.work.sequences * self.work.longest // (layout.dp * max(1, self.tokens))))
        if layout.vpp == 1:
            return min(layout.pp - stage, most)
        most = -(-most // layout.pp) * layout.pp
        chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
        return min(chunks, most * layout.vpp) / layout.vpp

    def training(self, stage: int) -> StepBytes:
        """The temporary memory of forward and backward at ``stage``."""
        recompute = self.engine.recompute
        rows = self.rows
        layout = self.layout
        chunks = self._chunks(stage)
        layers = [self._layers[self.model.kind(layer)] for chunk in chunks for layer in chunk]
        kept = sum(layer.held(recompute) for layer in layers)
        if layout.pp > 1:  # the output that a chunk sends on stays in memory until its backward
            kept += len(chunks) * layers[0].passed
        working = max(layer.working(recompute) * rows + layer.stacked for layer in layers)
        logits = 0.0
        if stage == layout.pp - 1:
            logits = self._head.kept * rows
            at_head = self._head.backward * rows + self._head_gradient
            # Backward of the layers begins when the logits are freed, so only the larger of both counts.
            working = max(at_head, working - logits, 0.0)
        activations = kept * self.in_flight(stage) * rows
        if stage == 0:
            activations += self._tower_kept * self.in_flight(stage)
            # Both come when the logits are freed.
            working = max(working, self._tower_working - logits, self._tower_sums - activations - logits)
        gradient = self._largest_gradient(stage)
        return StepBytes(
            activations=round(activations),
            logits=round(logits),
            working=round(working + (gradient if stage != layout.pp - 1 else 0)),
            teacher=self._teacher_bytes if stage == layout.pp - 1 else 0,
            full_kl=self.kernels.size * self._columns * rows if self.with_full_kl and stage == layout.pp - 1 else 0,
        )

    def scoring(self, stage: int) -> StepBytes:
        """The temporary memory of a forward pass without gradient: one layer's tensors, or the logits."""
        kinds = {self.model.kind(layer) for chunk in self._chunks(stage) for layer in chunk}
        layer = max(self._layers[kind].kept * self.rows + self._layers[kind].stacked for kind in kinds)
        logits = self._head.kept * self.rows if stage == self.layout.pp - 1 else 0.0
        passed = 2 * self._layers[next(iter(kinds))].passed * self.rows
        if stage == 0 and self.patches:
            passed += self._features
            layer = max(layer, self._tower.forward * self.patches)
        return StepBytes(activations=round(passed), logits=round(logits), working=round(max(0.0, layer - logits)))

    @cached_property
    def _tower(self) -> TowerBytes:
        assert self.model.vision is not None, "pictures of a model without a tower"
        return tower_bytes(self.model.vision, self.kernels.size)

    @property
    def _features(self) -> float:
        """The features of a microbatch that layers behind the embedding add, whole on every rank."""
        if self.model.vision is None:
            return 0.0
        tokens = sum(height * width for height, width in self.microbatch_pictures) // self.model.vision.merge_size**2
        return len(self.model.vision.deepstack) * self.model.hidden_size * self.kernels.size * tokens

    @property
    def _tower_kept(self) -> float:
        """What the tower keeps of a microbatch for backward."""
        return self._features + (self._tower.kept * self.patches if self.learns_to_see and self.patches else 0.0)

    @property
    def _tower_working(self) -> float:
        """What one block of the tower needs beside that."""
        if not self.patches:
            return 0.0
        return self.patches * (self._tower.block if self.learns_to_see else self._tower.forward)

    @property
    def _tower_sums(self) -> float:
        """The buffer in which the tower's gradients are summed over tensor ranks, when all microbatches are done."""
        return GRADIENT_BYTES * sum(self.sizes.tower) if self.learns_to_see and self.layout.tp > 1 else 0.0

    @property
    def _teacher_bytes(self) -> int:
        if not self.teacher_output:
            return 0
        return self.teacher_output + product_bytes(self._columns, self.rows, self.kernels.size)

    @property
    def _columns(self) -> int:
        """The columns of the vocabulary that a tensor rank has."""
        return -(-self.model.vocab_size // self.layout.tp)

    @cached_property
    def _head_gradient(self) -> float:
        """Bytes of the output projection's gradient in the weights' dtype, before it is added to the float32 one."""
        if self.head is Head.value or self.states.trained is not self.states:
            return 0.0
        return self.kernels.size * self.model.hidden_size * self._columns

    def _largest_gradient(self, stage: int) -> float:
        """Bytes of the gradient of the largest trained tensor of ``stage`` in its dtype."""
        dense, experts = self.states.trained.buckets(stage)
        largest = max((max(numels) for bucket in (*dense, *experts) for numels, _ in bucket.runs), default=0)
        return self._trained_size * largest

    @cached_property
    def stage_shares(self) -> list[float]:
        """The work of each pipeline stage in the language model, divided by the mean of the stages."""
        model = self.model
        layout = self.layout
        sizes = self.sizes
        kinds = {}
        for kind in self._layers:
            dense, expert = sizes.layer(kind, 1, 1)
            kinds[kind] = sum(dense) + sum(expert) * (0 if model.moe is None else model.moe.top_k)
        stages = [
            sum(kinds[model.kind(layer)] for chunk in self._chunks(stage) for layer in chunk)
            for stage in range(layout.pp)
        ]
        stages[-1] += model.hidden_size * {Head.lm: model.vocab_size, Head.value: 1, Head.hidden: 0}[self.head]
        return [each * layout.pp / sum(stages) for each in stages]

    @property
    def recomputed_share(self) -> float:
        """The share of a forward pass that backward computes again."""
        return 1.0 if self.engine.recompute is Recompute.full else 0.0
