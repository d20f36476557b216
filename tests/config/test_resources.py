"""A wheel has every file that the package opens: held against what git tracks, without building one."""

from __future__ import annotations

from pathlib import Path

import pytest
from setuptools import Distribution

from mcore_rl.config import resources
from mcore_rl.config.launch import cluster_names, recipe_names
from mcore_rl.families.checkpoints import known_checkpoints
from tests.house.source import ROOT, repository_files

# Folder or file of the repository -> where it lies in a wheel.
SHIPPED = {
    "mcore_rl/": "mcore_rl/",
    "launch/recipes/": "mcore_rl/resources/recipes/",
    "launch/clusters/": "mcore_rl/resources/clusters/",
    "launch/slurm/train.sbatch": "mcore_rl/resources/slurm/train.sbatch",
    "model_configs/": "mcore_rl/resources/model_configs/",
    "docs/": "mcore_rl/resources/docs/",
    "constraints.txt": "mcore_rl/resources/constraints.txt",
}


def wheel_files() -> set[str]:
    """What setuptools would put into a wheel, by pyproject.toml; it reads paths from the working directory."""
    distribution = Distribution({"script_name": "setup.py"})  # it looks for one, to leave it out
    distribution.parse_config_files(["pyproject.toml"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    built = Path(build.build_lib)
    return {str(Path(path).relative_to(built)) for path in build.get_outputs(include_bytecode=False)}


def tracked_files() -> set[str]:
    """The repository's files that a wheel is to have, by their names in it."""
    return {
        there + path.removeprefix(here)
        for path in repository_files()
        for here, there in SHIPPED.items()
        if path.startswith(here) and not path.startswith("mcore_rl/resources/")
    }


def test_a_wheel_has_every_file_that_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert wheel_files() == tracked_files()


@pytest.mark.parametrize("link", sorted((ROOT / "mcore_rl" / "resources").rglob("*")), ids=lambda path: path.name)
def test_a_checkout_has_each_of_them_once(link: Path) -> None:
    """What people edit is what runs: no file of resources/ is a copy."""
    assert link.is_symlink() or link.is_dir() or any(parent.is_symlink() for parent in link.parents)
    assert link.resolve().is_relative_to(ROOT) and link.exists()


def test_paths_name_the_folders_that_people_read() -> None:
    assert resources.RECIPES == (ROOT / "launch" / "recipes").resolve()
    assert resources.PAGES == (ROOT / "docs").resolve() and resources.SBATCH.is_file()
    assert "arithmetic_grpo" in recipe_names() and "cpu" in cluster_names()
    assert "tiny-mixtral" in known_checkpoints(resources.MODEL_CONFIGS)
