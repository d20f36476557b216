"""``mcore-rl train`` on rows with pictures: what engines draw with is what the trainer sees, before and after updates.

The whole stack, from the command line: tiny models that see, vLLM, two Megatron processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.cli import main
from tests.support import picture_runs
from tests.support.engines import same_bits
from tests.support.picture_runs import PROMPTS, STEPS
from tests.support.run_task import nothing_left

# Float32 on both sides: rounding alone, after updates of the tower too.
AGREEMENT = 1e-4
CASES = [
    ("qwen2_5_vl", ("actor.parallel.pp=2",), True),
    pytest.param("qwen3_vl", ("actor.vision=frozen",), False, marks=pytest.mark.tier("full")),
    pytest.param("qwen3_vl", ("actor.parallel.tp=2",), True, marks=pytest.mark.tier("full")),
]


def tower_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if "visual." in name}


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.parametrize(("family", "layout", "trained"), CASES)
def test_engines_and_trainer_see_the_same_pictures(
    family: str, layout: tuple[str, ...], trained: bool, tmp_path: Path, fast_ray: None
) -> None:
    task, run = picture_runs.write_task(tmp_path, family), tmp_path / "run"
    with nothing_left():
        assert main(picture_runs.words(task, run, *layout)) == 0
    steps = steps_of(run)
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/logprob_diff_max"] < AGREEMENT, steps[step]
        assert steps[step]["pictures/count"] == 8 and steps[step]["pictures/different"] == 4
    assert "val/squares/reward" in steps[STEPS]
    before, after = tower_of(task / "model"), tower_of(run / "hf" / "final")
    assert before.keys() == after.keys()
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 1e-3 if trained else moved == 0


@pytest.mark.tier("full")
def test_a_critic_learns_from_pictures_and_its_checkpoint_begins_another_run(tmp_path: Path, fast_ray: None) -> None:
    """What a checkpoint of the run becomes is what the run wrote at its end."""
    task, run = picture_runs.write_task(tmp_path, "qwen2_5_vl"), tmp_path / "run"
    more = ["critic.precision=float32", f"critic.ppo_mini_batch_size={PROMPTS}", "critic.microbatch_tokens=256"]
    more += ["critic.optim.lr=1e-5"]
    with nothing_left():
        assert main(picture_runs.words(task, run, *more, f"trainer.save_freq={STEPS}", algorithm="ppo")) == 0
    losses = [steps_of(run)[step]["critic/loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0], losses

    step = run / "checkpoints" / f"step_{STEPS}"
    for role in ("actor", "critic"):
        assert main(["convert", "to-hf", "--run", str(step / role), "--out", str(tmp_path / role)]) == 0
    exported, converted = (load_file(each / "model.safetensors") for each in (run / "hf" / "final", tmp_path / "actor"))
    assert same_bits(converted, exported)
    first, learned = tower_of(task / "model"), tower_of(tmp_path / "critic")
    assert max(float((first[name] - learned[name]).abs().max()) for name in first) > 0, "its tower learns, too"

    again = [*more, f"critic.path={tmp_path}/critic", "trainer.total_training_steps=1", "critic.vision=frozen"]
    with nothing_left():
        assert main(picture_runs.words(task, tmp_path / "again", *again, algorithm="ppo")) == 0
    assert steps_of(tmp_path / "again")[1]["critic/loss"] < losses[0], "it goes on with what it had learned"
