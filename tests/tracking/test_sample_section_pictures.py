"""Which pictures a page shows, and what of a run directory that comes from strangers it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tracking.sample_section import MAX_PICTURE_BYTES, MAX_PICTURES, ShownPictures
from mcore_rl.tracking.samples import thumbnail_file
from tests.support.pictures import encoded, noise

WEBP = encoded(noise(8, 8), "WEBP")


def images(*keys: str) -> list[dict[str, str]]:
    return [{"sha256": key, "source": f"{key[-4:]}.png"} for key in keys]


def test_the_first_of_the_order_are_shown(tmp_path: Path) -> None:
    keys = [f"{number:064x}" for number in range(MAX_PICTURES + 6)]
    (tmp_path / "media").mkdir()
    for key in keys[1:]:
        thumbnail_file(tmp_path, key).write_bytes(WEBP)
    shown = ShownPictures(tmp_path)
    assert shown.numbers_of(json.dumps(images(*keys))) == list(range(len(keys)))
    assert shown.numbers_of(images(keys[5], keys[5])) == [5, 5]
    order = [*range(len(keys))][::-1]
    plain = shown.plain([*order, *order])
    assert [place for place, (_, address) in enumerate(plain) if address] == list(range(6, len(keys)))
    assert [bool(address) for _, address in shown.plain([0, 1])] == [False, True] + [False] * (len(keys) - 2)


@pytest.mark.parametrize("value", [None, "", "{", 3, "[1]", '[{"sha256": "a"}]', '{"a": 1}', [None]])
def test_a_column_of_another_form_has_no_pictures(value: Any, tmp_path: Path) -> None:
    assert ShownPictures(tmp_path).numbers_of(value) == []


def test_what_is_no_thumbnail_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "secret.webp").write_bytes(WEBP)
    key, svg, large = (f"{number:064x}" for number in range(3))
    thumbnail_file(tmp_path, key).write_bytes(WEBP)
    thumbnail_file(tmp_path, svg).write_bytes(b"<svg onload='alert(1)'/>")
    thumbnail_file(tmp_path, large).write_bytes(WEBP + bytes(MAX_PICTURE_BYTES))
    shown = ShownPictures(tmp_path)
    numbers = shown.numbers_of(images("../secret", svg, large, key))
    assert [bool(address) for _, address in shown.plain(numbers)] == [False, False, False, True]
