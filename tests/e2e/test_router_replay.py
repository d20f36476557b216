"""Runs from the command line that replay experts: the trainer's own (r2), and those that engines report (r3).

The engines are vLLM's.  On the CPU it records no experts: tests/support/recording_engine.py reports them in its place.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.cli import main
from mcore_rl.config.engine import Device
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.tracking.jsonl import read_metrics
from tests.support import run_task
from tests.support.forced_routes import ForcedRoutes
from tests.support.recording_engine import Recorded, Recorder, experts_reported
from tests.support.run_task import nothing_left, write_task
from tests.support.skips import ACCELERATOR
from tests.support.vllm_device import VLLM_DEVICE

DIFFERENCE = "router/difference"
TWO_UPDATES, ONE_UPDATE = "actor.ppo_mini_batch_size=4", "actor.ppo_mini_batch_size=8"
# Weights that move so far in an update that routers choose otherwise in the next.
FAST = ("actor.optim.lr=0.02", "actor.optim.clip_grad=0")
STILL = ("actor.optim.lr=0",)
LAYOUTS = [
    ("actor.parallel.ep=2",),
    ("actor.parallel.ep=1", "actor.parallel.pp=2"),
    ("actor.parallel.ep=1", "actor.parallel.cp=2"),
    ("actor.parallel.ep=1", "actor.parallel.tp=2", "actor.recompute=full"),
]


def command(task: Path, directory: Path, *more: str) -> int:
    """How a run of one step ends."""
    settings = ["trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.save_freq=0", *more]
    with nothing_left():
        return main(["train", *run_task.overrides(task, directory, *settings)])


def train(task: Path, directory: Path, *more: str) -> dict[str, float]:
    """The metrics of the only step."""
    assert command(task, directory, *more) == 0
    (metrics,) = read_metrics(directory / "metrics.jsonl")
    return dict(metrics)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def test_updates_repeat_the_experts_of_the_log_prob_pass(task: Path, tmp_path: Path, fast_ray: None) -> None:
    """The first update has the weights of the pass; before the second, routers have moved, and would choose others."""
    metrics = train(task, tmp_path, "actor.router_replay=r2", TWO_UPDATES, *FAST)
    assert metrics["actor/ratio_first"] == 1 and metrics[DIFFERENCE] > 0.005


@pytest.mark.tier("full")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_stay_choose_what_they_chose(
    layout: tuple[str, ...], task: Path, tmp_path: Path, fast_ray: None
) -> None:
    metrics = train(task, tmp_path, "actor.router_replay=r2", TWO_UPDATES, *STILL, *layout)
    assert metrics["actor/ratio_first"] == 1 and metrics[DIFFERENCE] == 0


def of_engines(task: Path, tmp_path: Path, kind: str, *more: str) -> tuple[dict[str, float], Recorded]:
    """The metrics of a run whose engines report experts, and what they reported."""
    with experts_reported(Recorder(task / "model", kind)) as recorded:
        metrics = train(task, tmp_path / "run", "actor.router_replay=r3", *more)
    return metrics, recorded


def told(task: Path, recorded: Recorded) -> tuple[float, float]:
    """transformers with the reported experts: the share that a router would not choose, and the mean |difference| of
    its log-probs to the engine's."""
    reference = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32).eval()
    forced = ForcedRoutes(reference, model_of(read_config(task / "model"))[1])
    gaps = []
    for prompt, sample in recorded:
        tokens = torch.tensor([*prompt, *sample.tokens.tolist()])
        assert sample.experts is not None and len(sample.experts) == len(tokens) - 1
        last = np.zeros((1, *sample.experts.shape[1:]), dtype=np.int64)
        forced.dictate(
            torch.from_numpy(np.concatenate([sample.experts, last])), torch.arange(len(tokens)) == len(tokens) - 1
        )
        with torch.no_grad():
            log_p = torch.log_softmax(reference(tokens[None]).logits[0], dim=-1)
        logprobs = log_p[:-1].gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
        gaps.append((logprobs - torch.from_numpy(sample.logprobs)).abs())
    return forced.differing / forced.replayed, float(torch.cat(gaps).mean())


@pytest.mark.parametrize("updates", [ONE_UPDATE, pytest.param(TWO_UPDATES, marks=pytest.mark.tier("full"))])
def test_the_trainer_repeats_the_experts_that_engines_report(
    updates: str, task: Path, tmp_path: Path, fast_ray: None
) -> None:
    """Experts at random, so that nothing but their replay has these log-probs: every token with its own."""
    metrics, recorded = of_engines(task, tmp_path, "random", updates, *STILL)
    difference, gap = told(task, recorded)
    assert len(recorded) == 32 and difference > 0.2 and gap > 0.01
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(gap, rel=1e-4)
    assert metrics["actor/ratio_first"] == 1
    if updates == ONE_UPDATE:  # else a mean over minibatches of different lengths
        assert metrics[DIFFERENCE] == pytest.approx(difference, abs=1e-6)


@pytest.mark.tier("full")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_experts_of_the_sampler_are_the_trainer_s_own_in_float32(
    layout: tuple[str, ...], task: Path, tmp_path: Path, fast_ray: None
) -> None:
    metrics, _ = of_engines(task, tmp_path, "own", TWO_UPDATES, *STILL, *layout)
    assert metrics[DIFFERENCE] == 0 and metrics["rollout/logprob_diff_max"] < 1e-4
    assert metrics["actor/ratio_first"] == pytest.approx(1, abs=1e-6)


@pytest.mark.skipif(VLLM_DEVICE is not Device.cpu, reason=f"{ACCELERATOR}this vLLM is for one and records experts")
def test_engines_of_a_cpu_are_refused_from_the_command_line(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: None
) -> None:
    assert command(task, tmp_path, "actor.router_replay=r3") == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    told_by = "actor.router_replay=r3: vLLM records experts on accelerators only. Write actor.router_replay=r2, or off"
    assert told_by in " ".join(said.split())


@pytest.mark.tier("full")
@pytest.mark.skipif(VLLM_DEVICE is Device.cpu, reason=f"{ACCELERATOR}vLLM's CPU build records no experts")
def test_the_record_of_vllm_itself_is_repeated(task: Path, tmp_path: Path, fast_ray: None) -> None:
    """In float32 the trainer chooses what vLLM chose, but for scores within rounding of each other."""
    one_device = ("trainer.n_gpus_per_node=1", "actor.parallel.ep=1")
    metrics = train(task, tmp_path, "actor.router_replay=r3", TWO_UPDATES, *STILL, *one_device)
    assert metrics[DIFFERENCE] < 0.01 and metrics["rollout/logprob_diff_max"] < 1e-2
    assert metrics["actor/ratio_first"] == pytest.approx(1, abs=1e-5)
