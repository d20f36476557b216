"""Which teacher teaches a row, and how several are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.bounds import file_violations
from mcore_rl.config.compose import as_yaml, compose
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import Teachers, snapshot_of
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.ground.errors import ConfigError

TAUGHT = ("algorithm=distill", "model.path=m", "data.train_files=[t]", "data.val_files=[v]")


def run_of(*overrides: str, directory: Path | None = None, name: str | None = None) -> RunConfig:
    return compose(RunConfig, "train", [*TAUGHT, *overrides], directory, name)


def said(run: RunConfig) -> list[str]:
    return [str(each) for each in run_violations(run)]


def test_a_teacher_of_a_data_source_and_one_of_the_rest() -> None:
    """Two sources have one teacher, of which there is one set of weights."""
    run = run_of("teacher.path=/rest", "teacher.by_source={openai/gsm8k: /math, math: /math, a.b: /code}")
    assert said(run) == []
    teachers = run.teachers
    assert teachers == Teachers("/rest", {"openai/gsm8k": "/math", "math": "/math", "a.b": "/code"})
    assert teachers is not None and teachers.directories == ("/rest", "/math", "/code")
    assert teachers.names == ("teacher.path", "openai/gsm8k", "math", "a.b") and teachers.numbers == (0, 1, 1, 2)
    assert [teachers.name_of(each) for each in ("math", "a.b", "other")] == [2, 3, 0]
    assert teachers.untaught(["other", "math"]) == [] and teachers.are_several
    assert [snapshot_of(number) for number in range(3)] == [None, "teacher_1", "teacher_2"]
    assert run.weights_of(ROLES["teacher"]) == "/rest"
    assert run.checkpoints_of(ROLES["teacher"]) == {
        "teacher.path": "/rest",
        "teacher.by_source.openai/gsm8k": "/math",
        "teacher.by_source.math": "/math",
        "teacher.by_source.a.b": "/code",
    }


def test_without_a_teacher_of_the_rest() -> None:
    teachers = run_of("teacher.by_source={math: /math, code: m}").teachers
    assert teachers is not None and teachers.rest is None and teachers.numbers == (0, 1)
    assert teachers.directories == ("/math", "m"), "the policy's first weights may teach, too"
    assert teachers.untaught(["chat", "math", "chat", "logic"]) == ["chat", "logic"]
    alone = run_of("teacher.path=t").teachers
    assert alone == Teachers("t", {}) and not alone.are_several and alone.directories == ("t",)
    assert compose(RunConfig, "train", ["algorithm=grpo"]).teachers is None


def test_a_yaml_file_says_the_same(tmp_path: Path) -> None:
    wanted = {"openai/gsm8k": "/math", "1e3, of all": "0123"}
    (tmp_path / "mine.yaml").write_text(f"defaults: [train, _self_]\nteacher:\n  by_source: {wanted}\n")
    run = run_of(directory=tmp_path, name="mine")
    assert run.teachers == Teachers(None, wanted) and "teacher.by_source.openai/gsm8k" in run.written
    assert run_of("teacher.by_source.math=x", directory=tmp_path, name="mine").teachers == Teachers(
        None, {**wanted, "math": "x"}
    )
    (tmp_path / "again.yaml").write_text(as_yaml(run))
    assert compose(RunConfig, "train", [], tmp_path, "again") == run


def test_the_loss_knows_the_names_of_several() -> None:
    divergence = "algorithm.distill.divergence=reverse_kl"
    several = run_of("teacher.path=t", "teacher.by_source={math: s}", divergence)
    assert several.loss_of(several.policy).taught_by == ("teacher.path", "math")
    one = run_of("teacher.path=t", divergence)
    assert one.loss_of(one.policy).taught_by == ()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("teacher.by_source={math: ''}", "teacher.by_source[math]=: is empty"),
        ("teacher.by_source={teacher.path: x}", "teacher.path are no names of data sources"),
        ("teacher.by_source={}", "teacher.path=None: is not set"),
    ],
)
def test_what_is_no_teacher(override: str, problem: str) -> None:
    (violation,) = said(run_of(override))
    assert problem in violation


def test_a_teacher_of_nobody_is_not_read() -> None:
    run = compose(RunConfig, "train", [*TAUGHT[1:], "algorithm=grpo", "teacher.by_source={a.b: c}"])
    assert said(run) == [
        "teacher.by_source.a.b=c: is not read: there is no teacher. Leave it out, or write algorithm.distill.coef=1"
    ]


@pytest.mark.parametrize("value", ["[a]", "{math: null}", "x"])
def test_what_is_no_mapping(value: str) -> None:
    with pytest.raises(ConfigError, match=r"teacher.by_source"):
        run_of(f"teacher.by_source={value}")


def test_each_directory_is_looked_for() -> None:
    run = run_of("teacher.by_source={math: /not/there, hub: owner/name}")
    of_teachers = [each for each in file_violations(run) if each.key.startswith("teacher.")]
    assert [(each.key, each.value) for each in of_teachers] == [("teacher.by_source[math]", "/not/there")]
