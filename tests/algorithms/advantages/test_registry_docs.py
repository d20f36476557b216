"""docs/algorithms.md names every row, its paper, and overrides that the configuration takes."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest
from mcore_rl.algorithms.losses.registry import POLICY_LOSSES

from mcore_rl.algorithms.advantages.estimation import ADVANTAGES
from mcore_rl.config.algorithm import algorithm_violations
from mcore_rl.config.roles import actor_violations
from mcore_rl.config.run import GROUPED, RunConfig

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^\| ([^|]+) \| `((?:algorithm|actor)\.[^`]+)` \|$", TEXT, re.MULTILINE))


def test_every_row_and_its_paper_is_documented() -> None:
    for mode, row in {**ADVANTAGES, **POLICY_LOSSES}.items():
        lines = [line for line in TEXT.splitlines() if line.startswith(f"| `{mode.value}` |")]
        paper = row.paper if row.paper.startswith("arXiv") else "Williams, 1992"
        assert any(paper in line for line in lines), mode


def test_the_promised_recipes_are_there() -> None:
    promised = "PPO, GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, ReMax, GSPO, CISPO, GPG, OPO"
    assert list(RECIPES) == promised.split(", ")


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_is_taken_by_the_configuration(name: str) -> None:
    run = RunConfig()
    for override in RECIPES[name].split():
        key, _, text = override.partition("=")
        *groups, leaf = key.split(".")
        owner: object = run
        for group in groups:
            owner = getattr(owner, group)
        default = getattr(owner, leaf)  # AttributeError: no such key
        if isinstance(default, Enum):
            setattr(owner, leaf, type(default)(text))
        elif isinstance(default, bool):
            setattr(owner, leaf, {"true": True, "false": False}[text])
        else:
            setattr(owner, leaf, float(text))
    unset = actor_violations(RunConfig().actor)  # what has no default
    assert algorithm_violations(run.algorithm) == [] and actor_violations(run.actor) == unset


def test_the_configuration_knows_what_estimators_need() -> None:
    for estimator, row in ADVANTAGES.items():
        run = RunConfig()
        run.algorithm.adv_estimator = estimator
        assert run.needs_critic == ("values" in row.needs)
        assert run.needs_greedy == ("greedy" in row.needs)
        assert (estimator in GROUPED) == ("group" in row.needs)
