"""Who has the devices when: the order of what trainer, engines and weights are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.device_sharing import DROP_WEIGHTS, KEEP_WEIGHTS, DeviceSharing
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Pause
from tests.support.turns import OFFLOADED, Judges, turns


def test_colocated_the_weights_stay_until_the_engines_have_them() -> None:
    both = turns()
    asyncio.run(both.rollout(0))
    assert both.log == ["wake weights", ("update", 0), OFFLOADED, "wake kv_cache"]
    both.log.clear()
    asyncio.run(both.devices.to_trainer())
    assert both.log == [("sleep", DROP_WEIGHTS)], "who trains comes back by itself"
    both.log.clear()
    asyncio.run(both.rollout(0))
    assert ("update", 0) in both.log, "they were dropped"


def test_for_a_moment_the_engines_keep_their_weights() -> None:
    both = turns()
    asyncio.run(both.rollout(3))
    both.log.clear()
    asyncio.run(both.devices.to_trainer(keep_weights=True))
    asyncio.run(both.rollout(3))
    assert ("sleep", KEEP_WEIGHTS) in both.log and ("update", 3) not in both.log
    asyncio.run(both.devices.to_trainer(keep_weights=True))
    asyncio.run(both.rollout(4))
    assert ("update", 4) in both.log


def test_a_reward_model_is_awake_while_the_rollout_is() -> None:
    both = turns()
    judges: Any = Judges(both.log)
    both.devices = DeviceSharing(Placement.colocated, both.actor, both.engines, both.weights, both.restarter, [judges])
    asyncio.run(both.rollout(0))
    assert both.log[-3:] == [OFFLOADED, "wake kv_cache", "judges wake"], "once the trainer has left"
    both.log.clear()
    asyncio.run(both.devices.to_trainer())
    assert both.log == ["judges sleep", ("sleep", DROP_WEIGHTS)]


def test_separate_only_weights_travel() -> None:
    both = turns(Placement.separate)
    judges: Any = Judges(both.log)
    both.devices = DeviceSharing(Placement.separate, both.actor, both.engines, both.weights, both.restarter, [judges])
    for version in (0, 0, 1):
        asyncio.run(both.rollout(version))
        asyncio.run(both.devices.to_trainer())
    assert both.log == [("update", 0), ("update", 1)]


def test_the_actor_keeps_the_device_where_the_engines_did_not_get_its_weights() -> None:
    both = turns()

    async def update(version: int, pause: Pause) -> None:
        raise ValueError("no route")

    both.weights.update = update  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no route"):
        asyncio.run(both.rollout(0))
    assert both.log == ["wake weights"]


def test_a_handover_that_fails_ends_the_turn_too() -> None:
    async def fails() -> None:
        both = turns(limit=0)
        await both.devices.to_trainer()
        both.engines.dies_in = "wake weights"
        with pytest.raises(DeadEngineError):
            await both.devices.to_engines(1)
        async with asyncio.timeout(10), both.devices.engines_turn():
            pass  # who draws, and waits to restart engines, is not kept waiting

    asyncio.run(fails())


@pytest.mark.parametrize("keep_weights", [False, True])
def test_an_engine_that_dies_on_its_way_to_sleep_is_restarted_before_the_trainer_comes_back(keep_weights: bool) -> None:
    both = turns()
    asyncio.run(both.rollout(2))
    both.log.clear()
    both.engines.dies_in = "sleep"
    asyncio.run(both.devices.to_trainer(keep_weights=keep_weights))
    assert both.log == ["death in sleep", "restart", ("sleep", KEEP_WEIGHTS if keep_weights else DROP_WEIGHTS)]
    both.log.clear()
    asyncio.run(both.rollout(2))
    assert both.log == ["wake weights", "rejoin", ("update", 2), OFFLOADED, "wake kv_cache"], (
        "the new engine knows nothing"
    )


def test_an_engine_that_dies_on_waking_is_restarted_and_joins_the_update() -> None:
    both = turns()
    both.engines.dies_in = "wake weights"
    asyncio.run(both.rollout(5))
    first = ["death in wake weights", "restart", "wake weights", "rejoin", ("update", 5)]
    assert both.log == [*first, OFFLOADED, "wake kv_cache"]


def test_an_engine_that_dies_when_the_trainer_has_left_gets_the_weights_too() -> None:
    both = turns()
    both.engines.dies_in = "wake kv_cache"
    asyncio.run(both.rollout(5))
    first = ["wake weights", ("update", 5), OFFLOADED, "death in wake kv_cache", "restart", "wake kv_cache"]
    again = [("sleep", DROP_WEIGHTS), "wake weights", "rejoin", ("update", 5), OFFLOADED, "wake kv_cache"]
    assert both.log == first + again


def test_without_restarts_a_death_is_raised() -> None:
    both = turns(limit=0)
    both.engines.dies_in = "wake weights"
    with pytest.raises(DeadEngineError, match="engine 0 died"):
        asyncio.run(both.rollout(1))
    assert both.log == ["death in wake weights"]
