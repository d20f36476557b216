"""The importance correction against loops over lists."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from mcore_rl.algorithms.advantages.ragged import Trained
from mcore_rl.algorithms.correction import ESTIMATES, REDUCTIONS, Correction, correct, correction_metrics, mean_weight
from mcore_rl.config.algorithm import (
    CorrectionLevel,
    CorrectionMode,
    Rejection,
    RolloutCorrectionConfig,
    algorithm_violations,
)
from mcore_rl.tracking.metrics import metric_of
from tests.algorithms.cases import ALL, Case
from tests.support.settings import algorithm_config

Rows = list[list[float]]


def logprobs(case: Case, seed: int) -> tuple[Rows, Rows]:
    """The trainer's and the sampler's; what stands at untrained tokens is not a number."""
    draw = random.Random(seed)
    rows = [[(draw.gauss(-2, 1), draw.gauss(0, 0.7)) if kept else (math.nan, 0) for kept in m] for m in case.masks]
    return [[a for a, _ in row] for row in rows], [[a + b for a, b in row] for row in rows]


def corrected(case: Case, old: Rows, rollout: Rows, config: RolloutCorrectionConfig, weighs: bool = True) -> Correction:
    flat = [torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in (old, rollout)]
    return correct(flat[0], flat[1], case.inputs().trained, case.lengths, config, weighs=weighs)


def log_ratios(case: Case, old: Rows, rollout: Rows) -> Rows:
    """Of trained tokens."""
    return case.trained([[a - b for a, b in zip(*rows, strict=True)] for rows in zip(old, rollout, strict=True)])


def of_response(row: list[float], level: CorrectionLevel) -> float:
    """The ratio of a response: the product of those of its tokens, or the geometric mean; 1 if it has no token."""
    product_ = math.exp(math.fsum(row))
    return product_ if level is CorrectionLevel.sequence else product_ ** (1 / max(len(row), 1))


def weights_by_hand(ratios: Rows, config: RolloutCorrectionConfig) -> tuple[Rows, list[list[bool]]]:
    """Of trained tokens, and which are inside of the bounds."""
    weights, inside = [], []
    for row in ratios:
        of_tokens = [of_response(row, config.level)] * len(row)
        if config.level is CorrectionLevel.token:
            of_tokens = [math.exp(x) for x in row]
        inside.append([config.mode is CorrectionMode.truncate or config.lower <= r <= config.upper for r in of_tokens])
        weights.append([min(r, config.upper) if kept else 0.0 for r, kept in zip(of_tokens, inside[-1], strict=True)])
    return weights, inside


@pytest.mark.parametrize(("level", "mode"), list(product(CorrectionLevel, CorrectionMode)))
def test_weights_and_mask(level: CorrectionLevel, mode: CorrectionMode) -> None:
    """``zero`` and ``mask`` weigh alike; they differ in what the loss is divided by, which is what is trained."""
    config = RolloutCorrectionConfig(level=level, mode=mode, upper=1.5, lower=0.6)
    for name, case in ALL.items():
        old, rollout = logprobs(case, 1)
        weights, inside = weights_by_hand(log_ratios(case, old, rollout), config)
        result = corrected(case, old, rollout, config)
        trained = inside if mode is CorrectionMode.mask else [[True] * len(row) for row in inside]
        kept = case.at_tokens([[float(x) for x in row] for row in trained])
        assert result.mask_T.tolist() == [bool(x) for x in kept], name
        assert result.weights_T is not None
        assert result.weights_T.tolist() == pytest.approx(case.at_tokens(weights), abs=1e-12), name
        count = sum(map(len, inside))
        left_out = 1 - sum(map(sum, inside)) / count if count else 0
        assert correction_metrics(result.sums, config, weighs=True)["rollout/masked_share"] == pytest.approx(left_out)


@pytest.mark.parametrize(("level", "mode"), list(product(CorrectionLevel, CorrectionMode)))
def test_batch_normalized_weights_have_mean_1(level: CorrectionLevel, mode: CorrectionMode) -> None:
    """Over tokens or responses, all of them; with ``mask`` over those that are trained."""
    config = RolloutCorrectionConfig(level=level, mode=mode, upper=1.5, lower=0.6, batch_normalize=True)
    for name, case in ALL.items():
        old, rollout = logprobs(case, 4)
        weights, inside = weights_by_hand(log_ratios(case, old, rollout), config)
        if level is not CorrectionLevel.token:  # one of each response
            weights, inside = [row[:1] for row in weights], [row[:1] for row in inside]
        flat = [x for row in weights for x in row]
        count = sum(map(sum, inside)) if mode is CorrectionMode.mask else len(flat)
        expected = sum(flat) / count if sum(flat) else 1.0
        sums = corrected(case, old, rollout, config).sums
        assert mean_weight(sums, config) == pytest.approx(expected, rel=1e-12), name
        assert mean_weight(sums, replace(config, batch_normalize=False)) == 1.0


def estimate_by_hand(kind: str, x: float) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


@pytest.mark.parametrize("reject", [each for each in Rejection if each is not Rejection.none])
@pytest.mark.parametrize("weighs", [False, True])
def test_rejection(reject: Rejection, weighs: bool) -> None:
    over, kind = reject.value.rsplit("_", 1)
    upper, lower = (1.3, 0.8) if kind == "k1" else (0.4, None)
    config = RolloutCorrectionConfig(upper=1e9, reject=reject, reject_upper=upper, reject_lower=lower)
    met = set()
    for name, case in ALL.items():
        old, rollout = logprobs(case, 5)
        ratios, expected = log_ratios(case, old, rollout), []
        for row in ratios:
            values = [estimate_by_hand(kind, x) for x in row]
            if over != "token" and row:
                whole = {"seq_sum": math.fsum(values), "seq_mean": math.fsum(values) / len(row), "seq_max": max(values)}
                values = [whole[over]] * len(row)
            inside = [x <= upper if lower is None else lower <= math.exp(x) <= upper for x in values]
            expected.append([float(x) for x in inside])
            met |= set(inside)
        result = corrected(case, old, rollout, config, weighs)
        assert result.mask_T.tolist() == [bool(x) for x in case.at_tokens(expected)], name
        if not weighs:
            assert result.weights_T is None
        else:
            weights = [
                [math.exp(x) * y for x, y in zip(*rows, strict=True)] for rows in zip(ratios, expected, strict=True)
            ]
            assert result.weights_T is not None
            assert result.weights_T.tolist() == pytest.approx(case.at_tokens(weights)), name
        metrics, count = correction_metrics(result.sums, config, weighs=weighs), sum(map(len, ratios))
        left_out = 1 - sum(map(sum, expected)) / count if count else 0
        assert metrics["rollout/masked_share"] == pytest.approx(left_out)
    assert met == {False, True}, "else the cases prove nothing"


def test_every_rejection_is_a_row_and_its_lower_bound_is_the_inverse() -> None:
    rows = {f"{reduction}_{estimate}" for reduction in REDUCTIONS for estimate in ESTIMATES}
    assert {reject.value for reject in Rejection} - {"none"} <= rows
    case = ALL["drawn_3"]
    old, rollout = logprobs(case, 6)
    config = RolloutCorrectionConfig(reject=Rejection.token_k1, reject_upper=1.25)
    given = corrected(case, old, rollout, replace(config, reject_lower=0.8))
    assert torch.equal(corrected(case, old, rollout, config).mask_T, given.mask_T)
    # Which of the two is called the ratio does not matter then; it does where the bounds are not each other's inverse.
    assert torch.equal(corrected(case, rollout, old, config).mask_T, given.mask_T)


@pytest.mark.parametrize("reject", list(Rejection))
@pytest.mark.parametrize("level", [None, *CorrectionLevel])
def test_metrics(level: CorrectionLevel | None, reject: Rejection) -> None:
    """level None: nothing is weighed, and ratios are those of tokens."""
    bound = None if reject is Rejection.none else 1e12  # nothing is rejected, and that is said
    weighs, level = level is not None, level or CorrectionLevel.token
    config = RolloutCorrectionConfig(level=level, upper=1.5, reject=reject, reject_upper=bound)
    for name, case in ALL.items() if reject is Rejection.none else (("drawn_3", ALL["drawn_3"]),):
        old, rollout = logprobs(case, 2)
        rows = log_ratios(case, old, rollout)
        tokens = [x for row in rows for x in row]
        w = [math.exp(x) for x in tokens]
        if level is not CorrectionLevel.token:
            w = [of_response(row, level) for row in rows if row]
        n, tokens = max(len(w), 1), tokens or [0.0]
        w = w or [0.0]
        squares = sum(x * x for x in w)
        expected = {
            "rollout/logprob_diff_mean": sum(map(abs, tokens)) / len(tokens),
            "rollout/logprob_diff_max": max(map(abs, tokens)),
            "rollout/kl_k1": -sum(tokens) / len(tokens),
            "rollout/kl": sum(math.exp(x) - 1 - x for x in tokens) / len(tokens),
            "rollout/ratio_mean": sum(w) / n,
            "rollout/ratio_max": max(w),
            "rollout/ratio_min": min(w),
            "rollout/effective_sample_size": sum(w) ** 2 / (n * squares) if squares else 0.0,
        }
        if weighs:
            expected["rollout/truncated_share"] = sum(x > 1.5 for x in w) / n
        if weighs or reject is not Rejection.none:
            expected["rollout/masked_share"] = 0.0
        metrics = correction_metrics(corrected(case, old, rollout, config, weighs).sums, config, weighs=weighs)
        assert metrics == pytest.approx(expected), name
        assert all(metric_of(key).key == key for key in metrics), "each is a row of the table"


@pytest.mark.parametrize("mode", list(CorrectionMode))
def test_what_does_not_weigh_only_measures(mode: CorrectionMode) -> None:
    """Whatever the bounds are."""
    case = ALL["drawn_3"]
    config = RolloutCorrectionConfig(level=CorrectionLevel.sequence, mode=mode, lower=0.99, upper=1.01)
    result = corrected(case, *logprobs(case, 3), config, weighs=False)
    assert result.weights_T is None and torch.equal(result.mask_T, case.inputs().mask_T)
    of_tokens = corrected(case, *logprobs(case, 3), RolloutCorrectionConfig(), weighs=True)
    metrics = correction_metrics(of_tokens.sums, RolloutCorrectionConfig(), weighs=True)
    measured = correction_metrics(result.sums, config, weighs=False)
    assert measured.items() <= metrics.items() and "rollout/effective_sample_size" in measured


@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_equal_logprobs_weigh_1(level: CorrectionLevel) -> None:
    case = ALL["drawn_3"]
    old, _ = logprobs(case, 3)
    bounds = RolloutCorrectionConfig(level=level, mode=CorrectionMode.mask, lower=1.0, upper=1.0)  # inclusive
    result = corrected(case, old, old, bounds)
    assert torch.equal(result.weights_T, case.inputs().mask_T.double())
    metrics = correction_metrics(result.sums, bounds, weighs=True)
    assert metrics["rollout/effective_sample_size"] == metrics["rollout/ratio_mean"] == 1.0


@pytest.mark.parametrize("mode", list(CorrectionMode))
@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_a_ratio_on_a_bound_is_inside(level: CorrectionLevel, mode: CorrectionMode) -> None:
    """Responses of one token, whose ratios are the bounds and the numbers next to them."""
    ratios = [0.5, math.nextafter(0.5, 0), 2.0, math.nextafter(2.0, 3)]
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    exact = log_ratio.exp()  # the nearest that a logarithm can say
    lower, upper = float(exact[0]), float(exact[2])
    assert exact[1] < lower and exact[3] > upper
    old_T = torch.zeros(8, dtype=torch.float64)
    old_T[1::2] = log_ratio
    config = RolloutCorrectionConfig(level=level, mode=mode, lower=lower, upper=upper)
    mask_T = torch.tensor([False, True] * 4)
    result = correct(old_T, torch.zeros_like(old_T), Trained(mask_T), (2,) * 4, config, weighs=True)
    assert result.weights_T is not None
    least, most = (float(exact[1]), upper) if mode is CorrectionMode.truncate else (0.0, 0.0)
    assert result.weights_T[1::2].tolist() == [lower, least, upper, most]
    kept = [True, mode is not CorrectionMode.mask] * 2
    assert result.mask_T[1::2].tolist() == kept
    assert correction_metrics(result.sums, config, weighs=True)["rollout/truncated_share"] == 0.25


def test_huge_ratios_are_clamped_and_numbers_that_are_none_are_masked() -> None:
    old_T = torch.tensor([0.0, -1.0, -1.0, -1.0, math.nan])
    rollout_T = torch.tensor([0.0, -900.0, 899.0, -1.0, -1.0])
    mask_T = torch.tensor([False, True, True, True, True])
    unbounded = RolloutCorrectionConfig(level=CorrectionLevel.token, upper=1e30, lower=0.0)
    result = correct(old_T[:4], rollout_T[:4], Trained(mask_T[:4]), (4,), unbounded, weighs=True)
    assert result.weights_T is not None
    assert result.weights_T.tolist() == pytest.approx([0, math.exp(20), math.exp(-20), 1], rel=1e-5)
    metrics = correction_metrics(result.sums, unbounded, weighs=True)
    assert metrics["rollout/effective_sample_size"] == pytest.approx(1 / 3)
    masking = RolloutCorrectionConfig(level=CorrectionLevel.token, mode=CorrectionMode.mask)
    masked = correct(old_T, rollout_T, Trained(mask_T), (5,), masking, weighs=True)
    assert masked.mask_T.tolist() == [False, False, False, True, False]
    assert masked.weights_T is not None and masked.weights_T.tolist() == [0, 0, 0, 1, 0]
    for reject in (each for each in Rejection if each is not Rejection.none):
        rejecting = RolloutCorrectionConfig(reject=reject, reject_upper=1e30)
        of_tokens = reject.value.startswith("token")
        rejected = correct(old_T, rollout_T, Trained(mask_T), (5,), rejecting, weighs=False)
        assert rejected.mask_T.tolist() == [False, *([of_tokens] * 3), False], reject


@pytest.mark.parametrize("reject", [each for each in Rejection if each is not Rejection.none])
def test_a_bound_that_a_message_names_rejects_little(reject: Rejection) -> None:
    """Of responses of 200 tokens, to which sampler and trainer give log-probs that differ by 0.02 nats."""
    config = RolloutCorrectionConfig(reject=reject)
    (violation,) = algorithm_violations(algorithm_config(rollout_correction=config))
    bound = float(violation.remedy.removeprefix("Write ").removesuffix(", say"))
    old_T = torch.randn(100 * 200, generator=torch.Generator().manual_seed(1)) * 0.02
    everything = Trained(torch.ones(len(old_T), dtype=torch.bool))
    bounded = replace(config, reject_upper=bound)
    result = correct(old_T, torch.zeros_like(old_T), everything, [200] * 100, bounded, weighs=False)
    assert correction_metrics(result.sums, bounded, weighs=False)["rollout/masked_share"] < 0.1


@pytest.mark.parametrize("mode", list(CorrectionMode))
@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_a_token_that_neither_policy_can_draw_has_the_ratio_1(level: CorrectionLevel, mode: CorrectionMode) -> None:
    """-inf on both sides; a response of +inf and -inf has no ratio, and the weight 0."""
    inf = math.inf
    old = torch.tensor([-1.0, -inf, -2.0, -1.0, -inf, -1.5], dtype=torch.float64)
    rollout = torch.tensor([-1.0, -inf, -2.0, -inf, -1.0, -1.5], dtype=torch.float64)
    config = RolloutCorrectionConfig(level=level, mode=mode, upper=2.0, lower=0.5)
    result = correct(old, rollout, Trained(torch.ones(6, dtype=torch.bool)), [3, 2, 1], config, weighs=True)
    assert result.weights_T is not None
    weights = result.weights_T.tolist()
    assert weights[:3] == [1.0, 1.0, 1.0] and weights[5] == 1.0
    if level is not CorrectionLevel.token:
        assert weights[3:5] == [0.0, 0.0]
    assert all(math.isfinite(weight) for weight in weights)
    assert result.mask_T.tolist()[:3] == [True] * 3
    for key in ("rollout/ratio_mean", "rollout/ratio_max", "rollout/ratio_min", "rollout/effective_sample_size"):
        assert math.isfinite(correction_metrics(result.sums, config, weighs=True)[key]), key
