"""Values as plain data: what goes there and back, and what a hostile program may write in its place."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mcore_rl.rewards.plain_data import MAX_RANGE, Opaque, decode, encode, read_value


class Level(IntEnum):
    """An int by another name."""

    high = 3


class Text(str):
    """Says that it is equal to everything."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 2**63 - 1, 2**63, -(10**4000), 0.5, -0.0, math.inf, "", "ü\ud800\0", b"\x00\xff", 1j, (),
     (1, (2,)), [], [[1]], {}, {(1, 2): [3], None: {4}}, set(), {1, "a", (2, 3)}, frozenset(), range(3, 9, 2), ..., int,
     Decimal("0.10"), Fraction(1, 3),
     datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.timedelta(days=-1, microseconds=5),
     datetime.time(1, 2), deque([1, 2])],
)  # fmt: skip
def test_data_comes_back_as_it_was(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is (set if type(value) is frozenset else type(value))


@pytest.mark.parametrize(
    ("value", "plain"),
    [(Level.high, 3), (Text("a"), "a"), (Counter("aab"), {"a": 2, "b": 1}), (defaultdict(list, {1: [2]}), {1: [2]}),
     (OrderedDict(a=1), {"a": 1}), (namedtuple("P", "x y")(1, [2]), (1, [2])), (np.int64(3), 3), (np.float64(0.5), 0.5),
     (np.bool_(True), True), (bytearray(b"x"), b"x"), ([Text("a")], ["a"]), ({Text("a"): Level.high}, {"a": 3})],
)  # fmt: skip
def test_subclasses_become_what_they_are(value: Any, plain: Any) -> None:
    back = there_and_back(value)
    assert repr(back) == repr(plain)


def test_nan_and_arrays_come_back() -> None:
    assert math.isnan(there_and_back(math.nan))
    for array in (
        np.arange(6).reshape(2, 3),
        np.array([0.5, math.inf]),
        np.array([True]),
        np.array([1j]),
        np.zeros((0, 3), np.float32),
    ):
        back = there_and_back(array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert np.array_equal(back, array)
    assert isinstance(there_and_back(np.array([object()])), Opaque)
    assert isinstance(there_and_back(np.array(["text"])), Opaque)


def test_what_is_no_data_is_equal_to_nothing() -> None:
    back = there_and_back(object())
    assert isinstance(back, Opaque)
    assert back != there_and_back(object())
    assert back
    assert isinstance(there_and_back(len), Opaque)
    assert isinstance(there_and_back(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)), Opaque)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="levels deep"):
        encode(loop)


@pytest.mark.parametrize(
    "form",
    ['{"type": "eval"}', '{"type": "object.__subclasses__"}', '{"extra": ["os", "system", '
                                                              '["true"]]}', '{"extra": ["datetime", "sys", []]}',
     '{"extra": ["decimal", "Decimal", '
     '["x"]]}', '{"array": ["O", [1], [0]]}', '{"array": ["V8", [1], [0]]}', '{"array": ["i8", [2], [0]]}',
     '{"array": ["<U9", [1], ["x"]]}', '{"array": ["i8,O", [1], [0]]}', '{"range": [0, 1000000000000, '
                                                                        '1]}', '{"range": [0, 1, 0]}',
     '{"int": "zz"}', '{"int": 5}', '{"bytes": "x"}', '{"complex": [1]}', '{"set": [[]]}', '{"set": 5}',
     '{"dict": [[[], 1]]}',
     '{"dict": {"a": '
     '1}}', '{"tuple": null}', '{}', '{"a": 1, "b": '
                                     '2}', '{"ref": 0}', '{"callback": 0}', '{"unknown": 1}', "[" * 100_000,
     '{"tuple": [' * 5000 + "]}" * 5000, "", "x", "\0", "1" * 10 + "x"],
)  # fmt: skip
def test_what_is_no_form_of_it_is_nothing(form: str) -> None:
    assert isinstance(read_value(form), Opaque)


def test_a_range_stays_short() -> None:
    assert there_and_back(range(MAX_RANGE)) == range(MAX_RANGE)
    with pytest.raises(ValueError, match="too long"):
        there_and_back(range(MAX_RANGE + 1))
