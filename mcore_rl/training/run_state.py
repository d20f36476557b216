"""What one rank of an engine needs to go on as if it had never stopped: weights, optimizer, counters, random state.

One file for each rank, in the layout that wrote it, bit for bit.  For another layout, or another program, save the
weights alone (``checkpoint.save_megatron``, ``weights.export.save_hf``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.errors import CheckpointError
from mcore_rl.parallel.groups import random_state, restore_random_state
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import Part

FORMAT = 1


def state_file(directory: Path, engine: Engine) -> Path:
    """Where this rank's state is."""
    return directory / f"rank_{engine.groups.rank:05d}.pt"


@torch.no_grad()
def save_run_state(engine: Engine, directory: Path) -> None:
    """Write this rank's file into ``directory``, under a temporary name until it is whole.

    CheckpointError: the disk is full, or fails.
    """
    assert engine.snapshots.swapped_in is None, "the weights in place are those of a snapshot"
    engine.memory.require(Part.weights, Part.optimizer)
    path = state_file(directory, engine)
    partial = path.with_suffix(".partial")
    state = {
        "format": FORMAT,
        "role": engine.role,
        "layout": str(engine.groups.layout),
        "weights": list(_weights(engine)),
        "optimizer": _optimizer_state(engine),
        "num_skipped": engine.num_skipped,
        "random": random_state(),
    }
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
        raise CheckpointError(
            str(directory), [f"{path.name} cannot be written: {error}. Mend that and go on"]
        ) from error


@torch.no_grad()
def load_run_state(engine: Engine, directory: Path) -> None:
    """Take over what ``save_run_state`` wrote for this rank.

    CheckpointError: no such file, one that is cut off, or one of another layout, model or precision.
    """
    engine.memory.require(Part.weights, Part.optimizer)
    path = state_file(directory, engine)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        problem = f"{path.name} is missing. Resume with as many processes as wrote it, or from another step"
        raise CheckpointError(str(directory), [problem]) from error
    except Exception as error:  # whatever a file that is cut off makes of torch.load
        cause = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"{path.name} cannot be read: {cause}. Resume from another step"
        raise CheckpointError(str(directory), [problem]) from error
    layout = str(engine.groups.layout)
    problems = []
    if (state["format"], state["role"], state["layout"]) != (FORMAT, engine.role, layout):
        written = f"format {state['format']}, {state['role']}, {state['layout']}"
        problems.append(f"{path.name} is of {written}; this is format {FORMAT}, {engine.role}, {layout}")
    live = list(_weights(engine))
    if [(tensor.shape, tensor.dtype) for tensor in live] != [(kept.shape, kept.dtype) for kept in state["weights"]]:
        problems.append(f"{path.name} is of another model or precision")
    if problems:
        raise CheckpointError(
            str(directory), [f"{problem}. Resume with what the run began with" for problem in problems]
        )
    for tensor, kept in zip(live, state["weights"], strict=True):
        tensor.copy_(kept)
    _restore_optimizer(engine, state["optimizer"])
    engine.num_skipped = state["num_skipped"]
    restore_random_state(state["random"])


def _weights(engine: Engine) -> Iterator[Tensor]:
    for model in engine.models:
        yield from model.parameters()
        yield from model.buffers()


def _optimizer_state(engine: Engine) -> dict[str, Any] | None:
    if engine.optimizer is None:
        return None
    parts = []
    for part in engine.optimizer.megatron.chained_optimizers:
        inner = part.optimizer
        parts.append(
            [
                {
                    "step": group.get("step", 0),
                    "main": list(group["params"]),
                    "state": [dict(inner.state.get(parameter, {})) for parameter in group["params"]],
                }
                for group in inner.param_groups
            ]
        )
    return {"num_steps": engine.optimizer.num_steps, "parts": parts}


def _restore_optimizer(engine: Engine, kept: dict[str, Any] | None) -> None:
    if engine.optimizer is None or kept is None:
        return
    engine.optimizer.num_steps = kept["num_steps"]
    for part, groups in zip(engine.optimizer.megatron.chained_optimizers, kept["parts"], strict=True):
        inner = part.optimizer
        for group, held in zip(inner.param_groups, groups, strict=True):
            if "step" in group:
                group["step"] = held["step"]
            for parameter, main, state in zip(group["params"], held["main"], held["state"], strict=True):
                parameter.copy_(main)
                inner.state[parameter] = {  # copied: a file's memory cannot be given back, as offloading does
                    name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) and value.dim() else value
                    for name, value in state.items()
                }
