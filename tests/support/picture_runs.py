"""Runs of ``mcore-rl train`` that see pictures: the task in files, made from the command line, and the settings."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.cli import main
from tests.support.vllm_device import ON_VLLM_DEVICE

STEPS = 3
PROMPTS, SAMPLES = 4, 2  # of a step
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(letter.isdigit() for letter in solution_str) / (1 + len(solution_str))
"""


def write_task(folder: Path, family: str) -> Path:
    """``squares`` of 12 prompts and 4 to validate with, ``model`` of ``family``, and ``reward.py`` in ``folder``."""
    squares = folder / "squares"
    assert main(["prepare", "squares", "--train", str(STEPS * PROMPTS), "--val", "4", "--out", str(squares)]) == 0
    made = ["--data", str(squares), "--family", family, "--out", str(folder / "model")]
    assert main(["prepare", "tiny-model", *made]) == 0
    (folder / "reward.py").write_text(REWARD)
    return folder


def words(task: Path, directory: Path, *more: str, algorithm: str = "grpo") -> list[str]:
    """The arguments of a run in ``directory`` on two processes."""
    return [
        "train",
        f"model.path={task}/model",
        f"data.train_files=[{task}/squares/train.parquet]",
        f"data.val_files=[{task}/squares/val.parquet]",
        "data.image_key=images",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        f"custom_reward_function.path={task}/reward.py",
        "reward.num_workers=1",
        f"algorithm={algorithm}",
        "actor.use_kl_loss=true",
        "actor.precision=float32",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        "actor.microbatch_tokens=256",
        "actor.optim.lr=3e-3",
        f"rollout.n={SAMPLES}",
        "rollout.max_num_seqs=16",
        "rollout.kv_cache_memory_bytes=16777216",
        "rollout.enforce_eager=true",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[]",
        ON_VLLM_DEVICE["trainer"],
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=0",
        f"trainer.default_local_dir={directory}",
        *more,
    ]


def exchanged(source: Path, target: Path) -> Path:
    """The rows of ``source``, each with the picture of the row before."""
    rows = pq.read_table(source)
    images = rows["images"].to_pylist()
    column = pa.array([images[-1], *images[:-1]], type=rows.schema.field("images").type)
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows.set_column(rows.schema.get_field_index("images"), "images", column), target)
    return target
