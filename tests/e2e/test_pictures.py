"""``mcore-rl train`` on rows with pictures: what engines draw with is what the trainer sees, before and after updates.

The whole stack, from the command line: tiny models that see, vLLM, two Megatron processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.cli import main
from tests.support import picture_runs
from tests.support.engines import same_bits
from tests.support.picture_runs import PROMPTS, STEPS
from tests.support.pictures import picture
from tests.support.run_task import nothing_left

OWN_FILE = "first.png"
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


def task_with_a_file(folder: Path, family: str) -> Path:
    """The task in ``folder``; the picture of its first row is in a file of its own."""
    task = picture_runs.write_task(folder, family)
    squares = task / "squares"
    table = pq.read_table(squares / "train.parquet")
    rows = table.to_pylist()
    (squares / OWN_FILE).write_bytes(rows[0]["images"][0]["bytes"])
    rows[0]["images"] = [{"bytes": None, "path": OWN_FILE}]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), squares / "train.parquet")
    return task


@pytest.mark.parametrize(("family", "layout", "trained"), CASES)
def test_engines_and_trainer_see_the_same_pictures(
    family: str,
    layout: tuple[str, ...],
    trained: bool,
    tmp_path: Path,
    fast_ray: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, run = task_with_a_file(tmp_path, family), tmp_path / "run"
    words = picture_runs.words(task, run, f"trainer.save_freq={STEPS}", *layout)
    with nothing_left():
        assert main(words) == 0
    steps = steps_of(run)
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/logprob_diff_max"] < AGREEMENT, steps[step]
        assert steps[step]["pictures/count"] == 8 and steps[step]["pictures/different"] == 4
    assert "val/squares/reward" in steps[STEPS]
    before, after = tower_of(task / "model"), tower_of(run / "hf" / "final")
    assert before.keys() == after.keys()
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 1e-3 if trained else moved == 0
    sees_pictures_in_its_report(run)

    (task / "squares" / OWN_FILE).write_bytes(picture(56, 56))
    capsys.readouterr()
    assert main([*words, f"trainer.total_training_steps={STEPS + 1}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"data.image_key=images: {OWN_FILE} (1) differs from what the checkpoint was made with" in said


def sees_pictures_in_its_report(run: Path) -> None:
    """Every row names its picture, and the report shows those of the validation and of each step."""
    shown = set()
    for path in [*(run / "rollouts").iterdir(), *(run / "validation").iterdir()]:
        for row in pq.read_table(path).to_pylist():
            (image,) = json.loads(row["images"])
            assert image["source"].endswith((OWN_FILE, "images[0]"))
            shown.add(image["sha256"])
    assert {path.stem for path in (run / "media").iterdir()} == shown
    assert (run / "report.html").read_text().count("data:image/webp;base64,") == len(shown)


def test_a_pair_needs_room_for_the_pictures_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = picture_runs.write_task(tmp_path, "qwen2_5_vl")
    words = picture_runs.words(task, tmp_path / "run", "--check", algorithm="online_dpo")
    pairs = [word for word in words if not word.startswith("actor.use_kl")]
    capsys.readouterr()
    assert main([*pairs, "actor.microbatch_patches=31"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "actor.microbatch_patches=31: 12 of 12 pairs do not fit" in said and "Write 32 or more" in said
    assert main([*pairs, "actor.microbatch_patches=32"]) == 0


@pytest.mark.tier("full")
def test_a_critic_learns_from_pictures_and_its_checkpoint_begins_another_run(tmp_path: Path, fast_ray: None) -> None:
    """What a checkpoint of the run becomes is what the run wrote at its end."""
    task, run = picture_runs.write_task(tmp_path, "qwen2_5_vl"), tmp_path / "run"
    more = ["critic.precision=float32", f"critic.ppo_mini_batch_size={PROMPTS}", "critic.microbatch_tokens=256"]
    more += ["critic.optim.lr=1e-5"]
    with nothing_left():
        assert main(picture_runs.words(task, run, *more, f"trainer.save_freq={STEPS}", algorithm="ppo")) == 0
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
    losses = [steps_of(each)[1]["critic/loss"] for each in (run, tmp_path / "again")]  # of the same responses
    assert losses[1] < losses[0], "it goes on with what it had learned"


@pytest.mark.tier("full")
def test_a_critic_with_adapters_keeps_its_tower_in_files(tmp_path: Path, fast_ray: None) -> None:
    task, run = picture_runs.write_task(tmp_path, "qwen3_vl"), tmp_path / "run"
    more = ["critic.precision=float32", f"critic.ppo_mini_batch_size={PROMPTS}", "critic.microbatch_tokens=256"]
    more += ["critic.lora.rank=4", "trainer.total_training_steps=1"]
    with nothing_left():
        assert main(picture_runs.words(task, run, *more, "trainer.save_freq=1", algorithm="ppo")) == 0
    step = run / "checkpoints" / "step_1"
    assert main(["convert", "to-hf", "--run", str(step / "critic"), "--out", str(tmp_path / "critic")]) == 0
    assert same_bits(tower_of(tmp_path / "critic"), tower_of(task / "model"))
    assert "score.weight" in load_file(tmp_path / "critic" / "model.safetensors")
    again = picture_runs.words(task, tmp_path / "again", f"critic.path={tmp_path}/critic", "--check", algorithm="ppo")
    assert main(again) == 0
