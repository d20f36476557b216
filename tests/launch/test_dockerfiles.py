"""Layers of the images: what is compiled and installed comes before our own files, so that an edit repeats neither."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.source import ROOT

DOCKERFILES = sorted((ROOT / "launch" / "docker").glob("Dockerfile.*"))
SET_UP = {"tools/set_up.sh", "tools/check_environment.py"}
EARLY = {"pyproject.toml", "constraints.txt", "LICENSE", "mcore_rl/__init__.py"} | SET_UP
HEAVY = re.compile(r"set_up\.sh|pip install")


def steps(path: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line, with continued lines joined."""
    text = re.sub(r"\\\n", " ", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def copied(path: Path) -> list[str]:
    """What is copied before the last heavy step."""
    lines = steps(path)
    last = max(number for number, (name, rest) in enumerate(lines) if name == "RUN" and HEAVY.search(rest))
    return [each for name, rest in lines[:last] if name == "COPY" for each in rest.split()[:-1]]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_edit_of_ours_repeats_no_heavy_step(path: Path) -> None:
    early = copied(path)
    assert set(early) <= EARLY and "pyproject.toml" in early
    assert ("COPY", ". .") in steps(path), "and then all that .dockerignore lets through"


def test_what_is_copied_early_is_enough_to_install_ours(tmp_path: Path) -> None:
    """The editable install of setuptools, from those files alone, finds what is copied after it."""
    for name in EARLY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").touch()
    build = "import setuptools.build_meta as b; print(b.build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=True)
    site = tmp_path / "site"
    zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).extractall(site)
    shutil.copytree(ROOT / "mcore_rl", tmp_path / "mcore_rl", dirs_exist_ok=True)
    look = "import site, sys; site.addsitedir(sys.argv[1]); import mcore_rl.config.launch as ours; print(ours.__file__)"
    command = [sys.executable, "-c", look, str(site)]
    done = subprocess.run(command, cwd="/", env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("mcore_rl/config/launch.py")
