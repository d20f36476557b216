"""Checkpoints whose weights may take one another's place, and those whose may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.families.same_architecture import architecture_violations
from tests.support.published import TINY


def written(directory: Path, name: str, **changes: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**TINY[name], **changes}))
    return str(directory)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"num_hidden_layers": 7}, "num_layers 7 and not"),
        ("llama", {"rms_norm_eps": 1e-3}, "norm_epsilon 0.001 and not"),
        ("qwen3", {}, "family qwen3 and not llama"),
    ],
)
def test_the_first_difference_is_named_with_both_checkpoints(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    first, same, other = (
        written(tmp_path / "a", "llama"),
        written(tmp_path / "b", "llama", transformers_version="9"),
        written(tmp_path / "c", name, **changes),
    )
    assert list(architecture_violations({"teacher.path": first, "teacher.by_source.math": same})) == []
    (violation,) = architecture_violations({"teacher.path": first, "x": same, "teacher.by_source.code": other})
    assert (violation.key, violation.value) == ("teacher.by_source.code", other)
    assert f"is another architecture than teacher.path={first}: " in violation.problem and said in violation.problem
