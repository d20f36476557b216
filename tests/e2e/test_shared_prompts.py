"""Prompts computed once for their samples, from the command line: the numbers are those of a run that repeats them.

The second run replays what the first recorded, so that both train the same tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.tracking.jsonl import read_metrics
from tests.support import run_task
from tests.support.run_task import AGREEMENT, SPEED, write_task

STEPS = 2
RELATIVE = 1e-4  # float32; the second step begins with weights that Adam moved
ABSOLUTE = 1e-6  # of means of log-ratios that are about 0


def train(task: Path, directory: Path, *more: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    settings = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=0", "trainer.save_freq=0")
    assert main(["train", *run_task.overrides(task, directory, *settings, *more)]) == 0
    return [dict(line) for line in read_metrics(directory / "metrics.jsonl")]


def test_a_run_that_shares_prompts_has_the_numbers_of_one_that_does_not(
    tmp_path: Path, fast_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path)
    expected = train(task, tmp_path / "off", "trainer.record_rollouts=true")
    sharing = ("actor.share_prompts=auto", f"trainer.replay={tmp_path / 'off'}")
    metrics = train(task, tmp_path / "auto", *sharing)
    assert "prompts computed once for 4 samples" in " ".join(capsys.readouterr().err.split())
    for step, (shared, apart) in enumerate(zip(metrics, expected, strict=True)):
        # A prompt has about as many tokens as an answer may have, and three of four samples do not repeat it.
        assert 0.1 < shared["perf/shared_prompts"] < 0.75 and "perf/shared_prompts" not in apart
        for name in ("perf/tflop_updates", "perf/tflop_logprobs"):
            # Samples of a prompt that are on two ranks compute it twice, which no model needs.
            assert 0.3 < shared[name] / apart[name] < (1 - shared["perf/shared_prompts"]) * 1.05
        trained = [name for name in apart if name.startswith(("actor/", "router/", "reward/"))]
        assert {"actor/loss", "actor/grad_norm", "actor/entropy", "router/load_max"} <= set(trained)
        for name in trained:
            if name not in AGREEMENT and not name.startswith(SPEED):
                assert shared[name] == pytest.approx(apart[name], rel=RELATIVE, abs=ABSOLUTE), (step, name)
