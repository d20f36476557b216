"""``mcore-rl train`` on rows with pictures: what engines draw with is what the trainer sees, before and after updates.

The whole stack, from the command line: tiny models that see, vLLM, two Megatron processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mcore_rl.cli import main
from tests.support import picture_runs
from tests.support.picture_runs import STEPS
from tests.support.run_task import nothing_left

# Float32 on both sides: rounding alone, after updates of the tower too.
AGREEMENT = 1e-4
CASES = [
    ("qwen2_5_vl", ("actor.parallel.pp=2",), True),
    pytest.param("qwen3_vl", ("actor.vision=frozen",), False, marks=pytest.mark.tier("full")),
    pytest.param("qwen3_vl", ("actor.parallel.tp=2",), True, marks=pytest.mark.tier("full")),
]


def tower_of(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if "visual." in name}  # noqa: SIM118  no mapping


@pytest.mark.parametrize(("family", "layout", "trained"), CASES)
def test_engines_and_trainer_see_the_same_pictures(
    family: str, layout: tuple[str, ...], trained: bool, tmp_path: Path, fast_ray: None
) -> None:
    task, run = picture_runs.write_task(tmp_path, family), tmp_path / "run"
    with nothing_left():
        assert main(picture_runs.words(task, run, *layout)) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines}
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/logprob_diff_max"] < AGREEMENT, steps[step]
        assert steps[step]["pictures/count"] == 8 and steps[step]["pictures/different"] == 4
    assert "val/squares/reward" in steps[STEPS]
    before, after = tower_of(task / "model"), tower_of(run / "hf" / "final")
    assert before.keys() == after.keys()
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 1e-3 if trained else moved == 0
