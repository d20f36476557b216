"""Rehearses one rank: the engine of a role builds, scores and trains two steps at full size, without its machine.

The engine, DDP, the distributed optimizer and the pipeline's schedule are those of a run, in the full layout, over
torch's fake process group.  Tensors of the device are fake (``meter.py``); what is asked of data, of other ranks or of
the accelerator's kernels is answered (``bends.py``).

The process is spoilt for training: Megatron is patched to run without an accelerator.  One rehearsal at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers what collectives give on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.algorithms.preference import LABEL, MARGIN, WEIGHT
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.algorithm_object import REFERENCE
from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, Precision, SharePrompts
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.config.stages import OUTCOME
from mcore_rl.data.pairs import MEMBERS
from mcore_rl.families.flops import PatchGrid, patch_width
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.ground.types import Denominators, Picture, TrainBatch
from mcore_rl.parallel.cpu import make_megatron_run_on_cpu
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.layout import Layout, layout_violations
from mcore_rl.planning.states import family_for
from mcore_rl.planning.training import lora_of
from mcore_rl.rehearsal.bends import bends_of, bent
from mcore_rl.rehearsal.ledger import Ledger, MemoryKind
from mcore_rl.rehearsal.meter import DEVICE, DeviceMeter
from mcore_rl.training.distillation import Teacher, own_columns
from mcore_rl.training.engine import Engine
from mcore_rl.training.microbatch import split_multiple
from mcore_rl.training.model import DTYPES
from mcore_rl.training.sequences import forget_cached
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.table import Table

BUILD = "build"
SCORE = "score"
TRAIN = "train step 1"
TRAIN_AGAIN = "train step 2"
# They answer gloo and the CPU's tensors; an accelerator's libraries need none of them.
ONLY_ON_CPU = ("uneven gather", "split sizes", "create group")


@dataclass(frozen=True, kw_only=True)
class RehearsedTeachers:
    """Frozen teachers in the policy's loss, of one architecture.

    count: how many.  hidden_size, soft_cap: of their models.  precision: of their hidden states.
    """

    count: int
    hidden_size: int
    precision: Precision
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class RehearsedRank:
    """What is rehearsed: one rank of one role.

    tokens: of a full microbatch, over its context ranks.  longest: tokens of the longest sequence.
    num_microbatches: of an optimizer step of the run; fewer are rehearsed where the rest would be alike.
    reads: the fields of tokens that the loss reads.
    teachers: those in the loss; None: there are none.
    pictures: patches high and wide of each picture of a microbatch, spread evenly over its longest sequences.
    learns_to_see: whether the vision tower learns.
    imbalance: rows that this rank's experts get, in multiples of an even share; at most all of them.
    """

    role: str
    model: ModelConfig
    engine: EngineConfig
    parallel: ParallelConfig
    world_size: int
    rank: int
    head: Head
    accelerator: bool
    device_bytes: int
    tokens: int
    longest: int
    num_microbatches: int
    imbalance: float
    loss: RoleLoss
    with_entropy: bool
    reads: tuple[str, ...] = ()
    teachers: RehearsedTeachers | None = None
    pictures: tuple[PatchGrid, ...] = ()
    learns_to_see: bool = False


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal of ``part`` found.

    num_microbatches: rehearsed in each step.  num_parameters: that this rank holds.
    seconds, core_seconds, resident: what the rehearsal itself took: time, time of a core, bytes of memory.
    """

    part: RehearsedRank
    ledger: Ledger
    num_microbatches: int
    num_parameters: int
    seconds: float
    core_seconds: float
    resident: int


def rehearse(part: RehearsedRank, progress: Callable[[str], None] = lambda text: None) -> Rehearsal:
    """Rehearse ``part``.  progress: called with what begins.

    Raises ConfigError with every violation of the model and the layout.
    """
    violations = [*model_violations(part.model), *layout_violations(part.model, part.parallel, part.world_size)]
    if not 0 <= part.rank < part.world_size:
        remedy = f"Write 0 to {part.world_size - 1}"
        violations.append(Violation("rank", part.rank, f"the run has {part.world_size} ranks", remedy))
    refuse_if_any(violations)
    assert not dist.is_initialized(), "this process is a rank of a world already"
    begin = time.perf_counter()
    began = time.process_time()
    forget_cached()
    make_megatron_run_on_cpu(without=ONLY_ON_CPU if part.accelerator else ())
    layout = Layout.of(part.parallel, part.world_size)
    count = rehearsed_microbatches(layout, layout.coords(part.rank).pp, part.num_microbatches)
    dist.init_process_group("fake", store=FakeStore(), rank=part.rank, world_size=part.world_size)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = DeviceMeter(fake)
    try:
        platform = _platform(part)
        with bent(bends_of(meter, accelerator=part.accelerator, imbalance=part.imbalance)):
            groups = init_groups(layout, platform, DEVICE, seed=part.engine.seed)
            with fake, meter:
                engine = _passes(part, meter, groups, platform, count, progress)
                parameters = sum(each.numel() for chunk in engine.models for each in chunk.parameters())
                del engine
    finally:
        forget_cached()
        destroy_groups()
        dist.destroy_process_group()
    return Rehearsal(
        part=part,
        ledger=meter.ledger,
        num_microbatches=count,
        num_parameters=parameters,
        seconds=time.perf_counter() - begin,
        core_seconds=time.process_time() - began,
        resident=psutil.Process().memory_info().rss,
    )


def ranks_of_stages(parallel: ParallelConfig, world_size: int) -> list[int]:
    """Ranks worth a rehearsal: the lowest of the first, the middle and the last stage; fewer where there are fewer.

    Raises ConfigError if the layout does not divide the world.
    """
    layout = Layout.of(parallel, world_size)
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    return [layout.rank_of(tp=0, cp=0, dp=0, pp=stage) for stage in stages]


def rehearsed_microbatches(layout: Layout, stage: int, there_are: int) -> int:
    """Enough microbatches for the most that a stage keeps at once; more of them would only repeat.

    1F1B keeps ``pp - stage``; the interleaved schedule, which takes pp at a time,
    ``2 (pp - stage - 1) + (vpp - 1) pp + 1`` chunks.
    """
    if layout.vpp == 1:
        return max(1, min(there_are, layout.pp - stage))
    chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    rounds = -(-chunks // (layout.vpp * layout.pp))
    return max(1, min(-(-there_are // layout.pp), rounds)) * layout.pp


def microbatch_lengths(tokens: int, longest: int, multiple: int) -> list[int]:
    """Sequences of at most ``longest`` tokens that fill a microbatch of ``tokens``."""
    tokens = max(multiple, tokens // multiple * multiple)
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest > 1 else [])


def _passes(
    part: RehearsedRank,
    meter: DeviceMeter,
    groups: ProcessGroups,
    platform: Platform,
    count: int,
    progress: Callable[[str], None],
) -> Engine:
    """Build, score, and train twice, each in its phase of the ledger."""
    # Its sequences share no prompt: what sharing saves is counted by the plan alone.
    config = replace(part.engine, layer_spec=LayerSpec.local, share_prompts=SharePrompts.off)
    batch = _batch(part, groups, count)
    scored = _batch(part, groups, groups.layout.pp if groups.layout.vpp > 1 else 1)
    adapters = None
    if (lora := lora_of(part.engine)) is not None:
        table = Table(family_for(part.model), part.model, part.parallel, part.world_size, head=part.head)
        adapters = AdapterTable(table, lora)
    with _named(meter, BUILD, progress):
        engine = Engine(
            part.role,
            part.model,
            part.parallel,
            config,
            groups,
            platform,
            head=part.head,
            adapters=adapters,
            train_tower=part.learns_to_see,
        )
    _mark_state(meter, engine)
    if part.teachers is not None and groups.is_last_stage:
        engine.teacher = _teacher(part.teachers, part.model, groups, meter)
    with _named(meter, SCORE, progress):
        engine.score(scored)
    for chunk in engine.models:  # what a stage sends on stays in memory until its backward
        chunk.register_forward_hook(lambda module, inputs, output: meter.keep(output))
    dp = groups.layout.dp
    counts = Denominators(
        loss=float(batch.tokens_T.numel() * dp),
        tokens=batch.tokens_T.numel() * dp,
        sequences=len(batch.lengths_S) * dp,
    )
    for name in (TRAIN, TRAIN_AGAIN):
        with _named(meter, name, progress), torch.autograd.graph.saved_tensors_hooks(meter.keep, _same):
            engine.train_step(
                batch,
                part.loss,
                counts,
                with_entropy=part.with_entropy,
                kl_to=REFERENCE if part.loss.with_full_kl else None,
                distill=part.loss.distill,
            )
        _mark_state(meter, engine)
    return engine


def _teacher(teachers: RehearsedTeachers, policy: ModelConfig, groups: ProcessGroups, meter: DeviceMeter) -> Teacher:
    """The output rows of ``teachers`` for this rank's columns, in host memory."""
    shape = (len(own_columns(policy, groups)), teachers.hidden_size)
    rows = [meter.host_tensor(shape, DTYPES[teachers.precision]) for _ in range(teachers.count)]
    return Teacher(tuple(rows), teachers.soft_cap, tuple(range(teachers.count)))


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _named(meter: DeviceMeter, name: str, progress: Callable[[str], None]) -> Iterator[None]:
    progress(name)
    with meter.phase(name):
        yield


def _mark_state(meter: DeviceMeter, engine: Engine) -> None:
    """Tell the meter which memory is state; moments are there after the first step."""
    assert engine.optimizer is not None
    meter.mark(engine.optimizer.state_tensors(), MemoryKind.optimizer)
    buffers = [each for chunk in engine.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    meter.mark((buffer.grad_data for buffer in buffers), MemoryKind.gradients)
    meter.mark(
        (each for model in engine.models for each in (*model.parameters(), *model.buffers())), MemoryKind.parameters
    )


def _batch(part: RehearsedRank, groups: ProcessGroups, count: int) -> TrainBatch:
    """``count`` microbatches, each as full as it can be."""
    if part.engine.microbatch_tokens is None:
        lengths = [part.longest] * (part.engine.microbatch_sequences or 1) * count
    else:
        lengths = microbatch_lengths(part.tokens, part.longest, split_multiple(groups)) * count
    size = sum(lengths)
    mask = torch.ones(size, dtype=torch.bool)
    batch = TrainBatch(lengths_S=tuple(lengths), tokens_T=torch.zeros(size, dtype=torch.int64), mask_T=mask & False)
    mask[list(batch.offsets_S)] = False
    zeros = torch.zeros(size)
    return replace(
        batch,
        **_pictures(part, lengths, count),
        mask_T=mask,
        old_logprobs_T=zeros,
        ref_logprobs_T=zeros,
        rollout_logprobs_T=zeros,
        advantages_T=zeros,
        returns_T=zeros,
        old_values_T=zeros,
        weights_T=zeros,
        selection_T=zeros,
        extra_T=dict.fromkeys(sorted({*part.reads} - {each.name for each in fields(TrainBatch)}), zeros),
        extra_S={name: torch.zeros(len(lengths)) for name in (MARGIN, WEIGHT, LABEL, OUTCOME)},
        pairs_S=_pairs(len(lengths) // count, count) if part.loss.with_pairs else None,
    )


def _pictures(part: RehearsedRank, lengths: Sequence[int], count: int) -> dict[str, Any]:
    """The fields of pictures: no two are the same, and text has their positions, which no memory depends on."""
    vision = part.model.vision
    if vision is None:
        return {}
    size = sum(lengths)
    feature_T = torch.full((size,), -1, dtype=torch.int32)
    patches = {grid: np.zeros((grid[0] * grid[1], patch_width(vision)), dtype=np.uint8) for grid in set(part.pictures)}
    images_S = []
    given = {}
    offset = 0
    per_microbatch = len(lengths) // count
    for index, length in enumerate(lengths):
        whole = part.tokens // part.longest or 1  # sequences of a microbatch that have pictures
        place = index % per_microbatch
        share = [part.pictures[n] for n in range(place, len(part.pictures), whole)] if place < whole else []
        shown = list[Picture]()
        for grid in share:
            key = f"{index}.{len(shown)}"
            shown.append(Picture(key, *grid, grid[0] * grid[1] // vision.merge_size**2))
            given[key] = patches[grid]
        tokens = sum(picture.tokens for picture in shown)
        feature_T[offset : offset + tokens] = torch.arange(tokens, dtype=torch.int32)
        images_S.append(tuple(shown))
        offset += length
    return {
        "positions_T3": torch.zeros(size, 3, dtype=torch.int32),
        "feature_T": feature_T,
        "images_S": tuple(images_S),
        "patches": given,
    }


def _pairs(sequences: int, count: int) -> tuple[int | None, ...]:
    """Neighbours within each of ``count`` microbatches of so many sequences; the last of an odd number has none."""
    whole = sequences // MEMBERS
    return tuple(
        microbatch * whole + place // MEMBERS if place < whole * MEMBERS else None
        for microbatch in range(count)
        for place in range(sequences)
    )


def _platform(part: RehearsedRank) -> Platform:
    """The platform that the engine is told of."""
    return Platform(
        kind=Device.cuda if part.accelerator else Device.cpu,
        device_type="cpu",
        backend="fake",
        backend_name="fake",
        supports_bf16=True,
        supports_fp8=False,
        num_devices=1,
        device_name="rehearsed",
        memory_total_bytes=part.device_bytes,
        visible_devices_vars=(),
    )
