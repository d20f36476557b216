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
ACCURACY = "val/arithmetic/accuracy"


@dataclass(frozen=True)
class Learned:
    """folder: of the data and the first model.  before, after: accuracies of a run of whole weights."""

    folder: Path
    before: float
    after: float

    def train(self, name: str, *overrides: str) -> list[dict[str, float]]:
        """The metrics of a run into the folder ``name``."""
        words = (*fine_tuned.files(self.folder), fine_tuned.model(self.folder), "rollout.val_kwargs.n=4",
                 "trainer.save_freq=0", f"trainer.default_local_dir={self.folder / name}", "trainer.logger=[]",
                 ON_VLLM_DEVICE["trainer"])  # fmt: skip
        assert main(["train", "recipe=arithmetic_grpo", *words, *overrides]) == 0
        return read_metrics(self.folder / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    made = Learned(fine_tuned.write(tmp_path_factory.mktemp("arithmetic")), 0.0, 0.0)
    metrics = made.train("whole")
    return Learned(made.folder, metrics[0][ACCURACY], metrics[-1][ACCURACY])


def test_adapters_reach_what_whole_weights_reach(learned: Learned) -> None:
    """In as many steps, and no other weight changes by a bit."""
    metrics = learned.train("adapters", *LORA)
    assert learned.after > learned.before + LIFT
    assert metrics[0][ACCURACY] == pytest.approx(learned.before)
    assert metrics[-1][ACCURACY] > learned.after - POINTS
    base, final = (load_file(learned.folder / name / "hf/final/model.safetensors") for name in ("sft", "adapters"))
    moved = {name for name in base if not torch.equal(base[name], final[name])}
    assert moved == {name for name in base if "_proj" in name or ".experts." in name}


def test_a_teacher_is_reached_in_fewer_samples_than_it_took(learned: Learned) -> None:
    metrics = learned.train("distilled", *DISTILL, f"teacher.path={learned.folder / 'whole/hf/final'}")
    assert metrics[-1][ACCURACY] > learned.after - POINTS
    assert DISTILL_STEPS * DISTILL_BATCH < 80 * 32 * 8 / 2, "half of what the teacher was trained with"
