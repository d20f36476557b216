"""What a training worker says to its engine's memory: what may move behind other work, and what is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.config.engine import Device, EngineConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.types import LossInputs, LossSums
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.shard import WorkerInput
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.worker_values import RoleSpec
from mcore_rl.training.offload import OffloadPart

CPU = detect(Device.cpu)
SPEC = RoleSpec(
    role="actor", directory=Path(), engine=EngineConfig(), parallel=ParallelConfig(), shares_device=True, publishes=True
)
OPTIMIZER = (OffloadPart.optimizer,)


@dataclass
class Told:
    """Stands in for ``Offload``.  said: (verb, parts, those behind)."""

    said: list[tuple[str, tuple[OffloadPart, ...], tuple[OffloadPart, ...]]] = field(default_factory=list)

    def offload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart), *, behind: Sequence[OffloadPart] = ()) -> None:
        self.said.append(("offload", tuple(parts), tuple(behind)))

    def onload(self, parts: Sequence[OffloadPart] = tuple(OffloadPart), *, behind: Sequence[OffloadPart] = ()) -> None:
        self.said.append(("onload", tuple(parts), tuple(behind)))


def worker(spec: RoleSpec) -> tuple[TrainWorker, Told]:
    made, told = TrainWorker.__new__(TrainWorker), Told()
    made.spec, made.platform, made.rank, made.world_size = spec, CPU, 0, 1
    made.engine, made.groups = SimpleNamespace(memory=told), SimpleNamespace(device="cpu")  # type: ignore[assignment]
    return made, told


def loss(inputs: LossInputs) -> LossSums:
    raise NotImplementedError


@pytest.mark.parametrize(("wanted", "behind"), [(True, OPTIMIZER), (False, ()), (None, ())])
def test_the_optimizer_arrives_behind_training_where_the_role_says_so(
    wanted: bool | None, behind: tuple[OffloadPart, ...]
) -> None:
    """By itself on accelerators alone."""
    made, told = worker(replace(SPEC, engine=EngineConfig(overlap_offload=wanted)))
    with pytest.raises(ValueError, match="process group"):  # which gathers the memory of all ranks, in the end
        made.train(WorkerInput([], []), loss, [], 1.0, False, None, None, False, None)  # type: ignore[arg-type]
    assert told.said[0] == ("onload", tuple(OffloadPart), behind)


def test_the_optimizer_leaves_behind_an_update_where_the_plan_has_room() -> None:
    for leaves, behind in ((True, OPTIMIZER), (False, ())):
        made, told = worker(replace(SPEC, leaves_behind=leaves))
        made.rest()
        assert told.said == [("offload", (OffloadPart.gradients, OffloadPart.optimizer), behind)]
    made, told = worker(replace(SPEC, shares_device=False, leaves_behind=True))
    made.rest()
    assert told.said == [], "a device of its own is left to nobody"
