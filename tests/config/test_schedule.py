"""How long warm-up and decay are in a run; numbers by hand, and of transformers where it has the same rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.optimization import _get_cosine_schedule_with_warmup_lr_lambda

from mcore_rl.config.compose import compose
from mcore_rl.config.engine import OptimizerConfig, Schedule
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.schedule import num_updates, of_length, schedule_violations, scheduled
from mcore_rl.config.sft import SftConfig
from mcore_rl.training.optimizer import learning_rate

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
COSINE = "actor.optim.lr_schedule=cosine"


def run_of(*overrides: str) -> RunConfig:
    return compose(RunConfig, "train", [*SOUND, "data.train_batch_size=64", *overrides])


def test_a_step_has_an_update_for_each_minibatch_and_pass() -> None:
    run = run_of(
        "algorithm=ppo", "actor.ppo_mini_batch_size=16", "actor.ppo_epochs=3", "critic.ppo_mini_batch_size=32",
        "trainer.critic_warmup=2",
    )  # fmt: skip
    assert {role.name: num_updates(run, role, 10) for role in run.trained_rows} == {
        "critic": 10 * 2,
        "actor": 8 * 4 * 3,
    }
    sft = compose(SftConfig, "sft", SOUND)
    assert num_updates(sft, sft.role_rows[0], 10) == 10


@pytest.mark.parametrize("older", [(), ("actor.optim.total_steps=0",)])
def test_what_is_left_out_follows_from_the_run(older: tuple[str, ...]) -> None:
    run = run_of("actor.ppo_mini_batch_size=16", COSINE, "actor.optim.warmup_ratio=0.1", *older)
    assert run_violations(run) == []
    optim = scheduled(run, 37).actor.optim
    assert (optim.total_steps, optim.lr_warmup_steps, optim.warmup_ratio) == (37 * 4, 15, 0.0)  # 14.8 rounded up
    assert not run.actor.optim.total_steps, "the configuration itself stays as it was written"


@pytest.mark.parametrize("length", [1, 9, 10, 11, 1868])
@pytest.mark.parametrize("ratio", [0.03, 0.1, 0.5])
def test_warm_up_is_as_long_as_transformers_has_it(length: int, ratio: float) -> None:
    optim = of_length(OptimizerConfig(warmup_ratio=ratio), length)
    theirs: Any = SimpleNamespace(warmup_steps=ratio)
    assert optim.lr_warmup_steps == TrainingArguments.get_warmup_steps(theirs, length)


def test_after_warm_up_rates_are_those_of_transformers() -> None:
    optim = of_length(OptimizerConfig(lr=5e-6, lr_schedule=Schedule.cosine, warmup_ratio=0.1), 250)
    for step in range(25, 251):
        theirs = _get_cosine_schedule_with_warmup_lr_lambda(
            step, num_warmup_steps=25, num_training_steps=250, num_cycles=0.5
        )
        assert learning_rate(optim, step) == pytest.approx(5e-6 * theirs, rel=1e-12, abs=1e-20)
    assert [learning_rate(optim, step) for step in (0, 24)] == [5e-6 / 25, 5e-6]  # theirs begins with 0, a step behind


def test_a_written_end_stays() -> None:
    optim = of_length(OptimizerConfig(lr_schedule=Schedule.linear, total_steps=500, warmup_ratio=0.1), 40)
    assert (optim.total_steps, optim.lr_warmup_steps) == (500, 50)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.optim.total_steps=100"], None),
        (["actor.optim.total_steps=79"], "actor.optim.total_steps=79: ends the cosine schedule before the run, which"),
        (["actor.optim.total_steps=79", "actor.optim.allow_early_end=true"], None),
        (["actor.optim.lr_warmup_steps=80"], "actor.optim.lr_warmup_steps=80: is no less than the run, 80 optimizer"),
        (["actor.optim.lr_warmup_steps=79"], None),
        (["actor.optim.total_steps=79", "actor.optim.lr_schedule=constant"], None),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(overrides: list[str], said: str | None) -> None:
    run = run_of("actor.ppo_mini_batch_size=16", COSINE, *overrides)
    assert run_violations(run) == [], "nobody has said how long the run is"
    known = run_of("actor.ppo_mini_batch_size=16", COSINE, *overrides, "trainer.total_training_steps=20")
    for lines in (list(map(str, schedule_violations(run, 20))), list(map(str, run_violations(known)))):
        assert len(lines) == (said is not None) and all(line.startswith(said or "") for line in lines)


def test_supervised_fine_tuning_is_held_to_it_too() -> None:
    overrides = [*SOUND, COSINE, "actor.optim.total_steps=9", "trainer.total_training_steps=10"]
    (violation,) = compose(SftConfig, "sft", overrides).violations()
    assert "the last 1 have a learning rate of 0" in str(violation)
