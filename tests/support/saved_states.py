"""Engines that keep their state and take it over, and that state as the tensors of the whole model.

What belongs to the whole model is gathered by Megatron alone: its optimizer's own copy of shards into weights, its own
all-gather, and its own description of the modules (``full_weights``); no table of ours has a say in it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.state_writer import StateWriter, Written
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.engine import Engine
from mcore_rl.training.run_state import begin_save
from mcore_rl.weights.table import Table
from tests.support import batches, engines, full_weights

LENGTHS = (9, 5, 12, 7)  # a microbatch for each of four data-parallel ranks
PRECISIONS = {"float32": Precision.float32, "bfloat16": Precision.bfloat16}


def table_of(groups: ProcessGroups, family: str, model: ModelConfig, layout: str, *, head: Head = Head.lm) -> Table:
    """Of the engine that ``engine_of`` builds."""
    return Table(FAMILIES[family], model, parse_layout(layout), groups.layout.world_size, head=head)


def engine_of(
    groups: ProcessGroups, table: Table, layout: str, source: Path, precision: str = "float32", role: str = "actor"
) -> Engine:
    """With the weights in the Hugging Face directory ``source``, so that padding is zero, as in any run."""
    with HfCheckpoint.open(source) as checkpoint:
        load = partial(load_hf, checkpoint=checkpoint, table=table, rank=groups.rank)
        settings = engines.config(precision=PRECISIONS[precision])
        return engines.build(groups, table.model, settings, layout=layout, role=role, head=table.head, load=load)


def save(engine: Engine, table: Table, directory: Path, *, behind: bool = False) -> Written:
    """Keep this rank's state, and say what became of it."""
    writer = StateWriter(engine.platform)
    begin_save(engine, table, directory, writer, behind=behind)
    while (written := writer.outcome()) is None:
        pass
    return written


def train(engine: Engine, groups: ProcessGroups, first: int, count: int) -> list[float]:
    """Losses of steps ``first`` and on, each on a batch that its number seeds."""
    losses = []
    for step in range(first, first + count):
        batch = batches.ragged(101, LENGTHS, seed=step)
        share, counts = engines.share_of(batch, groups), batches.denominators(batch)
        losses.append(engine.train_step(share, batches.policy_loss, counts, with_entropy=True).loss)
    return losses


@torch.no_grad()
def whole_state(engine: Engine, like: full_weights.Weights) -> dict[str, full_weights.Weights]:
    """Weights, main weights and moments of the whole model, of a float32 engine; the same on every rank."""
    assert engine.optimizer is not None and engine.dtype is torch.float32
    parts = [part for part in engine.optimizer.megatron.chained_optimizers if not part.is_stub_optimizer]
    mains = [(part, main) for part in parts for group in part.optimizer.param_groups for main in group["params"]]
    kept = [main.clone() for _, main in mains]
    state = {"weights": full_weights.gather_full(engine.models, like)}

    def as_weights(tensors: list[Tensor]) -> full_weights.Weights:
        for (_, main), tensor in zip(mains, tensors, strict=True):
            main.copy_(tensor)
        for part in parts:
            part._copy_main_params_to_model_params()
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
        return full_weights.gather_full(engine.models, like)

    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = as_weights([part.optimizer.state[main][moment] for part, main in mains])
    state["main"] = as_weights(kept)
    return state
