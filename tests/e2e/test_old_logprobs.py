"""Whose log-probs a run trains with, from the command line.

A run of one update a step leaves the log-prob pass out, and its numbers are those of a run that has it.  What has the
pass rejects no token, by a bound that nothing reaches: a rejection must know the ratio before the update, and so the
pass stays.  A run with several updates needs the pass, but for ``off_policy=bypass``; while sampler and trainer agree,
each ``off_policy`` takes the same step up to rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.cli import main
from mcore_rl.tracking.jsonl import read_metrics
from tests.e2e.test_roles import write_dense
from tests.support import run_task
from tests.support.run_task import AGREEMENT, SPEED, write_task

STEPS = 2
WITH_THE_PASS = ("algorithm.rollout_correction.reject=token_k2", "algorithm.rollout_correction.reject_upper=1e9")
OF_THE_PASS = {"actor/entropy", "actor/ratio_first", "actor/kl_k1", "actor/kl_k3", *AGREEMENT}
# The sampler's own log-probs differ between runs in the last bits, as vLLM happens to batch; so does their difference.
ROUNDING = 1e-6


def train(task: Path, directory: Path, *more: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of each step, and the final weights."""
    settings = [
        "actor.ppo_mini_batch_size=8",
        "algorithm.use_kl_in_reward=false",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
    ]
    assert main(["train", *run_task.overrides(task, directory, *settings, *more)]) == 0
    metrics = [dict(line) for line in read_metrics(directory / "metrics.jsonl")]
    (weights,) = (directory / "hf").glob("*/model.safetensors")
    return metrics, load_file(weights)  # type: ignore[return-value]


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("model", ("actor.parallel.ep=2",)),
        ("model", ("actor.parallel.ep=1", "actor.parallel.pp=2")),
        ("dense", ("actor.parallel.ep=1", "actor.parallel.tp=2")),
        ("dense", ("actor.parallel.ep=1", "actor.parallel.cp=2")),
    ],
)
def test_a_step_without_the_pass_has_the_numbers_of_one_with_it(
    model: str, layout: tuple[str, ...], tmp_path: Path, fast_ray: None
) -> None:
    task = write_task(tmp_path)
    write_dense(task / "dense", task / "model", seed=3, hidden_size=64)
    settings = (f"model.path={task / model}", *layout)
    without, own = train(task, tmp_path / "without", *settings)
    scored, expected = train(task, tmp_path / "with", *settings, *WITH_THE_PASS)
    for of_without, of_scored in zip(without, scored, strict=True):
        assert OF_THE_PASS <= of_without.keys()
        assert of_without.keys() | {"rollout/masked_share"} == of_scored.keys()
        assert of_without["perf/tflop_logprobs"] == pytest.approx(of_scored["perf/tflop_logprobs"] / 2), "the reference"
        for name, value in of_without.items():
            if name in AGREEMENT:
                assert value == pytest.approx(of_scored[name], abs=ROUNDING), name
            elif not name.startswith(SPEED):
                assert value == of_scored[name], name
        assert of_without["actor/ratio_first"] == 1 and of_without["actor/kl_k3"] == 0
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


SEVERAL = ("actor.ppo_mini_batch_size=4", "actor.ppo_epochs=2", "actor.use_kl_loss=false")
FIRST_RATIO = 1e-4  # how far it may be from 1 where it is to the sampler's log-probs


def of_step(metrics: dict[str, float]) -> dict[str, float]:
    """Without what depends on how vLLM batched alone."""
    return {key: x for key, x in metrics.items() if not key.startswith(SPEED) and key not in AGREEMENT}


def test_bypass_takes_several_updates_without_the_pass(tmp_path: Path, fast_ray: None) -> None:
    task = write_task(tmp_path)
    (first, *_), _ = train(
        task, tmp_path / "run", *SEVERAL, "algorithm.off_policy=bypass", "trainer.total_training_steps=1"
    )
    assert OF_THE_PASS <= first.keys()
    assert first.get("perf/tflop_logprobs", 0.0) == 0.0, "nothing is scored: there is no reference either"
    assert first["actor/ratio_first"] == pytest.approx(1.0, abs=FIRST_RATIO)
    assert first["actor/ratio_min"] < 0.99 < 1.01 < first["actor/ratio_max"], "of all four updates"
    assert first["rollout/logprob_diff_max"] < FIRST_RATIO, "of the first minibatch, before any update"


@pytest.mark.tier("full")
def test_each_off_policy_takes_the_same_first_step_while_sampler_and_trainer_agree(
    tmp_path: Path, fast_ray: None
) -> None:
    task, steps, weights = write_task(tmp_path), list[dict[str, float]](), list[dict[str, torch.Tensor]]()
    sequence = ("algorithm.off_policy=decoupled", "algorithm.rollout_correction.level=sequence")
    runs = {
        "recompute": ("algorithm.off_policy=recompute",),
        "bypass": ("algorithm.off_policy=bypass",),
        "decoupled": ("algorithm.off_policy=decoupled",),
        "sequence": (*sequence, "algorithm.rollout_correction.mode=mask", "algorithm.rollout_correction.lower=0.9"),
    }
    for name, more in runs.items():
        metrics, final = train(task, tmp_path / name, *SEVERAL, "trainer.total_training_steps=1", *more)
        steps.append(metrics[0])
        weights.append(final)
    recomputed, bypassed, decoupled, of_responses = map(of_step, steps)
    shares = {"rollout/truncated_share", "rollout/masked_share"}
    assert recomputed.keys() == bypassed.keys() == decoupled.keys() - shares == of_responses.keys() - shares
    assert recomputed["actor/ratio_first"] == pytest.approx(1.0, abs=1e-6)
    assert all(each["rollout/effective_sample_size"] == pytest.approx(1.0, abs=1e-6) for each in steps)
    assert steps[0]["perf/tflop_logprobs"] > 0 and steps[1].get("perf/tflop_logprobs", 0.0) == 0.0
    for other in (bypassed, decoupled, of_responses):
        for name in ("actor/loss", "actor/grad_norm", "actor/kl_k3", "actor/ratio_mean", "reward/mean"):
            assert other[name] == pytest.approx(recomputed[name], rel=1e-3, abs=1e-5), name
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            assert torch.allclose(other[name].float(), tensor.float(), atol=2e-4), name
    assert decoupled["rollout/masked_share"] == of_responses["rollout/masked_share"] == 0.0
