"""Modes of recipes: the simulated costs are the plan's, and every row can be composed and fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ASYNC, Mode
from mcore_rl.planning import modes, timing
from mcore_rl.planning.lengths import Lognormal
from mcore_rl.planning.mode_tables import mode_values, why
from mcore_rl.planning.modes import ModesResult, compare_modes, engine_costs, splits_of
from mcore_rl.planning.overheads import ProcessMemory
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import recipe_model
from mcore_rl.planning.search import fastest_by_rollout
from mcore_rl.planning.serving import Serving, cache_bytes_per_token, serving
from mcore_rl.planning.simulated_engine import EngineCosts
from mcore_rl.planning.simulation import (
    ONE_STEP_OFF,
    SYNC_SEPARATE,
    SimulatedMode,
    TrainerCosts,
    Workload,
    asynchronous,
    simulate,
)
from tests.planning.test_timing import EXPERTS, MODEL, RATES, rollout

H100 = load_cluster("nvidia_h100")


def recipe(*more: str) -> RunConfig:
    run = load_recipe("qwen2_7b_grpo", ["trainer.nnodes=2", *more])
    assert isinstance(run, RunConfig)
    return run


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", [{}, {"tp": 4}], ids=["one", "two nodes"])
def test_steps_of_equal_responses_take_what_the_plan_says(model: object, layout: dict[str, int]) -> None:
    """Responses of the greatest length: all run in every step, and the plan's mean of the cache is theirs."""
    config: RolloutConfig = rollout(max_response_length=200, **layout)
    rates = replace(RATES, per_node=2)
    room = Serving(weights=0, working=0, overhead=0, budget=0, cache=10**12, per_sequence=1)
    expected = sum(timing.generation_s(model, config, room, rates, 8, 50, 200))  # type: ignore[arg-type]
    costs = engine_costs(model, config, room, rates, 50)  # type: ignore[arg-type]
    work = Workload(groups=8, samples=4, prompt=50, lengths=Lognormal(200, 200, 0.0))
    trainer = TrainerCosts(fixed_s=1.0, token_s=0.0, publish_s=0.0)
    simulated = simulate(SYNC_SEPARATE, work, costs, 1, trainer).step_s - 1.0
    assert simulated == pytest.approx(expected, rel=0.01)
    assert costs.capacity == 10**12 / cache_bytes_per_token(model, config)  # type: ignore[arg-type]
    assert costs.most == config.max_num_seqs


def test_a_training_step_takes_what_the_plan_says() -> None:
    run = recipe("data.gen_batch_size=2048", "algorithm.filter_groups.enable=true")
    model = recipe_model(run)
    for candidate in fastest_by_rollout(run, model, H100):
        seconds = dict(candidate.plan.seconds)
        costs = modes.trainer_costs(candidate, model, H100)
        tokens = 2048 * 5 * (512 + 512)  # half of what is allowed
        whole = seconds.pop("generate") * 0 + sum(seconds.values())
        assert costs.publish_s == seconds["sync"] > 0 < costs.fixed_s
        assert costs.fixed_s + costs.token_s * tokens + costs.publish_s == pytest.approx(whole)


@cache
def compared() -> ModesResult:
    run = recipe("data.train_batch_size=256")
    separate = (SYNC_SEPARATE, ONE_STEP_OFF, asynchronous(2))
    return compare_modes(run, recipe_model(run), H100, modes=separate, steps=3)


def test_every_row_fits_on_the_devices_of_the_run() -> None:
    result = compared()
    assert [(row.mode.name, row.engine_nodes, row.trainer_nodes) for row in result.rows] == [
        ("sync, colocated", 0, 2), ("sync, separate", 1, 1), ("one_step_off", 1, 1), ("async, 2", 1, 1),
    ]  # fmt: skip
    for row in result.rows:
        run = row.candidate.run
        assert isinstance(run, RunConfig)
        planned = plan(run, recipe_model(run), H100)
        assert planned.fits and planned.num_gpus == 16
        assert row.simulation.staleness_max <= row.mode.max_staleness
    assert result.ratio(result.base) == 1 and result.base.mode.shared
    assert result.best.simulation.step_s == min(row.simulation.step_s for row in result.rows)


def test_the_overrides_of_a_row_compose_to_what_was_simulated() -> None:
    modes_of = {"sync, colocated": Mode.sync, "sync, separate": Mode.sync, "one_step_off": Mode.one_step_off}
    for row, values in zip(compared().rows, mode_values(compared())["rows"], strict=True):
        run = load_recipe("qwen2_7b_grpo", ["data.train_batch_size=256", *values["overrides"]])
        assert isinstance(run, RunConfig) and isinstance(row.candidate.run, RunConfig)
        mode = modes_of.get(row.mode.name, ASYNC)
        assert (run.rollout, run.trainer) == (row.candidate.run.rollout, replace(row.candidate.run.trainer, mode=mode))
        assert run.actor == row.candidate.run.actor
        if mode is ASYNC:
            assert (run.async_.max_staleness, run.async_.partial_rollout) == (
                row.mode.max_staleness,
                row.mode.in_flight,
            )


def test_what_pays_is_said_and_why() -> None:
    result = compared()
    sync, separate, overlap, last = result.rows
    slow = [replace(row, simulation=replace(row.simulation, step_s=sync.simulation.step_s)) for row in (overlap, last)]
    said = why(replace(result, rows=(sync, separate, *slow)))
    assert said.startswith("no mode pays: none is 5% faster than sync, colocated")
    fast = replace(last, simulation=replace(last.simulation, step_s=sync.simulation.step_s / 2, training=0.1))
    said = why(replace(result, rows=(sync, separate, overlap, fast)))
    assert said.startswith(
        f"async, 2 pays: 2.00 times sync, colocated; overlap alone (one_step_off) {result.ratio(overlap):.2f}"
    )
    assert said.endswith("the trainer waits most")
    assert why(replace(result, rows=(separate, fast))).startswith("async, 2 pays") and "overlap" not in why(
        replace(result, rows=(separate, fast))
    )


@pytest.mark.parametrize(("nodes", "optimum"), [(2, 1), (8, 7), (16, 11), (64, 45), (64, 1)])
def test_the_search_ends_where_the_neighbours_are_slower(
    nodes: int, optimum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step that is the longer the further the split is from the optimum, whatever a mode costs."""
    some = compared().rows[-1]
    tried: list[int] = []

    def try_split(comparison: modes._Comparison, engine_nodes: int, each: Sequence[SimulatedMode]) -> None:
        tried.append(engine_nodes)
        for mode in each:
            step = replace(some.simulation, step_s=10.0 + abs(engine_nodes - optimum))
            row = replace(some, mode=mode, engine_nodes=engine_nodes, simulation=step)
            comparison.rows.append(row)

    monkeypatch.setattr(modes._Comparison, "try_split", try_split)
    run = recipe(f"trainer.nnodes={nodes}")
    result = compare_modes(run, recipe_model(run), H100, modes=(asynchronous(1),), searches=True)
    best = min((row for row in result.rows if row.engine_nodes), key=lambda row: row.simulation.step_s)
    assert abs(best.engine_nodes - optimum) < max(1, nodes / 32)
    assert len(tried) == len(set(tried)) <= 14, "no split is simulated twice"
    assert [row.engine_nodes for row in result.rows] == sorted(tried)


def test_a_split_that_nothing_fits_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "fastest_by_rollout", lambda *_: [])
    run = recipe("trainer.nnodes=8")
    result = compare_modes(run, recipe_model(run), H100, modes=(asynchronous(1),), searches=True)
    assert not result.rows and [text.split(":")[0] for text in result.refused] == [
        "engines on the trainer's devices", "2 nodes of engines", "4 nodes of engines", "6 nodes of engines",
    ]  # fmt: skip


def test_engines_that_never_wait_and_could_run_more_are_told_of() -> None:
    result = compared()
    busy = replace(result.rows[-1].simulation, step_s=1.0, drawing=1.0, training=0.9, publishing=0.0)
    for cache_seqs, said in ((1000, True), (200, False)):
        fast = replace(result.rows[-1], simulation=busy, cache_seqs=cache_seqs)
        text = why(replace(result, rows=(result.rows[0], fast)))
        assert text.endswith("; rollout.max_num_seqs=256 run together, and the cache of an engine holds 1000") is said
    waits = replace(result.rows[-1], simulation=replace(busy, drawing=0.5), cache_seqs=1000)
    assert "max_num_seqs" not in why(replace(result, rows=(result.rows[0], waits)))


def test_what_a_cache_holds_is_its_tokens_over_those_of_a_response() -> None:
    """The plan counts the longest sequences that the cache holds: of 1,024 + 1,024 tokens."""
    for row in compared().rows:
        run = row.candidate.run
        assert isinstance(run, RunConfig)
        room = serving(recipe_model(run), run.rollout, device_bytes=int(79.6 * 2**30), processes=ProcessMemory.of(H100))
        assert row.cache_seqs == pytest.approx(room.concurrency * 2048 / (512 + 512 / 2), rel=0.02)


@pytest.mark.parametrize("mode", [SYNC_SEPARATE, asynchronous(2)], ids=lambda mode: mode.name)
def test_a_share_of_the_engines_takes_what_all_take(mode: SimulatedMode) -> None:
    costs = EngineCosts(fixed_s=(0.01,) * 65, stream_s=(0.02,) * 65, token_s=1e-6, product_s=4e-4, prefill_s=2e-5)
    work = Workload(groups=256, samples=4, prompt=10, lengths=Lognormal(250, 1_000))
    trainer = TrainerCosts(fixed_s=1.0, token_s=6e-5, publish_s=0.5)
    every, share = (run(mode, work, costs, 48, trainer, steps=6) for run in (simulate, modes.simulate_share))
    assert len(share.trained) < len(every.trained) / 2.9
    assert share.step_s == pytest.approx(every.step_s, rel=0.02) and share.step_s != every.step_s
    assert share.samples_per_s == pytest.approx(256 * 4 / share.step_s)
    few = replace(work, groups=4)
    same = [run(mode, few, costs, 48, trainer, steps=2) for run in (simulate, modes.simulate_share)]
    assert same[0] == same[1], "a share of few groups would not be like the whole"


def test_one_node_cannot_be_split() -> None:
    assert [splits_of(nodes) for nodes in (1, 2, 3, 4, 16)] == [(), (1,), (1, 2), (1, 2, 3), (4, 8, 12)]
