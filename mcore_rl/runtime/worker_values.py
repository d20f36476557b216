"""What the controller tells training processes of their role, and what it gets back, beside shards of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcore_rl.algorithms.own_scores import OwnScores
from mcore_rl.config.engine import EngineConfig, Precision
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.ground.types import StepResult
from mcore_rl.parallel.device import Memory

# For each minibatch, the advantages of its sequences (float32, [S]); None if the batch has one per token.
SequenceAdvantages = Sequence[NDArray[np.float32] | None]


@dataclass(frozen=True)
class TeacherSpec:
    """The teachers in the policy's loss, one or several.

    directories: the Hugging Face checkpoint of each.  precision: of their hidden states.
    numbers: which of them each number of a batch's ``TAUGHT_BY`` stands for.
    """

    directories: tuple[Path, ...]
    precision: Precision
    numbers: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What a worker must know of its role.

    role: its name.
    directory: the Hugging Face checkpoint of its first weights.
    engine, parallel, head: settings of its engine, its layout, and the output of its model.
    trains: whether it has an optimizer; without one, it only scores.
    lora: the adapters that it trains; None: it trains the weights themselves.
    shares_device: whether rollout engines use the same device by turns.
    publishes: whether its weights go to the engines, for which they stay on the device when the worker rests.
    leaves_behind: whether its optimizer's state leaves the device while the engines receive its weights.
    teacher: whose output projections it has beside its own, for its loss; None: nobody's.
    beside: further weights of the same architecture that it scores with, by the name of their snapshot.
    pictures: whether its model is the whole of a multimodal checkpoint, with its vision tower; else the text part.
    train_tower: whether that tower learns.
    """

    role: str
    directory: Path
    engine: EngineConfig
    parallel: ParallelConfig
    head: Head = Head.lm
    trains: bool = True
    lora: LoraConfig | None = None
    shares_device: bool = False
    publishes: bool = False
    leaves_behind: bool = False
    teacher: TeacherSpec | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)
    pictures: bool = False
    train_tower: bool = True


@dataclass(frozen=True)
class TrainResults:
    """results: one per optimizer step.  memories: the memory use of each rank after them.

    scores: one per data-parallel rank, if they were asked for.
    """

    results: list[StepResult]
    memories: list[Memory]
    scores: list[OwnScores] = field(default_factory=list)
