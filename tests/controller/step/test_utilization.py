"""Utilisation by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.role import Head
from mcore_rl.config.trainer import TrainerConfig, trainer_violations
from mcore_rl.controller.step.utilization import Passes, device_peak, tflop, utilization
from mcore_rl.data.shared_prompts import Stem
from mcore_rl.families.flops import forward_flops, tower_flops
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import Picture
from mcore_rl.parallel.device import detect
from mcore_rl.tracking.metrics import metric_of
from tests.support import models, picture_models

LENGTHS = (3, 5)
SECONDS = {
    "time/update_actor": 3.0, "time/update_critic": 1.0, "time/logprobs": 1.0, "time/reference": 0.5,
    "time/values": 0.5, "time/generate": 9.0,
}  # fmt: skip


def test_a_step_needs_what_its_passes_do() -> None:
    actor, critic = models.moe(), models.dense()
    passes = [
        Passes(model=actor, scored=2, trained=1.5),
        Passes(model=critic, scored=1, trained=1, head=Head.value),
    ]
    a, c = forward_flops(actor, LENGTHS) / 1e12, forward_flops(critic, LENGTHS, head=Head.value) / 1e12
    needed = tflop(LENGTHS, passes)
    assert needed == pytest.approx({"perf/tflop_updates": 4.5 * a + 3 * c, "perf/tflop_logprobs": 2 * a + c})


def test_a_shared_prompt_needs_its_operations_once() -> None:
    """Two samples of a prompt, of 3 and 5 tokens, whose first two are computed once."""
    actor, stems = models.moe(), [Stem((0, 1), 2)]
    trunk, whole = forward_flops(actor, [2]) / 1e12, forward_flops(actor, LENGTHS) / 1e12
    shares, repeats = (Passes(model=actor, scored=1, trained=1, shares=each) for each in (True, False))
    assert tflop(LENGTHS, [shares], stems)["perf/tflop_logprobs"] == pytest.approx(whole - trunk)
    assert tflop(LENGTHS, [shares], stems)["perf/tflop_updates"] == pytest.approx(3 * (whole - trunk))
    assert tflop(LENGTHS, [repeats], stems) == tflop(LENGTHS, [repeats]) == tflop(LENGTHS, [shares])


def test_a_picture_that_sequences_share_needs_its_operations_once() -> None:
    """The tower's backward pass is that of a tower that learns; a pass over other sequences shows no picture."""
    _, model = model_of(picture_models.config("qwen2_5_vl"), pictures=True)
    wide, square = Picture("a", 4, 8, 8), Picture("b", 4, 4, 4)
    text = forward_flops(model, LENGTHS) / 1e12
    grids = [(4, 8), (4, 4)]
    seen, learned = (tower_flops(model, grids, train=train) / 1e12 for train in (False, True))
    for trains_tower, trained in ((True, learned), (False, seen)):
        passes = [
            Passes(model=model, scored=2, trained=1.5, trains_tower=trains_tower),
            Passes(model=model, scored=1, trained=0, lengths_S=LENGTHS),
        ]
        needed = tflop(LENGTHS, passes, images_S=[(wide, square), (wide,)])
        by_hand = {"perf/tflop_updates": 1.5 * (3 * text + trained), "perf/tflop_logprobs": 3 * text + 2 * seen}
        assert needed == pytest.approx(by_hand)
    assert learned > 2 * seen


def test_rates_are_of_a_device_and_its_phases() -> None:
    metrics = {"perf/tflop_updates": 80.0, "perf/tflop_logprobs": 20.0}
    rates = {"perf/tflops_per_device": 10.0, "perf/tflops_per_device_logprobs": 5.0}
    assert utilization(metrics, SECONDS, 2, None) == rates, "no peak, no MFU"
    measured = utilization(metrics, SECONDS, 2, 40.0)
    assert measured == rates | {"perf/mfu": 0.25, "perf/mfu_logprobs": 0.125}
    assert all(metric_of(key) for key in measured | metrics)


def test_a_step_that_trained_nothing_has_no_rate() -> None:
    assert set(tflop(LENGTHS, [Passes(model=models.moe(), scored=1, trained=0)])) == {"perf/tflop_logprobs"}
    metrics = {"perf/tflop_logprobs": 20.0}
    assert set(utilization(metrics, SECONDS, 1, None)) == {"perf/tflops_per_device_logprobs"}
    assert utilization(metrics, {}, 1, 1.0) == {}


def test_the_peak_is_stated_or_the_data_sheets() -> None:
    cpu = detect(Device.cpu)
    gpu = replace(cpu, kind=Device.cuda, device_name="NVIDIA H100 80GB HBM3")
    stated = TrainerConfig(device_peak_tflops=3.0)
    assert device_peak(TrainerConfig(), Precision.bfloat16, cpu) is None
    assert device_peak(stated, Precision.bfloat16, cpu) == 3.0
    assert device_peak(TrainerConfig(), Precision.bfloat16, gpu) == 989.5
    assert device_peak(TrainerConfig(), Precision.float32, gpu) == 67.0
    assert device_peak(stated, Precision.bfloat16, gpu) == 3.0
    assert device_peak(TrainerConfig(), Precision.bfloat16, replace(gpu, device_name="NVIDIA L4")) is None


def test_a_peak_is_positive() -> None:
    assert not trainer_violations(TrainerConfig(device_peak_tflops=0.5))
    [violation] = trainer_violations(TrainerConfig(device_peak_tflops=0.0))
    assert violation.key == "trainer.device_peak_tflops" and "data sheet" in violation.remedy
