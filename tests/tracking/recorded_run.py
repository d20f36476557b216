"""A run as a loop would record it, with numbers made up here, for the tests of what reads it."""

from __future__ import annotations

import io
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.lanes import TRAINER, LaneSpan, State, StepLanes, trainer_lane
from mcore_rl.tracking.sinks import Tracker

NUM_PROMPTS = 200
PHASE_SECONDS = {"generate": 4.0, "score": 0.2, "logprobs": 0.8, "reference": 0.7, "advantages": 0.02}


def right_at(step: int, prompt: int, total_steps: int, shift: int = 0) -> bool:
    """10 % before, 60 % at the end; every prompt has its own day, so the number of right ones is exact."""
    rank = (prompt * 77 + shift) % NUM_PROMPTS
    return rank < NUM_PROMPTS * (0.1 + 0.5 * step / total_steps)


def validation_rows(step: int, total_steps: int) -> list[dict[str, Any]]:
    """Two hundred prompts with sums; one answer holds markup and a control character."""
    rows = []
    for prompt in range(NUM_PROMPTS):
        a, b = prompt + 3, 2 * prompt + 5
        right = right_at(step, prompt, total_steps)
        answer = f"{a} <b>plus</b> {b} & so\x07 #### {a + b if right else a - b}"
        rows.append(
            {
                "step": step, "data_source": "arithmetic", "prompt_id": f"sum-{prompt}",
                "prompt": f"Tom has {a} apples and buys {b} more. How many has he now?", "response": answer,
                "score": float(right), "correct": right, "ground_truth": str(a + b), "num_tokens": 12, "finish": "stop",
            }
        )  # fmt: skip
    return rows


def metrics_of(step: int, total_steps: int, noise: random.Random) -> dict[str, float]:
    """Of one training step."""
    done = step / total_steps
    seconds = {f"time/{name}": value * (1 + 0.1 * noise.random()) for name, value in PHASE_SECONDS.items()}
    seconds |= {"time/update_actor": 3.0 + noise.random(), "time/sync": 0.3}
    return {
        "reward/mean": 0.1 + 0.5 * done + 0.05 * noise.gauss(0, 1),
        "reward/std": 0.4,
        "reward/accuracy": 0.1 + 0.5 * done + 0.04 * noise.gauss(0, 1),
        "reward/part/format": 0.5 + 0.5 * done,
        "reward/part/length": -0.25 * done,
        "response/length_mean": 80 + 60 * math.sqrt(done) + 3 * noise.gauss(0, 1),
        "response/length_max": 256,
        "response/clip_share": 0.2 * (1 - done),
        "kl/loss": 0.002 * done,
        "actor/kl_k3": 1e-5 * (1 + noise.random()),
        "actor/entropy": 1.2 - 0.7 * done,
        "actor/grad_norm": 0.4 + 0.3 * noise.random(),
        "actor/lr": 1e-6 * min(1, 10 * done),
        "rollout/logprob_diff_mean": 2e-6 * (1 + noise.random()),
        "rollout/logprob_diff_max": 2e-5,
        "actor/clip_fraction_low": 0.01 * done,
        "actor/clip_fraction_high": 0.02 * done,
        "perf/generated_tokens_per_s": 2400 + 50 * noise.random(),
        "perf/trained_tokens_per_s": 5400 + 50 * noise.random(),
        "dropped/grader_errors": 1.0 if step == 3 else 0.0,
        **seconds,
        "time/step": sum(seconds.values()) + 0.4,
        "perf/overhead_share": 0.04,
    }


def spans_of(metrics: dict[str, float]) -> list[PhaseSpan]:
    """One phase after the other."""
    spans, at = [], 0.0
    for key, value in metrics.items():
        if key.startswith("time/") and key != "time/step":
            spans.append(PhaseSpan(key.removeprefix("time/"), at, at + value))
            at += value
    return spans


def lanes_of(step: int, metrics: dict[str, float]) -> StepLanes:
    """Of two engines, of which the second is half as long at work; they get weights last."""
    phases = spans_of(metrics)
    drawn, sync = metrics["time/generate"], metrics["time/sync"]
    at = sum(value for key, value in metrics.items() if key.startswith("time/") and key != "time/step")
    engines = {
        f"engine {k}": (
            LaneSpan(State.drawing, 0.0, drawn / (k + 1)),
            LaneSpan(State.paused, at - sync, at - sync / 2),
            LaneSpan(State.updating, at - sync / 2, at),
        )
        for k in range(2)
    }
    return StepLanes(1.7e9 + 20.0 * step, metrics["time/step"], {TRAINER: trainer_lane(phases)} | engines)


def record(run_dir: Path, total_steps: int = 20, until: int | None = None, test_freq: int = 5) -> Path:
    """A run of ``total_steps``, killed after ``until``, validated before training and every ``test_freq`` steps."""
    noise = random.Random(0)
    config = {"actor": {"optim": {"lr": 1e-6}}, "data": {"train_files": ["train.parquet"]}}
    trainer = TrainerConfig(project_name="p", experiment_name="e")
    with Tracker.open(run_dir, trainer, config, total_steps, Console(file=io.StringIO())) as tracker:
        for step in range((total_steps if until is None else until) + 1):
            metrics = metrics_of(step, total_steps, noise) if step else {}
            if step % test_freq == 0:
                rows = validation_rows(step, total_steps)
                tracker.samples(step, "validation", partial(validation_rows, step, total_steps))
                metrics["val/arithmetic/accuracy"] = sum(row["correct"] for row in rows) / len(rows)
            tracker.log(step, metrics)
            tracker.timeline(step, spans_of(metrics), lanes_of(step, metrics) if step else None)
    return run_dir
