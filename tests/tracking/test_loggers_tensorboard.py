"""Event files are read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.tracking.sinks import Tracker

TRAINER = TrainerConfig(logger=[Logger.tensorboard], log_val_generations=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_and_samples_come_back_and_a_resumed_run_hides_what_it_redoes(tmp_path: Path) -> None:
    with Tracker.open(tmp_path, TRAINER, {}, 4) as tracker:
        tracker.samples(0, "validation", lambda: [{"prompt": "2+2?", "response": "4\n#### 4"}, {"prompt": "no"}])
        tracker.samples(0, "rollouts", lambda: [{"prompt": "not shown"}])
        for step in range(4):
            tracker.log(step, {"reward/mean": step / 3, "val/a/b/accuracy": 0.5})
    with Tracker.open(tmp_path, TRAINER, {}, 4, resumed_step=1) as tracker:
        tracker.log(2, {"reward/mean": 20})
    events = EventAccumulator(str(tmp_path / "logs/tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward/mean")] == [
        (0, 0.0), (1, float(np.float32(1 / 3))), (2, 20.0)
    ]  # fmt: skip
    assert [each.value for each in events.Scalars("val/a/b/accuracy")] == [0.5, 0.5]
    assert [tag for tag in events.Tags()["tensors"] if "sample" in tag] == ["validation/sample_0/text_summary"]
    (sample,) = events.Tensors("validation/sample_0/text_summary")
    assert sample.tensor_proto.string_val[0].decode() == "**prompt**\n\n    2+2?\n\n**response**\n\n    4\n    #### 4"
