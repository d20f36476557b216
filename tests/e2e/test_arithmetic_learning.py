"""`make train`'s second half in other ways: by adapters as well as by whole weights, and from a teacher in less.

Held-out problems, four answers each, so that an accuracy is known to about one point.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.cli import main
from mcore_rl.tracking.jsonl import read_metrics
from tests.support import fine_tuned
from tests.support.vllm_device import ON_VLLM_DEVICE

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3600), pytest.mark.usefixtures("processes")]
POINTS = 0.03
LIFT = 0.2
LORA = ("actor.lora.rank=32", "actor.lora.alpha=32", "actor.optim.lr=1.5e-3")
DISTILL_STEPS, DISTILL_BATCH = 120, 64
DISTILL = (
    "algorithm=distill", "algorithm.distill.divergence=forward_kl", "rollout.n=1",
    f"data.train_batch_size={DISTILL_BATCH}", f"actor.ppo_mini_batch_size={DISTILL_BATCH}", "actor.optim.lr=1e-3",
    f"trainer.total_training_steps={DISTILL_STEPS}",
)  # fmt: skip
GRPO_SAMPLES = 32 * 8  # of a step of the recipe
ACCURACY = "val/arithmetic/accuracy"


Metrics = list[dict[str, float]]


def train(folder: Path, name: str, *overrides: str) -> Metrics:
    """The metrics of a run into ``folder``/``name``."""
    words = (*fine_tuned.files(folder), fine_tuned.model(folder), "rollout.val_kwargs.n=4", "trainer.save_freq=0",
             f"trainer.default_local_dir={folder / name}", "trainer.logger=[]", ON_VLLM_DEVICE["trainer"])  # fmt: skip
    assert main(["train", "recipe=arithmetic_grpo", *words, *overrides]) == 0
    return read_metrics(folder / name / "metrics.jsonl")


def steps_until(metrics: Metrics, accuracy: float) -> float:
    """The step after which a validation is above ``accuracy`` for the first time."""
    return next(each["step"] for each in metrics if each.get(ACCURACY, 0.0) > accuracy)


@dataclass(frozen=True)
class Learned:
    """folder: of the data and the first model.  whole: the metrics of a run of whole weights."""

    folder: Path
    whole: Metrics


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    folder = fine_tuned.write(tmp_path_factory.mktemp("arithmetic"))
    return Learned(folder, train(folder, "whole"))


def test_adapters_reach_what_whole_weights_reach(learned: Learned) -> None:
    """In as many steps, and no other weight changes by a bit."""
    metrics = train(learned.folder, "adapters", *LORA)
    before, after = learned.whole[0][ACCURACY], learned.whole[-1][ACCURACY]
    assert after > before + LIFT
    assert metrics[0][ACCURACY] == pytest.approx(before)
    assert metrics[-1][ACCURACY] > after - POINTS
    base, final = (load_file(learned.folder / name / "hf/final/model.safetensors") for name in ("sft", "adapters"))
    moved = {name for name in base if not torch.equal(base[name], final[name])}
    assert moved == {name for name in base if "_proj" in name or ".experts." in name}


def test_a_teacher_is_reached_in_fewer_samples_than_it_took(learned: Learned) -> None:
    metrics = train(learned.folder, "distilled", *DISTILL, f"teacher.path={learned.folder / 'whole/hf/final'}")
    near = learned.whole[-1][ACCURACY] - POINTS
    assert metrics[-1][ACCURACY] > near
    taken = steps_until(metrics, near) * DISTILL_BATCH
    assert taken < steps_until(learned.whole, near) * GRPO_SAMPLES / 2, "half of what the teacher took to come as near"
