"""Families of other distributions: installed as a user would, and used by the tools; wrong ones are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from mcore_rl.families.registry import BUILT_IN
from tests.house.source import ROOT
from tests.support.published import TINY, class_config

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme-families"
version = "1.2"
[project.entry-points."mcore_rl.families"]
acme = "acme_families:FAMILY"
{more}
[tool.setuptools]
py-modules = ["acme_families"]
"""
MODULE = """
from dataclasses import replace

from mcore_rl.families import llama

FAMILY = replace(
    llama.FAMILY, name="acme", architectures=("AcmeForCausalLM",), model_type="acme",
    readers=frozenset({"hidden_size", "index_topk"}),
)
NO_FAMILY = 3
OTHER_NAME = replace(FAMILY, name="something")
TAKEN = replace(FAMILY, name="llama")
SAME = replace(FAMILY, name="same")
"""
WRONG = """
missing = "acme_families:NOT_THERE"
no_family = "acme_families:NO_FAMILY"
other_name = "acme_families:OTHER_NAME"
llama = "acme_families:TAKEN"
same = "acme_families:SAME"
absent = "acme_absent:FAMILY"
"""


def installed(folder: Path, more: str = "") -> Path:
    """A folder in which the distribution is installed, by pip."""
    source, target = folder / "source", folder / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT.format(more=more))
    (source / "acme_families.py").write_text(MODULE)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True, cwd=folder)
    return target


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acme") / "model"
    AutoModelForCausalLM.from_config(class_config(TINY["llama"])).save_pretrained(folder)
    config = TINY["llama"] | {"architectures": ["AcmeForCausalLM"], "model_type": "acme", "acme_colour": "red"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_installed_family_is_found_read_and_converted(checkpoint: Path, tmp_path: Path) -> None:
    site = installed(tmp_path)
    code = "from mcore_rl.families.registry import FAMILIES; print(*FAMILIES)"
    assert python(site, "-c", code).stdout.split() == [*BUILT_IN, "acme"]
    tool = str(ROOT / "tools" / "convert_checkpoint.py")
    made = python(site, tool, "to-megatron", "--hf", str(checkpoint), "--out", str(tmp_path / "megatron"))
    assert made.returncode == 0, made.stderr
    assert "acme; verified" in made.stdout
    assert "nobody reads acme_colour" in made.stderr  # of the names that its Family gives
    without = python(tmp_path / "nothing", tool, "to-megatron", "--hf", str(checkpoint), "--out", str(tmp_path / "no"))
    assert without.returncode == 2 and "AcmeForCausalLM" in without.stderr and "Traceback" not in without.stderr


def test_wrong_entry_points_are_named_all_at_once(checkpoint: Path, tmp_path: Path) -> None:
    site = installed(tmp_path, WRONG)
    told = python(site, str(ROOT / "tools" / "convert_checkpoint.py"), "inspect", str(checkpoint))
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "6 problems" in told.stderr
    for said in (
        "entry point absent=acme_absent:FAMILY: of acme-families 1.2 cannot be imported: ModuleNotFoundError",
        "entry point missing=acme_families:NOT_THERE: of acme-families 1.2 cannot be imported: AttributeError",
        "entry point no_family=acme_families:NO_FAMILY: of acme-families 1.2 is no mcore_rl.families.family.Family",
        "entry point other_name=acme_families:OTHER_NAME: of acme-families 1.2 gives a family of another name",
        "entry point llama=acme_families:TAKEN: of acme-families 1.2 has the name of a family that is there",
        "entry point same=acme_families:SAME: of acme-families 1.2 reads AcmeForCausalLM, as a family",
    ):
        assert said in told.stderr
    assert "Mend or uninstall acme-families 1.2" in told.stderr
