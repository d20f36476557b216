"""The search: what it names fits and is fast, what it refuses is counted, and a run that does not fit is told of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mcore_rl.config.engine import Recompute
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.planning.layouts import layouts, microbatches, tower_layers
from mcore_rl.planning.plan import plan, rl_work
from mcore_rl.planning.recipes import run_model
from mcore_rl.planning.search import Found, nearest_that_fit, overrides_of, refusal, search
from tests.support import models, published
from tests.support.settings import any_run

H100 = load_cluster("nvidia_h100")
QWEN = model_of(published.FACTS["Qwen/Qwen2.5-7B-Instruct"])[1]
MIXTRAL = model_of(published.FACTS["mistralai/Mixtral-8x22B-Instruct-v0.1"])[1]


def run_of(**changes: object) -> RunConfig:
    run = any_run()
    run.rollout.n = 4
    run.trainer = replace(run.trainer, n_gpus_per_node=8, **changes)  # type: ignore[arg-type]
    return run


@pytest.fixture(scope="module")
def result() -> Found:
    return search(run_of(), QWEN, H100, limit=5)


def test_what_is_named_fits_and_is_ranked(result: Found) -> None:
    assert len(result.best) == 5
    seconds = [each.plan.step_s for each in result.best]
    assert seconds == sorted(seconds)
    assert len({str(each.run.actor.parallel) for each in result.best}) == 5
    for each in result.best:
        again = plan(each.run, QWEN, H100)
        assert again.fits and again.step_s == pytest.approx(each.plan.step_s)
        assert each.reasons


def test_nothing_but_layouts_and_sizes_is_changed(result: Found) -> None:
    run = run_of()
    best = result.best[0].run
    assert best.data == run.data and best.trainer == run.trainer and best.algorithm == run.algorithm
    assert best.rollout.n == run.rollout.n and best.actor.optim == run.actor.optim


def test_the_overrides_compose_to_what_was_planned() -> None:
    recipe = load_recipe("mixtral_8x7b_rloo")
    assert isinstance(recipe, RunConfig)
    changed = replace(recipe, actor=replace(recipe.actor, recompute=Recompute.selective, microbatch_tokens=12288))
    changed.actor.parallel = replace(recipe.actor.parallel, pp=1, tp=4, pipeline_layers=[32])
    composed = load_recipe("mixtral_8x7b_rloo", overrides_of(changed))
    assert isinstance(composed, RunConfig)
    assert (composed.actor, composed.rollout) == (changed.actor, changed.rollout)


def fine_tuning() -> SftConfig:
    config = SftConfig()
    config.trainer.n_gpus_per_node, config.data.train_batch_size, config.data.max_length = 8, 64, 8192
    return config


def test_fine_tuning_is_searched_without_engines() -> None:
    result = search(fine_tuning(), QWEN, H100, limit=3)
    seconds = [each.plan.step_s for each in result.best]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    for each in result.best:
        assert isinstance(each.run, SftConfig)
        assert each.run.data == fine_tuning().data and each.run.actor.optim == fine_tuning().actor.optim
        assert not any(word.startswith(("rollout", "critic")) for word in each.overrides)
    for tp, recompute in product((1, 2, 4), Recompute):  # an exhaustive look at a few settings, by ``plan`` alone
        config = fine_tuning()
        config.actor.parallel.tp, config.actor.recompute, config.actor.microbatch_tokens = tp, recompute, 8192
        planned = plan(config, QWEN, H100)
        assert not planned.fits or planned.step_s >= seconds[0]


def test_fine_tuning_that_does_not_fit_is_told_what_does() -> None:
    config = fine_tuning()
    config.actor.recompute, config.actor.microbatch_tokens = Recompute.none, 131072
    planned = plan(config, QWEN, H100)
    assert not planned.fits
    assert "Nearest settings that fit: actor." in str(refusal(planned, config, QWEN, H100))


def test_refusals_are_counted_by_why() -> None:
    refused = search(run_of(), MIXTRAL, H100).refused
    assert refused["weights, gradients and optimizer alone exceed a device"] > 0
    assert search(run_of(), MIXTRAL, H100).best == ()


def test_no_candidate_beats_the_best_by_hand(result: Found) -> None:
    """An exhaustive look at a few settings, by ``plan`` alone."""
    best = result.best[0].plan.step_s
    for tp, pp, share in ((1, 1, 0.5), (2, 1, 0.6), (4, 2, 0.4), (4, 1, 0.5), (1, 2, 0.5)):
        for recompute in Recompute:
            run = run_of()
            run.actor.parallel.tp, run.actor.parallel.pp, run.actor.recompute = tp, pp, recompute
            run.actor.microbatch_tokens = 4096
            run.rollout.tp, run.rollout.dp, run.rollout.gpu_memory_utilization = 1, 8, share
            planned = plan(run, QWEN, H100)
            assert not planned.fits or planned.step_s >= best


@pytest.mark.parametrize("model", [QWEN, MIXTRAL, models.deepseek_v3(), models.qwen2_moe()])
def test_every_layout_that_is_looked_at_can_be_built(model: object) -> None:
    seen = list(layouts(model, 32, 8, 8192))  # type: ignore[arg-type]
    assert len({str(each) for each in seen}) == len(seen) > 3
    assert not any(layout_violations(model, each, 32) for each in seen)  # type: ignore[arg-type]


def test_microbatches_hold_the_longest_sequence_and_no_more_than_there_is() -> None:
    assert microbatches(5000, 100_000, 1) == [5120, 10240, 20480]
    assert microbatches(5000, 6000, 1) == [5120, 6144]
    assert min(microbatches(512, 100_000, 1)) == 4096


def test_the_nearest_is_near() -> None:
    run = run_of()
    run.actor.parallel.tp, run.actor.recompute, run.actor.microbatch_tokens = 2, Recompute.none, 131072
    run.rollout.dp = 8
    planned = plan(run, QWEN, H100)
    assert not planned.fits
    near = nearest_that_fit(run, QWEN, H100, count=1)[0]
    assert near.plan.fits and near.run.actor.parallel.tp == 2
    error = refusal(planned, run, QWEN, H100)
    assert "Nearest settings that fit" in str(error) and "actor.microbatch_tokens=" in str(error)


def test_a_cluster_that_is_too_small_is_said_to_be() -> None:
    run = run_of()
    run.actor.parallel.tp = run.rollout.tp = 8
    planned = plan(run, MIXTRAL, H100)
    assert not planned.fits
    assert "No layout fits 1 x 8 devices of nvidia_h100: take more nodes" in str(refusal(planned, run, MIXTRAL, H100))


def test_a_shorter_first_stage_may_pay_for_the_tower() -> None:
    run = load_recipe("qwen25_vl_7b_grpo")
    assert isinstance(run, RunConfig)
    model = run_model(run)
    work = rl_work(run, run.actor.ppo_mini_batch_size, model)
    tower = tower_layers(model, work, learns=True)
    offered = list(layouts(model, 8, 8, work.longest, tower))
    assert all(not layout_violations(model, each, 8) for each in offered)
    first = {tuple(each.pipeline_layers) for each in offered if (each.pp, each.vpp) == (2, 1) and each.pipeline_layers}
    assert len(first) == 1 and 1 < tower < 28, tower
    (layers,) = first
    assert layers[0] + tower == pytest.approx(layers[1], abs=1)
    assert not [each for each in layouts(QWEN, 8, 8, work.longest) if each.pipeline_layers and each.pp == 2]
