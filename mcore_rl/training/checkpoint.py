"""Megatron's own distributed checkpoints of the model's weights: loading and saving the live modules of all ranks.

Megatron's dist_checkpointing does the work, with two changes so that it works everywhere: its writer forks processes,
which hangs on CPU, so torch's plain writer takes its place; and its modules know one dialect of keys, so we rename what
they ask for to the checkpoint's dialect (checkpoints/megatron_checkpoint.py).

Weights only: optimizer, random state and the order of data belong to a run (``run_state``).
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.transformer import TransformerConfig
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from mcore_rl.checkpoints.convert import HF
from mcore_rl.checkpoints.distcp import CONTENT, METADATA_CLASSES, DistributedCheckpoint
from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.kept_model import demand_kept_model
from mcore_rl.checkpoints.megatron_checkpoint import MAX_PADDING, StoredKeys, parse
from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.checkpoints.not_a_number import NanCheck
from mcore_rl.checkpoints.rest import keep_rest
from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import LAYER
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.agreement import together
from mcore_rl.parallel.plain_objects import data_classes

Shards = dict[str, ShardedTensor]
# What ranks tell each other of a checkpoint, (module, name): Megatron's description of it, torch's plans and failures.
EXCHANGED = (
    METADATA_CLASSES
    | {("megatron.core.dist_checkpointing.mapping", name) for name in ("ShardedObject", "ShardedTensor")}
    | {("torch.distributed.checkpoint.planner", name) for name in ("LoadItemType", "LoadPlan", "ReadItem")}
    | {("torch.distributed.checkpoint.storage", "WriteResult")}
    | {("torch.distributed.checkpoint.api", "CheckpointException")}
    | {("traceback", name) for name in ("FrameSummary", "StackSummary")}
    | {
        ("builtins", name)
        for name, error in vars(builtins).items()
        if isinstance(error, type) and issubclass(error, Exception)
    }
)
MISMATCH = "Give a checkpoint of this model"


@torch.no_grad()
def load_megatron(models: Sequence[torch.nn.Module], directory: Path | str, model: ModelConfig) -> None:
    """Load the Megatron checkpoint in ``directory`` into this rank's model chunks, in place.

    Collective over the world.  Any layout loads what any layout saved; dtypes are cast.  For an engine:
    ``engine.load_weights(partial(load_megatron, directory=directory, model=engine.model))``.

    model: what the chunks compute.  Raises CheckpointError on all ranks, with every violation on any of them: no such
    checkpoint, one of another model (``demand_kept_model``), a file that is missing or too short, another number of
    layers, tensors that are missing, of another shape, or hold NaN.
    """
    directory = Path(directory)
    device = next(models[0].parameters()).device

    def plan() -> tuple[Shards, Shards]:
        with DistributedCheckpoint.open(directory) as stored:
            demand_kept_model(directory, directory / HF, model)
            live = _shards(models)
            return live, _as_stored(live, stored, models)

    live, wanted = together(plan, None, device)
    with data_classes(EXCHANGED):
        loaded = dist_checkpointing.load(dict(wanted), str(directory))
    check = NanCheck()
    for name, shard in live.items():
        shard.data.copy_(loaded[name].view(shard.data.shape))
        check.see(name, shard.data)

    def refuse() -> None:
        if problems := check.problems():
            raise CheckpointError(str(directory), problems)

    together(refuse, None, device)


@torch.no_grad()
def save_megatron(models: Sequence[torch.nn.Module], directory: Path | str, source: Path | None = None) -> None:
    """Write the weights of all ranks' model chunks as a Megatron checkpoint into the new ``directory``.

    Collective over the world; all ranks see the directory, and it gets its name when it is complete.  source: a Hugging
    Face directory; its config.json, tokenizer and other sidecar files are copied, so that it can be converted back.

    Raises CheckpointError on all ranks: ``directory`` exists, the disk is full or fails, ``source`` has no config.json.
    """
    device = next(models[0].parameters()).device
    live = _shards(models)
    mine = sum(shard.data.nbytes for shard in live.values() if is_main_replica(shard.replica_id))
    size = torch.tensor(mine, device=device)
    dist.all_reduce(size)

    def create() -> NewDirectory | None:
        return NewDirectory(directory, int(size)) if dist.get_rank() == 0 else None

    new_directory = together(create, None, device)
    incomplete = Path(directory).resolve()
    incomplete = incomplete.with_name(incomplete.name + ".incomplete")

    try:
        with data_classes(EXCHANGED):
            dist_checkpointing.save(dict(live), str(incomplete), _PlainWriter("torch_dist", 1), **CONTENT)
    except CheckpointException as error:  # raised on all ranks, with what each of them met
        failures = "; ".join(f"rank {rank}: {met[0]}" for rank, met in error.failures.items())
        problem = f"cannot be written: {failures}. Mend that, remove {incomplete}, and try again"
        raise CheckpointError(str(directory), [problem]) from error

    def finish() -> None:
        if new_directory is not None:
            if source is not None:
                (incomplete / HF).mkdir()
                copy_sidecar_files(source, incomplete / HF, next(models[0].parameters()).dtype)
                if not hasattr(models[0], "vision"):  # else the tower is among the weights
                    keep_rest(source, incomplete / HF)
            new_directory.complete()

    together(finish, None, device)


class _PlainWriter(TorchDistSaveShardedStrategy):
    """Megatron's strategy, writing with torch's own synchronous writer instead of forked processes."""

    def save(self, sharded_state_dict: Shards, checkpoint_dir: Path | str) -> None:
        """Does what ``TorchDistSaveShardedStrategy.async_save`` does (strategies/torch.py:527), but synchronously."""
        mine, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(mine, False), storage_writer=FileSystemWriter(checkpoint_dir), planner=planner)


def _shards(models: Sequence[torch.nn.Module]) -> Shards:
    """Megatron's description of every weight of this rank; its ``data`` is a view of the live parameter."""
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    shards: Shards = {}
    for model in models:
        state = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        apply_factories(state)  # gate and up are stored one after the other
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):  # the rest is Transformer Engine's extra state
                shards[str(len(shards))] = value
    return shards


def _as_stored(live: Shards, stored: DistributedCheckpoint, models: Sequence[torch.nn.Module]) -> Shards:
    """``live`` with the keys and global shapes of the checkpoint."""
    keys = StoredKeys(stored.tensors)
    config = models[0].config
    assert isinstance(config, TransformerConfig)
    problems = list(_layer_problems(keys, stored, config.num_layers))
    renamed: Shards = {}
    for name, shard in live.items():
        meant = parse(shard.key)
        assert meant is not None, f"{shard.key} is no weight"
        expert = shard.global_offset[0] if "{e}" in meant.stem and meant.expert is None else meant.expert
        place = keys.find(meant.stem, meant.layer, expert)
        if place is None:
            problems.append(f"tensor {shard.key} is missing. {MISMATCH}")
            continue
        tensor = stored.tensors[place.key]
        own = shard.prepend_axis_num
        lead = len(place.lead)
        sizes = tensor.shape[:lead]
        wanted = replace(
            shard,
            key=place.key,
            global_shape=(*sizes, *shard.global_shape[own:]),
            global_offset=(*place.lead, *shard.global_offset[own:]),
            axis_fragmentations=(*sizes, *shard.axis_fragmentations[own:]),
            prepend_axis_num=lead,
        )
        expected = wanted.global_shape
        if own and lead:  # both have the number of experts
            expected = (*sizes[:-1], shard.global_shape[own - 1], *expected[lead:])
        if not _fits(expected, tensor.shape, padded=shard.allow_shape_mismatch):
            problems.append(f"tensor {place.key}: expected shape {expected} and found {tensor.shape}. {MISMATCH}")
        renamed[name] = wanted
    if problems:
        raise CheckpointError(str(stored.directory), list(dict.fromkeys(problems)))
    return renamed


def _fits(expected: tuple[int, ...], actual: tuple[int, ...], *, padded: bool) -> bool:
    if not padded:
        return actual == expected
    return actual[1:] == expected[1:] and abs(actual[0] - expected[0]) < MAX_PADDING  # rows of the vocabulary


def _layer_problems(keys: StoredKeys, stored: DistributedCheckpoint, expected: int) -> Iterator[str]:
    counts = {keys.num_layers_named} - {0}
    stacked = (key for key, name in keys.names.items() if name.stem.startswith(LAYER) and name.layer is None)
    counts |= {stored.tensors[key].shape[0] for key in stacked}
    if counts != {expected}:
        yield f"expected {expected} layers and found {', '.join(map(str, sorted(counts))) or 'none'}. {MISMATCH}"
