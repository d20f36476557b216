"""The rungs cuda and rocm resolve together with the lock: by the record of what their distributions require, and by uv.

The record (requirements.json, by ``tools/record_requirements.py``) has the distributions that the CPU rung has not,
at versions that uv found.  One set of versions that meets every requirement is a proof that the rung resolves;
what is locked has the versions of constraints.txt, and says itself, where it is installed, what it requires.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.house.test_pins import BASE, EXTRAS, PROJECT
from tests.support.skips import NOT_INSTALLED
from tests.support.wheels import wheel
from tools.check_environment import cuda_packages, kept_constraints
from tools.record_requirements import MACHINES, PYTHONS, RECORD, RUNGS, holds_for, locked, resolve, uv_program

Record = Mapping[str, list[str]]  # NAME==VERSION -> Requires-Dist
ONLY_ON: dict[str, list[str]] = json.loads(RECORD.read_text())["only_on"]  # what is not resolved to on every Python
RECORDED: Record = json.loads(RECORD.read_text())["requires"]
ROCM: Record = {f"torch=={locked()['torch']}": []}  # the image's own, which brings what it needs
ROOTS = {rung: [*BASE, *EXTRAS[rung], *EXTRAS["dev"]] for rung in ("cuda", "rocm")}


@cache
def installed_requires(name: str) -> tuple[str, ...]:
    return tuple(metadata.requires(name) or ())


def walk(roots: list[Requirement], record: Record, lock: Mapping[str, str], python: str) -> tuple[set[str], list[str]]:
    """(the distributions that ``roots`` come to, every requirement that the lock or else the record does not meet)."""
    place = {"python_version": python, "python_full_version": f"{python}.1", "platform_system": "Linux",
             "sys_platform": "linux", "platform_machine": "x86_64"}  # fmt: skip
    versions = dict(pin.split("==") for pin in record if python in ONLY_ON.get(pin, PYTHONS)) | lock
    unmet, seen = [], set()
    pending = [("mcore_rl", requirement) for requirement in roots if holds_for(python, requirement)]
    while pending:
        asker, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        pin = f"{name}=={versions.get(name)}"
        if name not in versions or (pin not in record and name not in lock):
            unmet.append(f"{asker} requires {requirement}, of which nothing is recorded")
            continue
        if not requirement.specifier.contains(versions[name], prereleases=True):
            unmet.append(
                f"{asker} requires {requirement}: {'constraints.txt' if name in lock else 'the record'} has {pin}"
            )
        for extra in {"", *requirement.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            required = map(Requirement, record[pin] if pin in record else installed_requires(name))
            pending += [
                (pin, one) for one in required if one.marker is None or one.marker.evaluate(place | {"extra": extra})
            ]
    return {name for name, _ in seen}, unmet


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("rung", "record"), [("cuda", RECORDED), ("rocm", ROCM)])
def test_the_lock_and_the_record_meet_every_requirement_of_the_rung(rung: str, record: Record, python: str) -> None:
    names, unmet = walk(ROOTS[rung], record, locked(python), python)
    assert unmet == [], "mend pyproject.toml or constraints.txt; then python tools/record_requirements.py"
    assert ("vllm" in names) == (rung == "cuda")
    assert bool(cuda_packages(names)) == (rung == "cuda"), "on ROCm only the image brings builds for a device"
    doubled = {name for name in names if name.startswith(("nvidia-cudnn-cu", "nvidia-nccl-cu"))}
    assert doubled == ({"nvidia-cudnn-cu13", "nvidia-nccl-cu13"} if rung == "cuda" else set()), "one each: torch's own"


def test_a_lock_that_the_vendor_does_not_allow_is_named() -> None:
    """What ``constraints.txt`` had when the rung cuda could not be installed."""
    _, unmet = walk(ROOTS["cuda"], RECORDED, locked() | {"apache-tvm-ffi": "0.1.15.post2"}, "3.11")
    has = "constraints.txt has apache-tvm-ffi==0.1.15.post2"
    assert f"vllm==0.32.0 requires apache-tvm-ffi==0.1.11: {has}" in unmet
    assert all(line.endswith(has) for line in unmet), unmet
    _, unmet = walk([Requirement("vllm==0.33.*")], RECORDED, locked(), "3.11")
    assert unmet == ["mcore_rl requires vllm==0.33.*: the record has vllm==0.32.0"]
    without = {pin: lines for pin, lines in RECORDED.items() if not pin.startswith("numba==")}
    _, unmet = walk(ROOTS["cuda"], without, locked("3.12"), "3.12")
    assert unmet == ["vllm==0.32.0 requires numba==0.65.0, of which nothing is recorded"]


def test_the_pythons_are_those_that_pip_lets_in() -> None:
    assert PYTHONS == ("3.11", "3.12", "3.13")
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(20) if allowed.contains(f"3.{minor}.9")] == [11, 12, 13]


@pytest.mark.tier("full")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rung", RUNGS)
def test_the_rung_resolves_from_wheels_of_the_index(rung: str, machine: str, python: str) -> None:
    """No interpreter but this one is needed.  Wheels alone: what has none for a Python or a machine is not found."""
    if uv_program() is None:
        pytest.skip(f"{NOT_INSTALLED}uv, which the extra `dev` brings")
    resolved = resolve(rung, python, machine)
    lock = locked(python)
    assert {name: resolved[name] for name in resolved.keys() & lock} == {n: v for n, v in lock.items() if n in resolved}
    assert ("vllm" in resolved) == (rung == "cuda")


# ---- nothing replaces the build that is there ----


@pytest.mark.tier("ci")
def test_the_torch_of_an_image_is_kept_or_pip_stops(tmp_path: Path) -> None:
    """The image has torch from a file, its version labelled; the index has the next, and something asks for it."""
    index, image = tmp_path / "index", tmp_path / "image"
    index.mkdir(), image.mkdir()
    wheel(image, "torch", "2.13.0+git733fca1")
    wheel(index, "torch", "2.14.0")
    wheel(index, "allows_it", "1", "torch==2.13.0")
    wheel(index, "wants_more", "1", "torch>=2.14")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"

    # No constraint, index or wheel that this machine gives every pip.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    alone["PIP_CONFIG_FILE"] = os.devnull

    def pip(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-index",
            f"--find-links={index}",
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=alone)

    def torch() -> str:
        command = [python, "-c", "from importlib import metadata; print(metadata.version('torch'))"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert pip(str(next(image.iterdir()))).returncode == 0
    kept = tmp_path / "kept.txt"
    kept.write_text("\n".join(kept_constraints("rocm", {"torch": torch()})))
    assert pip("allows_it", f"--constraint={kept}").returncode == 0
    refused = pip("wants_more", f"--constraint={kept}")
    assert refused.returncode != 0
    assert "torch==2.13.0+git733fca1" in refused.stdout + refused.stderr
    assert torch() == "2.13.0+git733fca1"
    assert pip("wants_more").returncode == 0
    assert torch() == "2.14.0", "without the constraint pip takes the index's: the test guards something"
