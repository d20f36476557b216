"""A row of the table of roles: what it says, and what makes no sense in it."""

from __future__ import annotations

import pytest

from mcore_rl.config.role import Every, ExponentialAverage, Head, Never, Role, moves_after
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import FrozenModelConfig, TrainedModelConfig

WEIGHTS = {"weights": "own.path", "config": FrozenModelConfig}


def test_the_table_has_one_policy_which_is_scored_first() -> None:
    assert [role.name for role in ROLES.values() if role.publishes] == [next(iter(ROLES))]
    assert all(role.shares is None or role.shares in ROLES for role in ROLES.values())


def test_what_a_row_implies() -> None:
    shared = Role(name="lagged", shares="actor", moves=Every(3))
    assert (shared.group, shared.snapshot, shared.phase) == ("actor", "lagged", "lagged_scores")
    trained = Role(
        name="own", weights="own.path", config=TrainedModelConfig, trains=True, loss="a:b", keeps_copy=True,
    )  # fmt: skip
    assert (trained.group, trained.snapshot, trained.update_phase) == ("own", "own_copy", "update_own")
    assert Role(name="own", **WEIGHTS).snapshot is None and Role(name="own", **WEIGHTS).head is Head.lm


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "or shares another's"),
        ({**WEIGHTS, "shares": "actor"}, "or shares another's"),
        ({**WEIGHTS, "trains": True}, "has a loss where it is trained"),
        ({**WEIGHTS, "loss": "a:b"}, "has a loss where it is trained"),
        ({**WEIGHTS, "keeps_copy": True}, "a copy of it would say the same"),
        ({**WEIGHTS, "moves": Every(2)}, "no frozen weights beside trained ones"),
    ],
)
def test_a_row_that_makes_no_sense(row: dict[str, object], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        Role(name="own", **row)  # type: ignore[arg-type]


def test_when_frozen_weights_move() -> None:
    assert [step for step in range(1, 8) if moves_after(Every(3), step)] == [3, 6]
    assert [moves_after(moves, 3) for moves in (Never(), ExponentialAverage(0.9))] == [False, True]
