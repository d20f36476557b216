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
from tests.support.engines import same_bits
from tests.support.run_task import nothing_left
from tests.support.vllm_device import ON_VLLM_DEVICE

STEPS = 3
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
    return {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if "visual." in name}


def prepared(folder: Path, family: str) -> list[str]:
    """The words of a run on squares, in ``folder``, which has the model."""
    data, model = folder / "squares", folder / "model"
    assert main(["prepare", "squares", "--train", "12", "--val", "4", "--out", str(data)]) == 0
    made = ["--data", str(data), "--family", family, "--out", str(model)]
    assert main(["prepare", "tiny-model", *made]) == 0
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
        f"trainer.default_local_dir={folder}/run",
    ]


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.parametrize(("family", "layout", "trained"), CASES)
def test_engines_and_trainer_see_the_same_pictures(
    family: str, layout: tuple[str, ...], trained: bool, tmp_path: Path, fast_ray: None
) -> None:
    words = [*prepared(tmp_path, family), "algorithm=grpo", "actor.use_kl_loss=true", "trainer.save_freq=0", *layout]
    with nothing_left():
        assert main(words) == 0
    run = tmp_path / "run"
    steps = steps_of(run)
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/logprob_diff_max"] < AGREEMENT, steps[step]
        assert steps[step]["pictures/count"] == 8 and steps[step]["pictures/different"] == 4
    assert "val/squares/reward" in steps[STEPS]
    before, after = tower_of(tmp_path / "model"), tower_of(run / "hf" / "final")
    assert before.keys() == after.keys()
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved > 1e-3 if trained else moved == 0


@pytest.mark.tier("full")
def test_a_critic_learns_from_pictures_and_its_checkpoint_begins_another_run(tmp_path: Path, fast_ray: None) -> None:
    """What a checkpoint of the run becomes is what the run wrote at its end."""
    words = [*prepared(tmp_path, "qwen2_5_vl"), "algorithm=ppo", "critic.precision=float32"]
    words += ["critic.ppo_mini_batch_size=4", "critic.microbatch_tokens=256", "critic.optim.lr=1e-5"]
    with nothing_left():
        assert main([*words, f"trainer.save_freq={STEPS}"]) == 0
    run = tmp_path / "run"
    losses = [steps_of(run)[step]["critic/loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0], losses

    step = run / "checkpoints" / f"step_{STEPS}"
    for role in ("actor", "critic"):
        assert main(["convert", "to-hf", "--run", str(step / role), "--out", str(tmp_path / role)]) == 0
    exported, converted = (load_file(each / "model.safetensors") for each in (run / "hf" / "final", tmp_path / "actor"))
    assert same_bits(converted, exported)
    first, learned = tower_of(tmp_path / "model"), tower_of(tmp_path / "critic")
    assert max(float((first[name] - learned[name]).abs().max()) for name in first) > 0, "its tower learns, too"

    again = [f"critic.path={tmp_path}/critic", "trainer.total_training_steps=1", "critic.vision=frozen"]
    with nothing_left():
        assert main([*words, *again, f"trainer.default_local_dir={tmp_path}/again"]) == 0
    assert steps_of(tmp_path / "again")[1]["critic/loss"] < losses[0], "it goes on with what it had learned"
