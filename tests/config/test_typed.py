"""Interpolations: each is resolved where it stands, also below names with dots."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.typed import resolved
from mcore_rl.ground.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"path": "m", "tokenizer_path": "${model.path}/t"},
    "teacher": {
        "path": "${.by_source}",
        "by_source": {"openai/gsm8k.v2": "${model.path}", "a.b": "${model.tokenizer_path}", "c": "x"},
    },
    "data": {"files": ["${model.path}.parquet"], "alias": "${teacher.by_source.c}", "size": 3},
}


def test_an_interpolation_is_resolved_where_it_stands() -> None:
    by_source = {"openai/gsm8k.v2": "m", "a.b": "m/t", "c": "x"}
    assert resolved(TREE) == {
        "model": {"path": "m", "tokenizer_path": "m/t"},
        "teacher": {"path": by_source, "by_source": by_source},
        "data": {"files": ["m.parquet"], "alias": "x", "size": 3},
    }


def test_every_interpolation_without_a_value_is_named() -> None:
    tree = {"teacher": {"by_source": {"a.b": "${no.such}", "c": "???"}}, "model": {"path": "${model.path}"}}
    with pytest.raises(ConfigError) as error:
        resolved(tree)
    keys = [each.key for each in error.value.violations]
    assert keys == ["teacher.by_source.a.b", "teacher.by_source.c", "model.path"]
