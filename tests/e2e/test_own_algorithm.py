"""An algorithm in one file of a user's own, from the command line to the weights: nothing else knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import vapo, verifier
from tests.support.own_algorithm import LOSS, MEDIAN
from tests.support.run_task import overrides, write_task

pytestmark = [pytest.mark.timeout(600), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]


def train(folder: Path, given: list[str]) -> None:
    """Runs ``mcore-rl train`` in ``folder``."""
    command = [sys.executable, "-m", "mcore_rl.cli", "train", *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_trains_with_the_algorithm_of_a_file(tmp_path: Path) -> None:
    task, directory, own = write_task(tmp_path / "task"), tmp_path / "run", tmp_path / "own.py"
    own.write_text(MEDIAN + LOSS)
    given = overrides(
        task, directory, f"algorithm={own}", f"actor.loss_mode={own}:median", "actor.ppo_mini_batch_size=8",
        "actor.use_kl_loss=false", "trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.save_freq=0",
    )  # fmt: skip
    train(tmp_path, given)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["actor/grad_norm"] > 0 and row["advantage/max"] > 0
        assert row["actor/loss"] != 0 and "actor/clip_fraction_high" not in row, "the loss is the file's"
        assert "kl/reward" not in row and "kl/loss" not in row, "its KL is none, so that there is no reference"
    kept = yaml.safe_load((directory / "config.yaml").read_text())
    assert kept["algorithm"]["adv_estimator"] == kept["actor"]["loss_mode"] == f"{own}:median"


def test_two_lambdas_an_outcome_in_the_loss_and_two_keys_are_one_file(tmp_path: Path) -> None:
    """Right answers are imitated: of two runs of one step, the one with outcomes in its loss has another gradient."""
    task, own = write_task(tmp_path / "task"), tmp_path / "vapo.py"
    norms = {}
    own.write_text(Path(vapo.__file__).read_text())
    for mu in (0.1, 0.0):
        directory = tmp_path / f"run-{mu}"
        given = overrides(
            task, directory, f"algorithm={own}", f"actor.loss_mode={own}:vapo", "critic.path=null",
            f"actor.imitation_coef={mu}",
            "trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.save_freq=0",
            "actor.ppo_mini_batch_size=8",
        )  # fmt: skip
        train(tmp_path, given)
        (row,) = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][-1:]
        assert row["critic/grad_norm"] > 0 and row["return/mean"] != 0
        assert row["actor/imitation_loss"] > 0, "a metric of the file's loss"
        norms[mu] = (row["critic/grad_norm"], row["actor/grad_norm"], row["advantage/max"])
    with_it, without = norms[0.1], norms[0.0]
    assert with_it[0] == without[0] and with_it[2] == without[2], "the same samples, values and advantages"
    assert with_it[1] != without[1]


def test_a_trained_role_with_a_frozen_copy_that_rewards_tokens_is_one_file(tmp_path: Path) -> None:
    """Stopped after two steps and resumed: the third step is that of a run that never stopped."""
    task, own = write_task(tmp_path / "task"), tmp_path / "verifier.py"
    own.write_text(Path(verifier.__file__).read_text())
    given = [
        f"algorithm={own}", "verifier.path=null", "verifier.optim.lr=1e-3", "verifier.beta=0.5",
        "actor.use_kl_loss=false", "actor.loss_agg_mode=token_mean", "trainer.test_freq=0", "trainer.save_freq=2",
    ]  # fmt: skip
    rows = {}
    for name, lengths in {"whole": (3,), "halves": (2, 3)}.items():
        for steps in lengths:
            train(tmp_path, overrides(task, tmp_path / name, *given, f"trainer.total_training_steps={steps}"))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = {row["step"]: row for row in map(json.loads, lines) if "actor/grad_norm" in row}
    for row in rows["whole"].values():
        assert row["verifier/grad_norm"] > 0 and row["time/verifier_scores"] > 0
        assert row["verifier/says_right"] > 0, "a metric of the role's loss"
    first, *later = rows["whole"].values()
    assert later[0]["verifier/loss"] != first["verifier/loss"] and later[0]["advantage/max"] > 0
    kept = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())
    assert kept["verifier"]["beta"] == 0.5 and not {"critic", "teacher", "process_reward"} & kept.keys()
    names = ("actor/grad_norm", "verifier/grad_norm", "verifier/loss", "actor/loss", "advantage/max")
    assert [rows["halves"][3][name] for name in names] == [rows["whole"][3][name] for name in names]
