"""A role is one row of the table: three rows of a test's own, through the command line, and nothing else is written.

Two runs: one of three steps that saves each of them, and one that goes on from its second.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from tests.house.source import ROOT
from tests.support import run_task
from tests.support.run_task import AGREEMENT, SPEED, nothing_left, write_task

STEPS, SAVED = 3, 2
DECAY, EVERY = 0.5, 2  # as tests/support/own_roles.py says, whose rows are for a process of their own


OWN_ROLES = [sys.executable, "-m", "tests.support.own_roles"]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OWN_ROLES, *words], cwd=ROOT, text=True, capture_output=True, check=False, timeout=240)


@dataclass
class Answer:
    returncode: int
    stdout: str
    stderr: str


def answers(*commands: list[str]) -> list[Answer]:
    """Of commands that start nothing, in one process: its imports take two seconds."""
    done = subprocess.run(
        [*OWN_ROLES, "--each"], cwd=ROOT, text=True, capture_output=True, check=True, timeout=240,
        input=json.dumps(commands),
    )  # fmt: skip
    return [Answer(**each) for each in json.loads(done.stdout)]


def of_roles(task: Path, *more: str) -> list[str]:
    """Settings of the three, on the command line."""
    return [
        f"tutor.path={task}/dense",
        "tutor.parallel.tp=2",
        f"process.path={task}/other",
        "process.parallel.pp=2",
        "process.optim.lr=1e-3",
        "process.ppo_mini_batch_size=8",
        *more,
    ]


def write_dense(directory: Path, tokenizer_of: Path, seed: int, hidden_size: int = 32) -> None:
    """A model with the tokens of the task's, and two heads for two ranks; in vLLM's CPU engine each takes 32."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(seed)
    config = Qwen2Config(
        num_hidden_layers=2, hidden_size=hidden_size, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass
class Observed:
    """A run's directory, and its metrics by step."""

    directory: Path
    metrics: dict[int, dict[str, float]]

    def tensors(self, step: int, role: str) -> dict[str, torch.Tensor]:
        """All that the ranks of ``role`` saved after ``step``, random states and all."""
        tensors = {}
        for path in sorted((self.directory / "checkpoints" / f"step_{step}" / role).glob("*.safetensors")):
            with safe_open(path, "pt") as held:
                tensors |= {f"{path.stem}/{name}": held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        return tensors


def run(task: Path, directory: Path) -> Observed:
    settings = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_restarts=0"]
    with nothing_left():
        done = command("train", *run_task.overrides(task, directory, *settings, *of_roles(task)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Observed(directory, {line.pop("step"): line for line in lines})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    write_dense(directory / "dense", directory / "model", 1)
    write_dense(directory / "other", directory / "model", 2)
    return directory


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, processes: None) -> Observed:
    return run(task, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def resumed(task: Path, whole: Observed, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    directory = tmp_path_factory.mktemp("resumed")
    shutil.copytree(whole.directory / "checkpoints" / f"step_{SAVED}", directory / "checkpoints" / f"step_{SAVED}")
    return run(task, directory)


def test_a_row_makes_a_configuration_group(task: Path) -> None:
    shown = ["train", "--cfg", "all", "model.path=m", "data.train_files=[f]"]
    done, wrong = answers([*shown, *of_roles(task)], [*shown, "tutor.paralel.tp=2"])
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("\ntutor:") :]
    assert f"path: {task}/dense" in text and "tp: 2" in text.partition("\nprocess:")[0]
    assert "ppo_mini_batch_size: 8" in text.partition("\nprocess:")[2]
    assert wrong.returncode == 2 and "tutor.paralel.tp=2: there is no such key" in wrong.stderr
    assert "Did you mean tutor.parallel.tp" in wrong.stderr


def test_a_group_without_its_role_and_a_setting_of_training_are_refused(task: Path) -> None:
    sound = ["train", *run_task.overrides(task, task / "never")]
    lone, still, uneven, wide = answers(
        [*sound, "tutor.parallel.tp=2"],
        [*sound, *of_roles(task, "tutor.optim.lr=1", "tutor.parallel.ep=3")],
        [*sound, *of_roles(task, "process.parallel.tp=4", "process.ppo_mini_batch_size=3")],
        [*sound, *of_roles(task, "process.parallel.tp=4")],
    )
    assert lone.returncode == 2 and "tutor.parallel.tp=2: is not read: there is no tutor" in lone.stderr
    assert "tutor.path=DIR" in lone.stderr
    assert still.returncode == 2 and "tutor.optim.lr=1.0: is not read: the tutor is not trained" in still.stderr
    assert "process.ppo_mini_batch_size=3: does not divide data.train_batch_size=8" in uneven.stderr
    assert wide.returncode == 2 and "process.parallel" in wide.stderr and not (task / "never").exists()


@pytest.mark.tier("full")
def test_each_role_reports_under_its_name(whole: Observed) -> None:
    assert list(whole.metrics) == [1, 2, 3]
    for step, metrics in whole.metrics.items():
        assert metrics["process/grad_norm"] > 0 and metrics["process/lr"] == 1e-3, step
        assert {"time/tutor_scores", "time/process_scores", "time/update_process"} <= metrics.keys()
        assert not any(key.startswith("tutor/") for key in metrics), "it is not trained"
        assert metrics["process/change"] < 1e-4, "one update: in it, the weights are those that scored"
    lead = [whole.metrics[step]["process/lead"] for step in (1, 2, 3)]
    assert lead[0] == 0 and lead[1] > 1e-3 and lead[2] > 1e-3, "the average stays behind"
    gap = [whole.metrics[step]["process/gap"] for step in (1, 2, 3)]
    assert gap[0] > 0.1 and gap[2] < gap[0], "it learns from the tutor"


@pytest.mark.tier("full")
def test_the_planner_counts_them(whole: Observed) -> None:
    plan = (whole.directory / "plan.json").read_text()
    for part in (
        "tutor weights",
        "process weights",
        "process optimizer",
        "process_copy weights",
        "reference weights",
    ):
        assert part in plan, part
    assert "tutor optimizer" not in plan and "tutor checkpoints" not in plan


@pytest.mark.tier("full")
def test_what_is_trained_is_saved_and_what_is_frozen_is_not(whole: Observed) -> None:
    roles = {path.name for path in (whole.directory / "checkpoints/step_2").iterdir() if path.is_dir()}
    assert roles == {"actor", "process"}
    assert json.loads((whole.directory / "checkpoints/step_2/run.json").read_text())["roles"] == ["actor", "process"]


@pytest.mark.tier("full")
def test_frozen_weights_move_as_the_row_says(whole: Observed) -> None:
    """By hand, from the files: main weights and copies after each step."""
    saved = {step: whole.tensors(step, "process") for step in (1, 2, 3)}
    names = [name for name in saved[1] if "/main/" in name]
    assert len(names) > 10
    for name in names:
        copy = name.replace("/main/", "/snapshot.process_copy/")
        for step in (2, 3):
            expected = saved[step - 1][copy] * DECAY + saved[step][name] * (1 - DECAY)
            assert torch.equal(saved[step][copy], expected), (step, name)
    saved = {step: whole.tensors(step, "actor") for step in (1, 2, 3)}
    names = [name for name in saved[1] if "/main/" in name]
    moved = 0
    for name in names:
        first, second, third = (saved[step][name.replace("/main/", "/snapshot.reference/")] for step in (1, 2, 3))
        assert torch.equal(second, saved[EVERY][name]) and torch.equal(third, second), name
        moved += not torch.equal(first, second)
    assert moved > len(names) / 2


@pytest.mark.tier("full")
def test_a_run_goes_on_bit_for_bit(whole: Observed, resumed: Observed) -> None:
    def trained(metrics: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in metrics.items() if not key.startswith(SPEED) and key not in AGREEMENT}

    assert trained(resumed.metrics[STEPS]) == trained(whole.metrics[STEPS])
    for role in ("actor", "process"):
        ours, theirs = whole.tensors(STEPS, role), resumed.tensors(STEPS, role)
        assert ours.keys() == theirs.keys() and len(ours) > 20
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), role
