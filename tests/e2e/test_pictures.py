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
from safetensors import safe_open

from mcore_rl.cli import main
from tests.support.pictures import picture
from tests.support.run_task import nothing_left
from tests.support.vllm_device import ON_VLLM_DEVICE

STEPS = 3
OWN_FILE = "first.png"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(letter.isdigit() for letter in solution_str) / (1 + len(solution_str))
"""
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


def prepared(folder: Path, family: str) -> list[str]:
    """The words of a run below ``folder``; the picture of the first row is in a file of its own."""
    data, model = folder / "squares", folder / "model"
    assert main(["prepare", "squares", "--train", "12", "--val", "4", "--out", str(data)]) == 0
    made = ["--data", str(data), "--family", family, "--out", str(model)]
    assert main(["prepare", "tiny-model", *made]) == 0
    table = pq.read_table(data / "train.parquet")
    rows = table.to_pylist()
    (data / OWN_FILE).write_bytes(rows[0]["images"][0]["bytes"])
    rows[0]["images"] = [{"bytes": None, "path": OWN_FILE}]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), data / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return [
        "train",
        f"model.path={model}",
        f"data.train_files=[{data}/train.parquet]",
        f"data.val_files=[{data}/val.parquet]",
        "data.image_key=images",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        f"custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1",
        "algorithm=grpo",
        "actor.use_kl_loss=true",
        "actor.precision=float32",
        "actor.ppo_mini_batch_size=4",
        "actor.microbatch_tokens=256",
        "actor.optim.lr=3e-3",
        "rollout.n=2",
        "rollout.max_num_seqs=16",
        "rollout.kv_cache_memory_bytes=16777216",
        "rollout.enforce_eager=true",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[]",
        ON_VLLM_DEVICE["trainer"],
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={folder}/run",
    ]


@pytest.mark.parametrize(("family", "layout", "trained"), CASES)
def test_engines_and_trainer_see_the_same_pictures(
    family: str,
    layout: tuple[str, ...],
    trained: bool,
    tmp_path: Path,
    fast_ray: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*prepared(tmp_path, family), *layout]
    model, run = tmp_path / "model", tmp_path / "run"
    with nothing_left():
        assert main(words) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines}
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/logprob_diff_max"] < AGREEMENT, steps[step]
        assert steps[step]["pictures/count"] == 8 and steps[step]["pictures/different"] == 4
    assert "val/squares/reward" in steps[STEPS]
    before, after = tower_of(model), tower_of(run / "hf" / "final")
    assert before.keys() == after.keys()
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 1e-3 if trained else moved == 0
    sees_pictures_in_its_report(run)

    (tmp_path / "squares" / OWN_FILE).write_bytes(picture(56, 56))
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
    given = [word for word in prepared(tmp_path, "qwen2_5_vl") if not word.startswith(("algorithm", "actor.use_kl"))]
    pairs = [*given, "algorithm=online_dpo", "--check"]
    capsys.readouterr()
    assert main([*pairs, "actor.microbatch_patches=31"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "actor.microbatch_patches=31: 12 of 12 pairs do not fit" in said and "Write 32 or more" in said
    assert main([*pairs, "actor.microbatch_patches=32"]) == 0
