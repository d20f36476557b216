"""The shadow of every recipe trains two steps on CPU, by the main program, with nothing of Megatron or vLLM left out.

One Ray for all of them; each has its own training processes and engines.  What a shadow is: ``tests/support/shadows``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.config.compose import as_dict
from mcore_rl.config.launch import load_recipe, recipe_names
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import Mode, RayInitConfig
from mcore_rl.controller.programs.sft import SFT
from mcore_rl.controller.programs.train import run_training
from mcore_rl.families.registry import family_of
from mcore_rl.planning.recipes import recipe_config_json
from mcore_rl.runtime.cluster import ray_cluster
from tests.support import shadows
from tests.support.composed import recipe

NAMES = [name for name in recipe_names() if not name.startswith(("arithmetic", "products"))]
# Of each kind of layout and of roles one is of the tier `ci`, and one alone of `test`.  The others are of `full`.
QUICK = ("deepseek_7b_ppo", "gemma2_2b_sft", "mixtral_8x7b_rloo", "qwen2_7b_grpo", "qwen3_4b_distill_30b_a3b")
FIRST = "qwen2_7b_grpo"


def tier_of_shadow(name: str) -> str:
    if name == FIRST:
        return "test"
    return "ci" if name in QUICK else "full"


BESIDE = ("critic", "teacher")  # roles with processes of their own


@dataclass
class Trained:
    """A shadow that has run."""

    recipe: RunConfig | SftConfig
    config: RunConfig | SftConfig
    directory: Path
    metrics: list[dict[str, Any]]


@cache
def family(name: str) -> str:
    run = recipe(name)
    return family_of(recipe_config_json(run), pictures=run.sees_pictures).name


def shadow(name: str, task: Path, directory: Path) -> RunConfig | SftConfig:
    return load_recipe(name, shadows.shadow(recipe(name), family(name), task, directory))


@pytest.mark.parametrize("name", NAMES)
def test_a_shadow_is_its_recipe_but_for_sizes(name: str, tmp_path: Path) -> None:
    made = shadow(name, tmp_path, tmp_path)
    assert (run_violations(made) if isinstance(made, RunConfig) else made.violations()) == []
    changed = shadows.differing(as_dict(recipe(name)), as_dict(made))
    assert [key for key in changed if not f"{key}.".startswith(tuple(f"{each}." for each in shadows.SMALLER))] == []
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        whole, part = (getattr(run.actor.parallel, axis) for run in (recipe(name), made))
        assert part in (1, min(whole, 2))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Iterator[Path]:
    """The files of all shadows, and a Ray that they share."""
    directory = shadows.write_task(tmp_path_factory.mktemp("shadows"))
    with ray_cluster(RayInitConfig()):
        yield directory


def features(name: str) -> set[str]:
    """What of a shadow another may stand for: axes of the layout, program, critic, teacher."""
    run = recipe(name)
    layout, _ = shadows.reduced(run.actor.parallel, run.trainer.world_size)
    axes = {axis for axis in ("tp", "pp", "vpp", "cp", "ep", "etp") if getattr(layout, axis) > 1}
    program = {"sft"} if isinstance(run, SftConfig) else {f"{role}: {role in run.roles}" for role in BESIDE}
    return {*axes, *program}


def test_the_quick_ones_stand_for_all() -> None:
    assert set().union(*map(features, NAMES)) == set().union(*map(features, QUICK))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.tier(tier_of_shadow(name))) for name in NAMES],
)
def trained(request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    name, directory = request.param, tmp_path_factory.mktemp("run")
    config = shadow(name, task, directory)
    program = SFT.train(config) if isinstance(config, SftConfig) else run_training(config)
    assert asyncio.run(program) == 0
    return Trained(recipe(name), config, directory, shadows.metrics_of(directory))


@pytest.mark.timeout(600)
def test_trains_on_cpu(trained: Trained) -> None:
    assert [line["step"] for line in trained.metrics] == [1, 2]
    weights_move(trained)
    assert all(line["actor/skipped_updates"] == 0 for line in trained.metrics)
    # Between 1 and 10 for these weights; a norm over zeros, or sums in place of means, make thousands.  In one of the
    # steps it may be near 0: where by chance both samples of every prompt score the same.  SPPO's target of a whole
    # response is eta = 1000 times a win rate.
    most = 5000 if isinstance(trained.config, RunConfig) and trained.config.actor.loss_mode == "sppo" else 100
    assert 0.1 < max(line["actor/grad_norm"] for line in trained.metrics) < most
    if isinstance(trained.config, RunConfig):
        steps_are_sane(trained.config, trained.metrics)
        validates(trained.config, trained.metrics[-1])
        samples_are_of_the_recipe(trained)
        if shadows.has_agent(trained.recipe):
            agents_ran(trained)
    else:
        assert trained.metrics[1]["sft/val_loss"] > 0


def agents_ran(trained: Trained) -> None:
    """Several turns, and where the recipe has tools, calls of them."""
    assert isinstance(trained.config, RunConfig)
    for line in trained.metrics:
        assert line["agent/turns_max"] > 1 and 0 < line["agent/trained_share"] < 1 and line["agent/lost"] == 0
        assert (line["agent/calls_mean"] > 0) is bool(trained.config.rollout.agent.tools)
    rows = shadows.rollouts_of(trained.directory, 1)
    others = {each["author"] for row in rows if row["turns"] > 1 for each in json.loads(row["segments"])}
    assert others == {"prompt", "model", "tool" if trained.config.rollout.agent.tools else "user"}


def steps_are_sane(config: RunConfig, metrics: list[dict[str, Any]]) -> None:
    first, second = metrics
    for line in metrics:
        # Two implementations in float32, and few layers; a wrong weight makes 0.01 and more.  What older weights drew
        # differs by what they have learnt since.
        is_fresh = line.get("rollout/staleness_max", 0) == 0
        assert is_fresh or (line is second and config.trainer.mode is not Mode.sync)
        assert line["rollout/logprob_diff_max"] < (1e-4 if is_fresh else 0.1)
        for role in ("critic", "process_reward"):
            assert (f"{role}/grad_norm" in line) is (role in config.roles)
        assert ("kl/reward" in line) is config.algorithm.use_kl_in_reward
        assert ("kl/loss" in line) is config.actor.use_kl_loss
        assert ("distill/reverse_kl" in line) is ("teacher" in config.roles)
    if config.algorithm.use_kl_in_reward:
        assert first["kl/reward"] == 0 != second["kl/reward"], "the policy begins as the reference"


def validates(config: RunConfig, last: dict[str, Any]) -> None:
    sources = {
        "gsm8k": "openai/gsm8k",
        "gsm8k-xml": "gsm8k_xml",
        "math": "DigitalLearningGmbH/MATH-lighteval",
        "aime24": "aime24",
        "gsm8k-tools": "openai/gsm8k",
        "gsm8k-interaction": "openai/gsm8k",
        "aime24-interpreter": "aime24",
        "eurus2-rl": "numina_cn_k12",
        "geo3k": "hiyouga/geometry3k",
    }
    for path in config.data.val_files:
        assert f"val/{sources[Path(path).parent.name]}/reward" in last


def samples_are_of_the_recipe(trained: Trained) -> None:
    assert isinstance(trained.config, RunConfig)
    rows = shadows.rollouts_of(trained.directory, 1)
    assert len(rows) == trained.config.data.train_batch_size * trained.config.rollout.n
    assert {row["error"] for row in rows} == {None}


def weights_move(trained: Trained) -> None:
    """Each learning rate of a recipe is enough for float32 to see."""
    before, after = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (Path(trained.config.model.path), trained.directory / "hf" / "final")
    )
    assert before.keys() == after.keys()
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert len(moved) > 0.5 * len(before), moved
