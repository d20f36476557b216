"""How the pictures of a microbatch are spread over the ranks of a stage; what they become is in tests/parity."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import Picture
from mcore_rl.training.engine import Engine
from mcore_rl.training.pictures import share_out
from tests.support import picture_models


def pictures(*sides: int) -> list[Picture]:
    """Square pictures of so many patches a side."""
    return [Picture(f"{number:02}", side, side, side * side // 4) for number, side in enumerate(sides)]


def test_every_picture_is_encoded_once_and_ranks_have_about_as_much() -> None:
    given = pictures(20, 4, 12, 12, 8, 16, 4)
    shares = share_out(given, 3)
    assert sorted(each.key for share in shares for each in share) == [each.key for each in given]
    patches = [sum(each.height * each.width for each in share) for share in shares]
    assert max(patches) == 400, "the largest is alone"
    assert share_out(list(reversed(given)), 3) == shares, "the order in which they come does not matter"


def test_ranks_without_a_picture_have_none() -> None:
    assert share_out(pictures(8), 4) == [pictures(8), [], [], []]
    assert share_out([], 2) == [[], []]


def test_an_engine_takes_no_pictures_that_it_cannot_use() -> None:
    _, model = model_of(picture_models.config("qwen2_5_vl"), pictures=True)
    assert model.vision is not None
    batch = picture_models.batch_of(model.vision)
    engine: Any = SimpleNamespace(model=replace(model, vision=None))
    with pytest.raises(AssertionError, match="of which the model sees none"):
        Engine._microbatches(engine, batch)
    engine.model = model
    with pytest.raises(AssertionError, match="without their positions"):
        Engine._microbatches(engine, replace(batch, positions_T3=None))
