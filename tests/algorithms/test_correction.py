"""The importance correction against loops over lists."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mcore_rl.algorithms.correction import correct, correction_metrics
from mcore_rl.algorithms.ragged import Trained
from mcore_rl.config.algorithm import CorrectionLevel, CorrectionMode, RolloutCorrectionConfig
from tests.algorithms.cases import ALL, Case

KEY = "rollout_correction/"


def logprobs(case: Case, seed: int) -> tuple[list[list[float]], list[list[float]]]:
    """The trainer's and the sampler's; what stands at untrained tokens is not a number."""
    draw = random.Random(seed)
    rows = [[(draw.gauss(-2, 1), draw.gauss(0, 0.7)) if kept else (math.nan, 0) for kept in m] for m in case.masks]
    return [[a for a, _ in row] for row in rows], [[a + b for a, b in row] for row in rows]


def found(case: Case, old: list[list[float]], rollout: list[list[float]], config: RolloutCorrectionConfig):  # type: ignore[no-untyped-def]
    flat = [torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in (old, rollout)]
    return correct(flat[0], flat[1], case.inputs().trained, case.lengths, config)


@pytest.mark.parametrize("mode", list(CorrectionMode))
@pytest.mark.parametrize("level", [CorrectionLevel.token, CorrectionLevel.sequence])
def test_weights_and_mask(level: CorrectionLevel, mode: CorrectionMode) -> None:
    config = RolloutCorrectionConfig(level=level, mode=mode, upper=1.5, lower=0.6)
    for name, case in ALL.items():
        old, rollout = logprobs(case, 1)
        weights: list[float] = []
        masks: list[bool] = []
        for mask, mine, theirs in zip(case.masks, old, rollout, strict=True):
            whole = math.exp(math.fsum(a - b for a, b, kept in zip(mine, theirs, mask, strict=True) if kept))
            for kept, a, b in zip(mask, mine, theirs, strict=True):
                ratio = whole if level is CorrectionLevel.sequence else math.exp(a - b)
                trained = kept and (mode is CorrectionMode.truncate or 0.6 <= ratio <= 1.5)
                masks.append(trained)
                weights.append(min(ratio, 1.5) if trained else 0.0)
        result = found(case, old, rollout, config)
        assert result.mask_T.tolist() == masks, name
        assert result.weights_T.tolist() == pytest.approx(weights, abs=1e-12), name
        trained = sum(sum(mask) for mask in case.masks)
        assert correction_metrics(result.sums, config)[KEY + "masked"] == pytest.approx(
            1 - sum(masks) / trained if trained else 0
        )


@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_metrics(level: CorrectionLevel) -> None:
    config = RolloutCorrectionConfig(level=level, upper=1.5)
    for name, case in ALL.items():
        old, rollout = logprobs(case, 2)
        rows = [
            [a - b for a, b, kept in zip(mine, theirs, mask, strict=True) if kept]
            for mask, mine, theirs in zip(case.masks, old, rollout, strict=True)
        ]
        tokens = [x for row in rows for x in row]
        units = [math.fsum(row) for row in rows if row] if level is CorrectionLevel.sequence else tokens
        w, n = [math.exp(x) for x in units], len(units)
        weighing = {"ratio_mean": 0.0, "effective_sample_size": 0.0, "above_upper": 0.0, "masked": 0.0}
        expected = {"logprob_diff_mean": 0.0, "logprob_diff_max": 0.0, "kl_k3": 0.0} | weighing
        if tokens:
            expected |= {
                "logprob_diff_mean": sum(map(abs, tokens)) / len(tokens),
                "logprob_diff_max": max(map(abs, tokens)),
                "kl_k3": sum(math.exp(x) - 1 - x for x in tokens) / len(tokens),
                "ratio_mean": sum(w) / n,
                "effective_sample_size": sum(w) ** 2 / (n * sum(x * x for x in w)),
                "above_upper": sum(x > 1.5 for x in w) / n,
            }
        if level is CorrectionLevel.none:  # nothing is weighed
            expected = {key: value for key, value in expected.items() if key not in weighing}
        metrics = correction_metrics(found(case, old, rollout, config).sums, config)
        assert metrics == pytest.approx({KEY + key: value for key, value in expected.items()}), name


def test_level_none_only_measures() -> None:
    case = ALL["drawn_3"]
    result = found(case, *logprobs(case, 3), RolloutCorrectionConfig())
    assert result.weights_T is None and torch.equal(result.mask_T, case.inputs().mask_T)


def test_equal_logprobs_weigh_1() -> None:
    case = ALL["drawn_3"]
    old, _ = logprobs(case, 3)
    for level in (CorrectionLevel.token, CorrectionLevel.sequence):
        bounds = RolloutCorrectionConfig(level=level, mode=CorrectionMode.mask, lower=1.0, upper=1.0)  # inclusive
        result = found(case, old, old, bounds)
        assert torch.equal(result.weights_T, case.inputs().mask_T.double())
        metrics = correction_metrics(result.sums, bounds)
        assert metrics[KEY + "effective_sample_size"] == metrics[KEY + "ratio_mean"] == 1.0


def test_huge_ratios_are_clamped_and_numbers_that_are_none_are_masked() -> None:
    old_T = torch.tensor([0.0, -1.0, -1.0, -1.0, math.nan])
    rollout_T = torch.tensor([0.0, -900.0, 899.0, -1.0, -1.0])
    mask_T = torch.tensor([False, True, True, True, True])
    unbounded = RolloutCorrectionConfig(level=CorrectionLevel.token, upper=1e30, lower=0.0)
    result = correct(old_T[:4], rollout_T[:4], Trained(mask_T[:4]), (4,), unbounded)
    assert result.weights_T is not None
    assert result.weights_T.tolist() == pytest.approx([0, math.exp(20), math.exp(-20), 1], rel=1e-5)
    assert correction_metrics(result.sums, unbounded)[KEY + "effective_sample_size"] == pytest.approx(1 / 3)
    masking = RolloutCorrectionConfig(level=CorrectionLevel.token, mode=CorrectionMode.mask)
    masked = correct(old_T, rollout_T, Trained(mask_T), (5,), masking)
    assert masked.mask_T.tolist() == [False, False, False, True, False]
    assert masked.weights_T is not None and masked.weights_T.tolist() == [0, 0, 0, 1, 0]
