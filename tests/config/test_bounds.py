"""Every setting of every command: nonsense is refused, sense is not, and no value ends in an exception of ours."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml

from mcore_rl.config.algorithm_object import Algorithm
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.bounds import (
    InputFile,
    Interval,
    Lines,
    PositiveInt,
    Setting,
    Share,
    Unsound,
    UnsoundReadError,
    bound_violations,
    check,
    file_violations,
    settings,
    settings_of,
)
from mcore_rl.config.cluster import ClusterConfig, cluster_violations
from mcore_rl.config.compose import compose
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations
from mcore_rl.config.generate import GenerateConfig, generate_violations
from mcore_rl.config.launch import load_cluster
from mcore_rl.config.names import field_of, has_key
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig, any_run_schema, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.typed import typed
from mcore_rl.config.yaml_files import parse_yaml
from mcore_rl.ground.errors import ConfigError, Violation
from tests.support.number_oracle import CLUSTER, NUMBERS, never

Refusals = Callable[..., list[Violation]]
SOUND = {
    "train": ("algorithm=ppo", "model.path=m", "data.train_files=[t]", "data.val_files=[v]"),
    "sft": ("model.path=m", "data.train_files=[t]"),
    "prefer": ("model.path=m", "data.train_files=[t]"),
    "reward": ("model.path=m", "data.train_files=[t]"),
    "generate": ("model.path=m", "data.files=[t]", "out=o.parquet"),
    "evaluate": ("path=r.parquet",),
}
# Of roles that a run of the base has not.
WITH_ROLE = {
    "process_reward": ("algorithm=prime", "model.path=m", "data.train_files=[t]"),
    "teacher": ("algorithm=distill", "teacher.path=m", "model.path=m", "data.train_files=[t]"),
}
PROGRAMS: dict[str, tuple[type[Any], Refusals]] = {
    "train": (any_run_schema(), run_violations),
    "sft": (SftConfig, SftConfig.violations),
    "prefer": (PreferConfig, PreferConfig.violations),
    "reward": (RewardTrainingConfig, RewardTrainingConfig.violations),
    "generate": (GenerateConfig, generate_violations),
    "evaluate": (EvaluateConfig, evaluate_violations),
}
NUMERIC = [
    (program, each)
    for program, (schema, _) in PROGRAMS.items()
    for each in settings(schema)
    if each.kind in (int, float)
]


def refusals(program: str, *overrides: str) -> list[Violation]:
    """What the command says before it imports anything heavy."""
    schema, violations = PROGRAMS[program]
    try:
        return violations(compose(schema, program, [*SOUND[program], *overrides]))
    except ConfigError as error:
        return list(error.violations)


def of_key(violations: list[Violation], key: str) -> list[Violation]:
    return [each for each in violations if each.key.partition("[")[0] == key]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_base_of_these_tests_is_sound(program: str) -> None:
    assert refusals(program) == []


def test_every_number_has_a_row_in_the_oracle_and_a_range() -> None:
    assert {each.key for _, each in NUMERIC} == NUMBERS.keys()
    assert {each.key for each in settings(ClusterConfig) if each.kind in (int, float)} == CLUSTER.keys()
    bare = [each.key for _, each in NUMERIC if each.kind is int and each.mark(Interval) is None]
    assert bare == [], "an int without a range of its own"


@pytest.mark.parametrize(("program", "each"), NUMERIC, ids=lambda value: getattr(value, "key", value))
def test_a_number_refuses_nonsense_and_takes_sense(program: str, each: Setting) -> None:
    """Set on the composed configuration: composing it for each of three thousand values would take minutes."""
    _, violations = PROGRAMS[program]
    sound = sound_config(program, each.key)
    refused, accepted = NUMBERS[each.key]
    for text in (*refused, *never(accepted, is_float=each.kind is float)):
        assert of_key(with_value(sound, each, text, violations), each.key), f"{each.key}={text} was accepted"
    for text in accepted:
        wrong = of_key(with_value(sound, each, text, bound_violations), each.key)
        assert not wrong, f"{each.key}={text}: {wrong}"


@cache
def sound_config(program: str, key: str = "") -> Any:
    """The sound configuration, as the dataclass that a command gets, of a run that has ``key``."""
    if program == "cluster":
        return load_cluster("cpu")
    role = "teacher" if key.startswith("algorithm.distill.") else key.partition(".")[0]
    written = WITH_ROLE.get(role, SOUND[program])
    config = compose(PROGRAMS[program][0], program, written)
    if not key or has_key(config, key):
        return config
    having = [each.name for each in algorithms().values() if _owns(each, key)]
    return compose(PROGRAMS[program][0], program, [f"algorithm={having[0]}", *SOUND[program][1:]])


def _owns(algorithm: Algorithm, key: str) -> bool:
    own = algorithm.advantages.own_keys | algorithm.loss.own_keys
    return any(f"{key}.".startswith(f"{each}.") for each in own)


def with_value(sound: Any, each: Setting, text: str, violations: Refusals) -> list[Violation]:
    """The violations of ``sound`` with ``text`` as the value of the key, as it stands in a yaml file."""
    *groups, name = field_of(each.key).split(".")
    group = reduce(getattr, groups, sound)
    try:
        made = getattr(typed(type(group), parse_yaml(f"{name}: {text}")), name)
    except (ConfigError, yaml.YAMLError, ValueError) as error:  # as ``compose`` refuses it
        return [Violation(each.key, text, str(error), "")]
    before = getattr(group, name)
    setattr(group, name, made)
    try:
        return violations(sound)
    finally:
        setattr(group, name, before)


@pytest.mark.parametrize("key", CLUSTER)
def test_a_number_of_a_cluster_refuses_nonsense_and_takes_sense(key: str) -> None:
    refused, accepted = CLUSTER[key]
    each = next(each for each in settings(ClusterConfig) if each.key == key)
    sound = sound_config("cluster")
    for text in (*refused, *never(accepted, is_float=each.kind is float)):
        assert of_key(with_value(sound, each, text, cluster_violations), key), f"{key}={text} was accepted"
    for text in accepted:
        assert not of_key(with_value(sound, each, text, bound_violations), key), f"{key}={text} was refused"


ODD = (
    "", "nan", "-inf", "1e999", "-1", "0", "1" + "0" * 40, "null", "true", "[]", "[[1],[2]]", "{}", "{a: {b: 1}}", "٣",
    "'\\u202e'", "'a\\nb'", "'" + "x" * 9000 + "'", "/dev/zero", "/", "~nobody/x", "${model.path}", "???", "0x10",
    "1_0", "2024-01-01", "!!binary eA==", "'\\0'", "-", "=", ",", "yes",
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_odd_value_of_any_key_ends_in_an_exception(program: str) -> None:
    """Every key of the schema with a seeded draw of odd values, beside up to two others that are odd as well."""
    schema, violations = PROGRAMS[program]
    draw, tried = random.Random(16), 0

    def judged(config: Any) -> list[Violation]:
        nonlocal tried
        tried += 1
        wrong = [*violations(config), *file_violations(config)]
        assert all(str(each) and each.problem and each.remedy for each in wrong)
        return wrong

    def beside(others: Sequence[Setting]) -> Refusals:
        if not others:
            return judged
        return lambda config: with_value(config, others[0], draw.choice(ODD), beside(others[1:]))

    for each in settings(schema):
        for text in draw.sample(ODD, 3):
            sound = sound_config(program, each.key)
            others = draw.sample(settings_of(sound), draw.randrange(3))
            with_value(sound, each, text, beside(others))
    assert tried > len(settings(schema)) / 6, "most values are refused by their type"
    assert violations(sound_config(program)) == [], "all is as it was"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trainer.experiment_name", "'a\\nb'"),
        ("trainer.default_local_dir", "''"),
        ("data.prompt_key", "''"),
        ("custom_reward_function.name", "'\\0'"),
        ("data.train_files", "['']"),
        ("model.path", "'" + "x" * 5000 + "'"),
        ("critic.path", "''"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused(key: str, text: str) -> None:
    config = compose(RunConfig, "train", SOUND["train"])
    *groups, name = key.split(".")
    group = reduce(getattr, groups, config)
    setattr(group, name, yaml.safe_load(text.replace(chr(39), chr(34))))
    assert of_key(run_violations(config), key)


def test_texts_of_all_languages_and_lines_where_they_belong_are_taken() -> None:
    config = compose(RunConfig, "train", [*SOUND["train"], "trainer.experiment_name='第一 été'"])
    config.rollout.stop, config.recipe.published.note = ["\n\n", "</s>"], "a\nb"
    assert run_violations(config) == []


@dataclass(kw_only=True)
class Inner:
    share: Share = 0.5


@dataclass(kw_only=True)
class Outer:
    count: PositiveInt = 1
    counts: list[PositiveInt] = field(default_factory=list)
    limit: Annotated[float, Interval("(1, 10]", "Write 2")] | None = None
    files: list[InputFile] = field(default_factory=list)
    note: Lines = ""
    inner: Inner = field(default_factory=Inner)


def test_all_violations_are_said_at_once_with_key_value_and_remedy() -> None:
    config = Outer(count=0, counts=[1, -2], limit=float("nan"), inner=Inner(share=2.0))
    assert [str(each) for each in bound_violations(config, "x.")] == [
        "x.count=0: must be positive. Write 1 or more",
        "x.counts[1]=-2: must be positive. Write 1 or more",
        "x.limit=nan: must be a finite number. Write 2",
        "x.inner.share=2.0: must lie in [0, 1]. Write 1 or less",
    ]
    assert bound_violations(Outer(limit=10.0)) == []
    assert [each.problem for each in bound_violations(Outer(limit=1.0))] == ["must exceed 1"]
    assert [each.problem for each in bound_violations(Outer(limit=11.0))] == ["must be at most 10"]
    assert [each.problem for each in bound_violations(Outer(count=True))] == ["must be a number"]


def test_a_rule_is_run_as_far_as_what_it_reads_is_sound() -> None:
    def rule(config: Outer) -> Iterator[Violation]:
        yield Violation("first", 1, "reads nothing", "Do")
        if config.inner.share > 0:
            yield Violation("second", 1, "reads the share", "Do")
        if 10 % config.count:
            yield Violation("third", 1, "reads the count", "Do")

    def keys(config: Outer) -> list[str]:
        return [each.key for each in check(config, [rule, rule])]

    assert keys(Outer(count=3)) == ["first", "second", "third"] * 2
    assert keys(Outer(count=0)) == ["count", *["first", "second"] * 2]
    assert keys(Outer(inner=Inner(share=-1.0))) == ["inner.share", "first", "first"]
    unsound = Outer(count=0)
    check(unsound, [rule])
    assert unsound == Outer(count=0), "it looks at a copy"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x == 1, lambda x: x < 1, lambda x: 1 % x, lambda x: x * 2, lambda x: f"{x}", str, bool, int, float,
        lambda x: x in {1}, lambda x: x in [1], len, list, lambda x: {x: 1}, os.fspath, lambda x: x.strip(),
        lambda x: min(x, 2), lambda x: -x,
    ],
)  # fmt: skip
def test_whoever_reads_an_unsound_value_is_stopped(read: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsoundReadError):
        read(Unsound())


def test_paths_are_looked_at_only_when_they_are_to_be_opened(tmp_path: Path) -> None:
    missing = Outer(files=[str(tmp_path / "none")])
    assert bound_violations(missing) == []
    assert [each.key for each in file_violations(missing)] == ["files[0]"]


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    config = RunConfig()
    config.rollout.agent.program.url = "http://me:opensesame@host/run"
    (violation,) = [each for each in bound_violations(config) if each.key == "rollout.agent.program.url"]
    assert "has a user or a password in a URL" in violation.problem and "opensesame" not in str(violation)
