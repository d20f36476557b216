"""Whatever is no JSON is a ValueError, however deep it nests."""

from __future__ import annotations

import pytest

from mcore_rl.ground.json_text import read_json


def test_it_reads_what_json_reads() -> None:
    assert read_json(b'{"a": [1, null]}') == {"a": [1, None]}
    assert read_json("[1.5]", parse_float=str) == ["1.5"]


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000, "1" * 5000])
def test_what_is_none_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)
