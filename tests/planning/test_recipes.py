"""The models that a plan is made for, of roles with models of their own too."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.algorithm import DistillConfig, Divergence
from mcore_rl.config.compose import compose
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.placement import with_replicas
from mcore_rl.config.run import RunConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.planning.distillation import PRODUCT_ROWS
from mcore_rl.planning.plan import Phase, Place, plan
from mcore_rl.planning.recipes import other_models, recipe_model, run_model
from mcore_rl.planning.search import _run_options, search
from mcore_rl.training.divergence import PRODUCT_ROWS as OF_THE_LOSS
from tests.support.published import TINY

RECIPE = "qwen3_4b_distill_30b_a3b"


def taught(*more: str) -> RunConfig:
    return compose(RunConfig, "train", ["algorithm=distill", "model.path=m", *more])


def test_a_teacher_is_read_where_it_is_or_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"]))
    here = other_models(taught(f"teacher.path={tmp_path}"))
    assert here.keys() == {"teacher"} and here["teacher"].num_layers == TINY["llama"]["num_hidden_layers"]
    named = other_models(taught("teacher.path=t", "recipe.checkpoints.teacher=qwen3-30b-a3b"))
    assert named["teacher"].num_layers == 48 and named["teacher"].moe is not None
    assert other_models(taught("algorithm.distill.coef=0")) == {}
    with pytest.raises(ConfigError, match=r"teacher.path=t: has no config.json.*recipe.checkpoints.teacher=NAME"):
        other_models(taught("teacher.path=t"))


def test_a_plan_counts_the_teacher_s_own_model() -> None:
    """Its weights, from the model alone: 30.5 billion parameters over 8 ranks, in 2 bytes."""
    run = load_recipe(RECIPE)
    assert isinstance(run, RunConfig)
    cluster, model = load_cluster(run.recipe.cluster), run_model(run)
    assert model == recipe_model(run)
    planned = plan(run, model, cluster, other_models(run))
    rows = {row.part: row.num_bytes for peak in planned.peaks for row in peak.rows if row.part == "teacher weights"}
    # Experts are spread over all ranks; attention, embeddings and routers, 1.6 billion, are on each.
    assert rows["teacher weights"] == pytest.approx(2 * ((30.5e9 - 1.6e9) / 8 + 1.6e9), rel=0.05)
    assert planned.seconds["teacher"] > 0
    with pytest.raises(ConfigError, match=r"teacher.parallel.ep=8: the model has no experts"):
        plan(run, model, cluster)  # of a teacher with the student's model


def test_a_plan_counts_what_a_teacher_in_the_loss_needs() -> None:
    """Of Qwen3-30B-A3B beside Qwen3-4B, tp=2 and dp=4: 151,936 tokens, a hidden size of 2,048, two bytes."""
    run = load_recipe(RECIPE)
    assert isinstance(run, RunConfig)
    drawn, taught = (
        replace(run, algorithm=replace(run.algorithm, distill=DistillConfig(coef=1.0, divergence=divergence)))
        for divergence in (Divergence.drawn, Divergence.jensen_shannon)
    )
    cluster, model = load_cluster(run.recipe.cluster), run_model(run)
    before, after = (
        {(row.phase, row.place, row.part): row.num_bytes for peak in planned.peaks for row in peak.rows}
        for planned in (plan(each, model, cluster, other_models(run)) for each in (drawn, taught))
    )
    new = {part for _, _, part in after} - {part for _, _, part in before}
    assert new == {"teacher output and logits", "teacher output, away", "teacher hidden states"}
    assert PRODUCT_ROWS == OF_THE_LOSS
    rows, columns = 16384, 151936 // 2
    product = 2 * columns * (rows + 512)
    assert after[Phase.update, Place.device, "teacher output and logits"] == 2 * columns * 2048 + product
    states = 256 * 4 * 8192 * 2048 * 2
    assert after[Phase.rollout, Place.host, "teacher hidden states"] == states * 2 + states  # of 8 ranks, dp=4
    weights = [rows[Phase.logprobs, Place.device, "teacher weights"] for rows in (before, after)]
    assert weights[0] - weights[1] == 2 * 151936 * 2048  # its own output projection, which only the policy's ranks read


def test_a_search_keeps_the_teacher_s_layout() -> None:
    run = load_recipe(RECIPE)
    cluster, model = load_cluster(run.recipe.cluster), run_model(run)
    fastest = search(run, model, cluster, other_models(run), limit=1).best[0]
    assert isinstance(fastest.run, RunConfig) and isinstance(run, RunConfig)
    assert fastest.run.teacher == run.teacher and fastest.plan.fits
    assert not any(each.startswith("teacher.") for each in fastest.overrides)


def of_three_teachers(run: RunConfig, divergence: Divergence) -> RunConfig:
    """Four data sources; two have one teacher."""
    by_source = {"a": "first", "b": "second", "c": "third", "d": "second"}
    distill = DistillConfig(coef=1.0, divergence=divergence)
    teacher = replace(run.teacher, path=None, by_source=by_source)  # type: ignore[attr-defined]
    return replace(run.with_groups({"teacher": teacher}), algorithm=replace(run.algorithm, distill=distill))


def test_a_plan_counts_each_teacher_once() -> None:
    """Of three, two are in host memory beside the live one, and the policy has the output rows of all."""
    run = load_recipe(RECIPE)
    assert isinstance(run, RunConfig)
    cluster, model = load_cluster(run.recipe.cluster), run_model(run)
    others = other_models(run)
    for divergence in (Divergence.drawn, Divergence.forward_kl):
        one = replace(run, algorithm=replace(run.algorithm, distill=DistillConfig(coef=1.0, divergence=divergence)))
        plans = [plan(each, model, cluster, others) for each in (one, of_three_teachers(run, divergence))]
        before, after = (
            {(row.phase, row.place, row.part): row.num_bytes for peak in planned.peaks for row in peak.rows}
            for planned in plans
        )
        live = before[Phase.rollout, Place.host, "teacher weights, away"]
        beside = [after[Phase.rollout, Place.host, f"teacher_{number} weights"] for number in (1, 2)]
        assert beside == [live, live] and "teacher_3 weights" not in {part for *_, part in after}
        assert (
            after[Phase.logprobs, Place.device, "teacher weights"]
            == before[Phase.logprobs, Place.device, "teacher weights"]
        ), "one at a time"
        assert plans[1].seconds["teacher"] > plans[0].seconds["teacher"], "they are swapped"
        if divergence is not Divergence.drawn:
            rows = 2 * 151936 // 2 * 2048
            grown = {
                part: after[key, place, part] - before[key, place, part]
                for key, place, part in (
                    (Phase.update, Place.device, "teacher output and logits"),
                    (Phase.rollout, Place.host, "teacher output, away"),
                )
            }
            assert grown["teacher output and logits"] == 2 * rows and grown["teacher output, away"] >= 2 * rows * 8


def test_a_search_counts_the_output_rows_of_teachers() -> None:
    """Of three in each layout that it considers, not of the chosen one alone."""
    run = load_recipe(RECIPE)
    assert isinstance(run, RunConfig)
    cluster, model = load_cluster(run.recipe.cluster), run_model(run)
    taught = with_replicas(of_three_teachers(run, Divergence.forward_kl), on_accelerators=True)
    options, _ = _run_options(taught, model, cluster, other_models(run), Counter())
    sizes = {option.training.parallel.tp: option.training.roles[0].teacher_output for option in options}
    assert len(sizes) > 1 and sizes == {tp: 3 * 2 * -(-151936 // tp) * 2048 for tp in sizes}
