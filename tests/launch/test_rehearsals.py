"""Recipes rehearsed at full size by mcore-rl rehearse: the planner's figures, waits, and this machine's memory."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.launch import recipe_names
from mcore_rl.parallel.layout import Layout
from mcore_rl.rehearsal.rank import ranks_of_stages
from tests.house.source import ROOT
from tests.support import composed

NEAR = 0.05  # the planner's device peak beside the rehearsal's
MOST_RESIDENT = 2 << 30
QUICK = [
    ("mixtral_8x22b_rloo", 48),
]  # experts, the last stage
# Which recipes train in stages, and the ranks of interest: ``test_all_stages_of_interest_are_there`` holds them against
# the recipes, for composing all of them here would take every process of pytest seconds before its first test.
RANKS = {
    "deepseek_v3_grpo": (0, 64, 112),
    "deepseek_v3_grpo_async": (0, 64, 112),
    "mixtral_8x22b_grpo_async": (0, 32, 48),
    "mixtral_8x22b_grpo_lora": (0, 8),
    "mixtral_8x22b_rloo": (0, 32, 48),
    "mixtral_8x7b_rloo": (0, 8),
    "qwen25_72b_grpo": (0, 16),
    "qwen2_7b_gpg": (0, 4),
    "qwen25_vl_7b_grpo": (0, 4),
    "qwen2_7b_grpo": (0, 8),
    "qwen3_235b_a22b_grpo": (0, 64, 112),
}
UNPUBLISHED = ("arithmetic_grpo", "arithmetic_sft", "products_grpo", "products_sft")  # models of no checkpoint
ALL = [(name, rank) for name in recipe_names() if name not in UNPUBLISHED for rank in RANKS.get(name, (0,))]


def ran(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "rehearse.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)


def held(recipe: str, rank: int, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The values of each role, after what holds for every recipe."""
    out, page = folder / "rehearsal.json", folder / "rehearsal.html"
    done = ran([f"recipe={recipe}", f"rank={rank}", f"out={out}", f"page={page}", *overrides])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "train step 2 ..." in done.stderr, "a line of progress"
    drawn = ET.fromstring(page.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))
    assert drawn.find(".//svg") is not None
    roles: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["roles"]
    for role in roles:
        assert abs(role["planned"]["difference"]) < NEAR, (role["role"], role["planned"], role["peaks"][-1])
        assert not [read for read in role["host_reads"] if read["reason"] is None]
        assert role["resident_bytes"] < MOST_RESIDENT
        assert [peak["phase"] for peak in role["peaks"]] == ["build", "score", "train step 1", "train step 2"]
        state = {name: role["peaks"][-1]["parts"][name] for name in ("gradients", "optimizer")}
        # The tables' buckets end at other places than Megatron's only by padding.
        for name, num_bytes in state.items():
            assert num_bytes == pytest.approx(role["planned"][name], rel=1e-3), name
    return roles


@pytest.mark.tier("ci")
@pytest.mark.parametrize(("recipe", "rank"), QUICK)
def test_a_recipe(recipe: str, rank: int, tmp_path: Path) -> None:
    roles = held(recipe, rank, tmp_path)
    others = {"qwen25_05b_ppo": ["critic"], "qwen25_05b_prime": ["process_reward"]}
    assert [role["role"] for role in roles] == ["actor", *others.get(recipe, [])]


@pytest.mark.tier("full")
@pytest.mark.parametrize(("recipe", "rank"), [each for each in ALL if each not in QUICK])
def test_every_recipe_at_its_first_middle_and_last_stage(recipe: str, rank: int, tmp_path: Path) -> None:
    held(recipe, rank, tmp_path)


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("recipe", "rank", "overrides"),
    [
        ("qwen3_4b_distill_30b_a3b", 0, ["algorithm.distill.divergence=forward_kl"]),
        ("qwen3_4b_distill_30b_a3b", 0, ["algorithm.distill.divergence=jensen_shannon"]),
        ("qwen2_7b_grpo", 8, ["actor.use_kl_loss=true", "actor.kl_loss_type=full"]),
    ],
)
def test_a_loss_over_the_vocabulary(recipe: str, rank: int, overrides: list[str], tmp_path: Path) -> None:
    """The plan has its gradient, and a teacher's rows and logits: without them it would be off by more than 3 %."""
    (role,) = held(recipe, rank, tmp_path, *overrides)
    assert abs(role["planned"]["difference"]) < 0.01
    assert role["planned"]["over_vocabulary"] > 0.03 * role["peaks"][-1]["num_bytes"]


def test_all_stages_of_interest_are_there() -> None:
    layout = Layout.of(composed.recipe("mixtral_8x22b_rloo").actor.parallel, 64)
    assert {layout.coords(rank).pp for name, rank in ALL if name == "mixtral_8x22b_rloo"} == {0, 2, 3}
    assert set(QUICK) <= set(ALL)
    recipes = {name: run for name in recipe_names() if (run := composed.recipe(name)).recipe.checkpoint}
    ranks = {name: ranks_of_stages(run.actor.parallel, run.trainer.world_size) for name, run in recipes.items()}
    assert ALL == [(name, rank) for name in ranks for rank in ranks[name]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "recipe=: is not given"),
        (["recipe=no_such"], "there is no no_such.yaml"),
        (["recipe=qwen25_05b_ppo", "rank=1"], "rank=1: the run has 1 ranks. Write rank=0"),
        (["recipe=qwen25_05b_ppo", "rank=x"], "rank=x: is no number"),
        (["recipe=qwen25_05b_ppo", "role=reference"], "is not trained in this run. Write role=actor or critic"),
        (["recipe=qwen25_05b_ppo", "actor.parallel.tp=3"], "is not divisible by tp=3"),
    ],
)
def test_mistakes_are_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("error: ") == 1
