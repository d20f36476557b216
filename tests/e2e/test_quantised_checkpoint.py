"""``train`` from a checkpoint in fp8 blocks, with its own engines: the run of the plain numbers that it stands for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.cli import main
from tests.support import checkpoints
from tests.support.fp8_blocks import write_in_fp8
from tests.support.run_task import nothing_left, overrides, write_task


@pytest.mark.timeout(900)
def test_a_run_from_fp8_blocks_is_the_run_of_the_numbers_they_stand_for(tmp_path: Path, fast_ray: None) -> None:
    """The plain ones are written by torch's own conversion.  Sampler and trainer agree as on any model in float32."""
    rows = {}
    for name in ("fp8", "plain"):
        torch.manual_seed(3)
        (tmp_path / name).mkdir()
        model = write_task(tmp_path / name) / "model"
        numbers = write_in_fp8(model, torch.float32)
        if name == "plain":
            save_file(numbers, model / "model.safetensors", {"format": "pt"})
            checkpoints.edit_config(model, quantization_config=None)
        run = tmp_path / name / "run"
        with nothing_left():
            assert main(["train", *overrides(tmp_path / name, run, "trainer.total_training_steps=2")]) == 0
        rows[name] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert not json.loads((run / "hf" / "final" / "config.json").read_text()).get("quantization_config")
    assert len(rows["fp8"]) == len(rows["plain"]) >= 2
    for one, other in zip(*rows.values(), strict=True):
        same = [key for key in other if key.startswith(("actor/", "critic/", "reward/")) and math.isfinite(other[key])]
        assert same and {key: one[key] for key in same} == {key: other[key] for key in same}
        assert one["rollout/logprob_diff_max"] < 1e-4
