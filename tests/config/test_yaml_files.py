"""What a yaml file of the user's may not do: take all memory, nest without end, or block whoever opens it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.config.yaml_files import MAX_BYTES, read_yaml
from mcore_rl.ground.errors import ConfigError

BEGIN = "defaults: [train, _self_]\n"


def bomb(levels: int = 9, width: int = 9) -> str:
    """Yaml whose last value has ``width ** levels`` items once its aliases are written out."""
    lines = [f"a0: &a0 [{','.join('x' * width)}]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def doubling(levels: int) -> str:
    """Yaml whose last key has ``2 ** levels`` keys below it once its aliases are written out."""
    return "m0: &m0 {x: 1}\n" + "".join(f"m{n}: &m{n} {{p: *m{n - 1}, q: *m{n - 1}}}\n" for n in range(1, levels))


BAD = {
    "bomb": (bomb(), "with every alias written out"),
    "map_bomb": (doubling(40), "with every alias written out"),
    "deep": ("model: " + "[" * 5000 + "]" * 5000, "nests deeper"),
    "self": ("a: &a [*a]", "alias of what it stands in"),
    "long": ("x: " + "y" * MAX_BYTES, "bytes, and at most"),
    "list": ("- a\n- b\n", "holds no keys"),
    "torn": ("a: [1", "expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_reader_refuses_it(tmp_path: Path, name: str) -> None:
    text, said = BAD[name]
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    for reading in (
        lambda: read_yaml(path),
        lambda: load_cluster(str(path)),
        lambda: load_recipe(str(path)),
        lambda: compose(RunConfig, "train", [], tmp_path, name),
    ):
        with pytest.raises(ConfigError, match=said):
            reading()


def test_what_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, said in (("pipe", "is a pipe"), ("directory", "is a directory"), ("bytes", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_yaml(tmp_path / f"{name}.yaml")
        with pytest.raises(ConfigError):
            compose(RunConfig, "train", [], tmp_path, name)


def test_files_that_defaults_and_overrides_name_are_read_with_the_same_care(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "bad.yaml").write_text(bomb())
    (tmp_path / "first.yaml").write_text("defaults: [train, {extra: bad}, _self_]\n")
    (tmp_path / "second.yaml").write_text(BEGIN)
    with pytest.raises(ConfigError, match="with every alias written out"):
        compose(RunConfig, "train", [], tmp_path, "first")
    with pytest.raises(ConfigError, match="with every alias written out"):
        compose(RunConfig, "train", ["+extra=bad"], tmp_path, "second")


def test_aliases_within_reason_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\nc: {<<: &m {x: 1}, y: *a}\n")
    assert read_yaml(path) == {"a": ["1", "2"], "b": ["1", "2"], "c": {"x": "1", "y": ["1", "2"]}}
