"""A member of an update may say that it lost a peer before the death of that is known: the death is what counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.ground.errors import DeadWorkerError, McoreRLError, SyncError
from mcore_rl.sync.update import WeightUpdater


class Engine:
    """Knows what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def start_update(self, pause: Any) -> None:
        self.told.append("start")

    async def fail_update(self, cause: str) -> None:
        self.told.append(cause)

    async def call_workers(self, method: Any, *args: Any) -> list[Any]:
        return []


class Trainers:
    """Publishing fails with ``error``; asked whether all are alive, they answer with ``death``."""

    def __init__(self, error: Exception, death: Exception | None) -> None:
        self.error, self.death = error, death

    async def publish(self, version: int) -> list[Any]:
        raise self.error

    async def demand_alive(self) -> None:
        if self.death is not None:
            raise self.death


LOST = SyncError("training rank 0: connection closed")
DEATH = DeadWorkerError("training rank 1 died")


@pytest.mark.parametrize(
    ("error", "death", "raised"),
    [(LOST, DEATH, DEATH), (LOST, None, LOST), (DEATH, None, DEATH), (ValueError("a mistake"), DEATH, None)],
)
def test_a_death_comes_before_what_follows_from_it(
    error: Exception, death: Exception | None, raised: McoreRLError | None
) -> None:
    engine, trainers = Engine(), Trainers(error, death)
    updater = WeightUpdater([engine], RolloutLayout(), trainers)  # type: ignore[list-item, arg-type]
    updater._is_open = True
    with pytest.raises((McoreRLError, ValueError)) as caught:
        asyncio.run(updater.update(2))
    assert caught.value is (error if raised is None else raised)
    assert engine.told == ["start", str(error)], "the engine refuses to draw"
