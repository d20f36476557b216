"""Which version the engines hold: what is sent, when it is checked, and what a death changes."""

from __future__ import annotations

import asyncio

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Pause
from tests.support.turns import turns


def test_weights_are_sent_once_for_each_version_that_engines_hold() -> None:
    both = turns()
    for version in (0, 0, 1, 1):
        asyncio.run(both.weights.update(version))
        assert both.weights.version == version
    assert both.log == [("update", 0), ("update", 1)]
    both.weights.engines_dropped_theirs()
    assert both.weights.version is None
    asyncio.run(both.weights.update(1))
    assert both.log[2:] == [("update", 1)]


def test_a_death_in_an_update_begins_it_anew_with_all_members() -> None:
    both = turns()
    both.engines.dies_in = "update"
    asyncio.run(both.weights.update(4))
    assert both.log == ["death in update", "restart", "rejoin", ("update", 4)]
    assert both.weights.version == 4


def test_engines_that_were_restarted_meanwhile_are_given_the_version_that_the_others_hold() -> None:
    both = turns()
    asyncio.run(both.weights.update(7))
    both.restarter.num_restarts += 1  # while they drew
    asyncio.run(both.weights.update(7))
    asyncio.run(both.weights.update(7))
    assert both.log == [("update", 7), "rejoin", ("update", 7)]


def test_an_engine_that_died_while_others_drew_is_restarted_before_they_are_kept_from_drawing() -> None:
    both = turns()
    asyncio.run(both.weights.update(7))
    both.engines.death = DeadEngineError("engine 1 died")
    asyncio.run(both.weights.update(8, Pause.wait))
    assert both.log == [("update", 7), "restart", "rejoin", ("update", 8)]
    assert both.engines.holds == [(0, Pause.keep), (2, Pause.wait)]


def test_nothing_is_kept_back_for_weights_that_engines_have() -> None:
    both = turns()
    for _ in range(2):
        asyncio.run(both.weights.update(7))
    assert len(both.engines.holds) == 1


def test_weights_are_checked_in_the_updates_that_are_due() -> None:
    both = turns(check_freq=2)
    for version in (1, 2, 3, 4):
        asyncio.run(both.weights.update(version))
    assert both.log == [("update", 1), ("update", 2), "check", ("update", 3), ("update", 4), "check"]


def test_a_death_in_a_check_sends_the_weights_again() -> None:
    both = turns(check_freq=1)
    both.engines.dies_in = "check"
    asyncio.run(both.weights.update(1))
    assert both.log == [("update", 1), "death in check", "restart", "rejoin", ("update", 1), "check"]
