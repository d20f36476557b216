"""Tiny models learn by reinforcement what a picture shows, from the command line; shown other pictures, they are lost.

Nothing but the picture tells what is right: the question is the same in every row.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mcore_rl.cli import main
from mcore_rl.tracking.jsonl import read_metrics
from tests.support import prompt_files
from tests.support.run_task import nothing_left
from tests.support.vllm_device import ON_VLLM_DEVICE

SETTINGS = (
    "data.image_key=images", "data.max_prompt_length=48", "algorithm=grpo", "actor.use_kl_loss=false",
    "actor.precision=float32", "actor.microbatch_tokens=4096", "actor.optim.weight_decay=0", "rollout.n=8",
    "rollout.max_num_seqs=256", "rollout.kv_cache_memory_bytes=67108864", "rollout.enforce_eager=true",
    "rollout.val_kwargs.temperature=1.0", "reward.num_workers=1", "trainer.n_gpus_per_node=1", "trainer.save_freq=0",
    "trainer.logger=[]", ON_VLLM_DEVICE["trainer"],
)  # fmt: skip
# Characters of the alphabet's later half are right where the picture is red, the others where it is blue: a policy that
# does not see is right about half the time, whatever it says.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    written = [each for each in solution_str if " " < each <= "~"]
    late = sum(each >= "P" for each in written) / max(1, len(written))
    return late if ground_truth == "red" else 1 - late
"""
COLOURS = {"red": 0, "blue": 2}  # the channel of each
COLOUR_STEPS = 8
LIFT = 0.2


def coloured(count: int, seed: int, source: str, *, told: bool = True) -> list[dict[str, Any]]:
    """Rows of noisy pictures, half of them red.  told: False writes down the other colour as the truth."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        shown, other = sorted(COLOURS, reverse=number % 2 == 0)
        pixels = draw.integers(0, 60, (56, 56, 3), dtype=np.uint8)
        pixels[..., COLOURS[shown]] += 180
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        images = [{"bytes": file.getvalue(), "path": None}]
        truth = shown if told else other
        rows.append(prompt_files.row("<image>What is it?", truth, data_source=source, images=images))
    return rows


def test_a_policy_learns_what_colour_it_is_shown(tmp_path: Path, fast_ray: None) -> None:
    """Held-out pictures, and others that stand in the rows of the other colour, of which it is right the less."""
    prompt_files.write(tmp_path / "data" / "train.parquet", coloured(16 * COLOUR_STEPS, 1, "colours"))
    held_out = coloured(24, 2, "colours") + coloured(24, 3, "exchanged", told=False)
    prompt_files.write(tmp_path / "data" / "val.parquet", held_out)
    (tmp_path / "reward.py").write_text(REWARD)
    made = ["--data", str(tmp_path / "data"), "--family", "qwen2_5_vl", "--out", str(tmp_path / "model")]
    assert main(["prepare", "tiny-model", *made]) == 0
    run = tmp_path / "run"
    words = [
        *SETTINGS,
        f"model.path={tmp_path}/model",
        f"data.train_files=[{tmp_path}/data/train.parquet]",
        f"data.val_files=[{tmp_path}/data/val.parquet]",
        "data.train_batch_size=16",
        "data.max_response_length=12",
        "rollout.ignore_eos=true",
        "rollout.val_kwargs.n=4",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "actor.ppo_mini_batch_size=8",
        "actor.optim.lr=3e-3",
        f"trainer.total_training_steps={COLOUR_STEPS}",
        f"trainer.test_freq={COLOUR_STEPS}",
        f"trainer.default_local_dir={run}",
    ]
    with nothing_left():
        assert main(["train", *words]) == 0
    metrics = read_metrics(run / "metrics.jsonl")
    before, after = metrics[0], metrics[-1]
    assert after["step"] == COLOUR_STEPS
    assert after["val/colours/reward"] > before["val/colours/reward"] + LIFT, (before, after)
    assert after["val/exchanged/reward"] < before["val/exchanged/reward"] - LIFT, (before, after)
