"""A run that trains adapters, from the command line: it learns as one of whole weights, and the base stays as it was.

A mixture of experts whose experts are split over two training processes, each expert with adapters of its own, and a
real vLLM, which gets ``W + scale B A``, or adapters of the attention that it applies itself, and whose every tensor is
compared with the trainer's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mcore_rl.tracking.jsonl import read_metrics
from tests.e2e.test_learning import LIFT, REWARD, SETTINGS
from tests.support.run_task import overrides, write_task

pytestmark = [pytest.mark.timeout(900), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]
STEPS, RANK, ALPHA = 10, 8, 32.0
LORA = (f"actor.lora.rank={RANK}", f"actor.lora.alpha={ALPHA}", "actor.optim.lr=1e-2")
APPLIED = ("rollout.lora=adapter", "actor.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]")


def _train(task: Path, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    given = overrides(task, directory, *SETTINGS, "algorithm=grpo", "rollout.n=8", *LORA, *more)
    return subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", "train", *given],
        cwd=task.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_task(tmp_path_factory.mktemp("lora") / "task")
    (made / "reward.py").write_text(REWARD)
    return made


def test_a_run_with_adapters_learns_and_leaves_the_base_alone(task: Path) -> None:
    directory = task.parent / "run"
    done = _train(task, directory, "actor.use_kl_loss=true", "trainer.guards.check_weights_freq=1")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(directory / "metrics.jsonl")
    assert rows[-1]["val/arithmetic/reward"] > rows[0]["val/arithmetic/reward"] + LIFT
    # Float32 on both sides: trainer and engine differ by the order of sums, seen up to 2.4e-6; a lost adapter by 0.01.
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    assert rows[1]["kl/loss"] >= 0 and rows[-1]["kl/loss"] > 0.01, "the reference is the base"

    base, final = load_file(task / "model" / "model.safetensors"), load_file(directory / "hf/final/model.safetensors")
    assert base.keys() == final.keys()
    moved = {name for name in base if not torch.equal(base[name], final[name])}
    adapted = {name for name in base if "_proj" in name or ".experts." in name}
    assert moved == adapted, "every linear of every layer and expert, and nothing else"

    kept = sorted((directory / "checkpoints").glob("step_*/actor/rank_*.safetensors"))
    assert len(kept) == 2
    for path in kept:
        with safe_open(path, "pt") as file:
            stored = [name for name in file.keys() if not name.startswith("random/")]  # noqa: SIM118
        assert stored and all(".lora_" in name for name in stored)


def test_engines_that_apply_the_adapters_draw_as_the_trainer_scores(task: Path) -> None:
    directory = task.parent / "applied"
    done = _train(task, directory, *APPLIED, "actor.use_kl_loss=true", "trainer.guards.check_weights_freq=1")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(directory / "metrics.jsonl")
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    assert rows[-1]["val/arithmetic/reward"] > rows[0]["val/arithmetic/reward"] + LIFT
    base, final = load_file(task / "model" / "model.safetensors"), load_file(directory / "hf/final/model.safetensors")
    assert {name for name in base if not torch.equal(base[name], final[name])} == {
        n for n in base if "self_attn" in n and "_proj" in n
    }


def test_adapters_of_experts_are_refused_before_anything_starts(task: Path) -> None:
    done = _train(task, task.parent / "refused-experts", "rollout.lora=adapter", "--check")
    said = done.stderr.replace("\n", " ")
    assert done.returncode == 2 and "rollout.lora" in said and "need Triton" in said and "rollout.lora=merged" in said


def _convert(*words: str | Path) -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", "convert", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_adapters_leave_and_come_back_as_peft_has_them(task: Path) -> None:
    """One step of rate 0 from an adapter's directory exports what it was given; files are read without a run, too."""
    first, again, out = task.parent / "first", task.parent / "again", task.parent / "converted"
    short = ("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.total_training_steps=1")
    done = _train(task, first, *short)
    assert done.returncode == 0, done.stderr
    adapter, (step,) = first / "hf/final/adapter", (first / "checkpoints").glob("step_*")
    saved = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    assert any(name.endswith("mlp.experts.base_layer.lora_B.weight") for name in saved), "of gate and up of all experts"
    done = _train(task, again, *short, f"actor.lora.path={adapter}", "actor.optim.lr=0")
    assert done.returncode == 0, done.stderr
    final, repeated = (load_file(each / "hf/final/model.safetensors") for each in (first, again))
    assert all(torch.equal(final[name], repeated[name]) for name in final), "the same adapters, bit for bit"

    out.mkdir()
    _convert("extract", "--run", step, "--out", out / "adapter")
    extracted = load_file(out / "adapter" / "adapter_model.safetensors")
    assert extracted.keys() == saved.keys() and all(torch.equal(extracted[name], saved[name]) for name in saved)
    _convert("to-hf", "--run", step, "--out", out / "of_run")
    _convert("merge", "--hf", task / "model", "--adapter", adapter, "--out", out / "merged")
    for made in ("of_run", "merged"):
        for name, tensor in load_file(out / made / "model.safetensors").items():
            torch.testing.assert_close(tensor, final[name], rtol=1e-6, atol=1e-7)

    wrong = _train(task, task.parent / "wrong", f"actor.lora.path={adapter}", "actor.lora.rank=4", "--check")
    assert wrong.returncode == 2 and "r=8, and the run has 4" in wrong.stderr.replace("\n", " ")


@pytest.mark.parametrize("form", [(), APPLIED], ids=["merged", "adapter"])
def test_a_resumed_run_ends_as_one_that_never_stopped(task: Path, form: tuple[str, ...]) -> None:
    whole, halves = task.parent / f"whole-{len(form)}", task.parent / f"halves-{len(form)}"
    short = ("trainer.val_before_train=false", "trainer.test_freq=0", *form)
    assert _train(task, whole, *short, "trainer.total_training_steps=3").returncode == 0
    assert _train(task, halves, *short, "trainer.total_training_steps=2").returncode == 0
    done = _train(task, halves, *short, "trainer.total_training_steps=3")
    assert done.returncode == 0, done.stderr
    one, other = (load_file(each / "hf/final/model.safetensors") for each in (whole, halves))
    assert all(torch.equal(one[name], other[name]) for name in one), "bit for bit"


def test_layers_that_the_model_lacks_are_refused_with_those_that_it_has(task: Path) -> None:
    done = _train(task, task.parent / "refused", "actor.lora.target_modules=[qkv_proj,o_proj]", "--check")
    assert done.returncode == 2
    assert "actor.lora.target_modules" in done.stderr and "'qkv_proj'" in done.stderr
    assert "k_proj, lm_head, o_proj, q_proj" in done.stderr.replace("\n", " ")
