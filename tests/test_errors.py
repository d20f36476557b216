"""What the pages tell users to import is what the rooms raise, take and return."""

from __future__ import annotations

from types import ModuleType

import pytest

from mcore_rl import errors, types
from mcore_rl.ground import errors as rooms_errors
from mcore_rl.ground import types as rooms_types


@pytest.mark.parametrize(("public", "rooms"), [(errors, rooms_errors), (types, rooms_types)])
def test_a_public_name_is_that_of_the_rooms(public: ModuleType, rooms: ModuleType) -> None:
    for name in public.__all__:
        assert vars(public)[name] is vars(rooms)[name]


def test_every_error_can_be_caught_by_its_public_name() -> None:
    raised = {
        name
        for name, each in vars(rooms_errors).items()
        if isinstance(each, type) and issubclass(each, Exception) and not name.startswith("_")
    }
    assert raised | {"Violation"} == set(errors.__all__)
