"""The statistics against numpy and numbers worked out by hand, and the causes against evidence made for each."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from mcore_rl.reports.question import ALL, RoundedScores
from mcore_rl.reports.report import (
    MEGATRON,
    PAIRS,
    TRANSFORMERS,
    VLLM,
    Bin,
    DifferenceLimits,
    Evidence,
    Finding,
    LogprobReport,
    MismatchCause,
    Replay,
    Scored,
    Top1,
    exceeded,
    findings,
    largest_differences,
    rounding_report,
    statistics,
    verdict,
)

LENGTHS = (6, 1, 9)  # of three responses
N = sum(LENGTHS)
NOISE = 1e-6


def scored(**changed: np.ndarray) -> Scored:
    """Three scorers that agree but for noise, and for what is ``changed``."""
    random = np.random.default_rng(0)
    truth = -random.exponential(2.0, N)
    logprobs = {name: truth + NOISE * random.standard_normal(N) for name in (VLLM, TRANSFORMERS, MEGATRON)}
    return Scored(
        sample_N=np.repeat(np.arange(3), LENGTHS),
        position_N=np.concatenate([np.arange(length) for length in LENGTHS]),
        token_N=np.arange(N) + 100,
        logprobs=logprobs | changed,
    )


def moved(by: float, seed: int = 1) -> np.ndarray:
    """Transformers' log-probs, and noise of that size."""
    return scored().logprobs[TRANSFORMERS] + by * np.random.default_rng(seed).standard_normal(N)


def listed(given: Scored, evidence: Evidence, dtype: str = "float32") -> tuple[Finding, ...]:
    return findings(given, evidence, dtype, rounding_report(given, evidence))


def found_in(given: Scored, evidence: Evidence, dtype: str = "float32") -> dict[MismatchCause, bool | None]:
    return {finding.cause: finding.found for finding in listed(given, evidence, dtype)}


def replay(differs: float, logprobs: np.ndarray, name: str = TRANSFORMERS) -> Evidence:
    return Evidence(replays={name: Replay(differs=differs, logprobs=logprobs)})


# Statistics


def test_two_tokens_by_hand() -> None:
    """The sampler says ln(1/2) and ln(1/4), the trainer ln(1/4) and ln(1/2): ratios 1/2 and 2, differences of ln 2."""
    given = Scored(
        sample_N=np.array([0, 0]),
        position_N=np.array([0, 1]),
        token_N=np.array([7, 8]),
        logprobs={VLLM: np.log([0.5, 0.25]), MEGATRON: np.log([0.25, 0.5])},
    )
    pair = statistics(VLLM, MEGATRON, given)
    assert pair.max_abs == pair.mean_abs == pytest.approx(math.log(2))
    assert pair.mean == pytest.approx(0)
    assert (pair.ratio_min, pair.ratio_max, pair.ratio_mean) == pytest.approx((0.5, 2.0, 1.25))
    assert pair.ratio_outside == 1.0
    assert set(pair.quantiles.values()) == {pair.max_abs}
    assert [(each.begin, each.end, each.count) for each in pair.bins] == [(0, 1, 1), (1, 2, 1)]


def test_the_sign_is_first_minus_second() -> None:
    given = scored()
    pair = statistics(VLLM, TRANSFORMERS, scored(**{VLLM: given.logprobs[TRANSFORMERS] + 0.3}))
    assert pair.mean == pytest.approx(0.3)
    assert pair.ratio_max == pytest.approx(math.exp(-0.3)), "the trainer finds it less likely than the sampler"
    assert pair.ratio_outside == 1.0, "0.74 lies outside"


def test_against_numpy() -> None:
    given = scored(**{MEGATRON: moved(0.2)})
    d = given.logprobs[VLLM] - given.logprobs[MEGATRON]
    pair = statistics(VLLM, MEGATRON, given)
    ordered = sorted(abs(d))
    # numpy's default quantile lies between two neighbours, in proportion.
    for name, q in (("0.5", 0.5), ("0.9", 0.9), ("0.99", 0.99), ("0.999", 0.999)):
        below = math.floor(q * (N - 1))
        part = q * (N - 1) - below
        expected = ordered[below] + part * (ordered[min(below + 1, N - 1)] - ordered[below])
        assert pair.quantiles[name] == pytest.approx(expected, rel=1e-12)
    inside = sum(0.8 <= math.exp(-x) <= 1.2 for x in d)
    assert 0 < inside < N, "both kinds are there"
    assert pair.ratio_outside == pytest.approx(1 - inside / N)
    assert (pair.max_abs, pair.mean_abs) == pytest.approx((ordered[-1], sum(ordered) / N))


def test_positions_in_bins() -> None:
    """Positions 0, 1, 2-3, 4-7, 8-15 of responses of 6, 1 and 9 tokens; the difference is the position."""
    base = scored()
    given = scored(**{VLLM: base.position_N.astype(float), TRANSFORMERS: np.zeros(N)})
    assert statistics(VLLM, TRANSFORMERS, given).bins == (
        Bin(begin=0, end=1, count=3, mean_abs=0.0, max_abs=0.0),
        Bin(begin=1, end=2, count=2, mean_abs=1.0, max_abs=1.0),
        Bin(begin=2, end=4, count=4, mean_abs=2.5, max_abs=3.0),
        Bin(begin=4, end=8, count=6, mean_abs=(4 + 5 + 4 + 5 + 6 + 7) / 6, max_abs=7.0),
        Bin(begin=8, end=16, count=1, mean_abs=8.0, max_abs=8.0),
    )


def test_one_token_is_enough() -> None:
    one = Scored(
        sample_N=np.array([0]),
        position_N=np.array([0]),
        token_N=np.array([5]),
        logprobs={VLLM: np.array([-1.0]), TRANSFORMERS: np.array([-1.0])},
    )
    assert statistics(VLLM, TRANSFORMERS, one).bins == (Bin(begin=0, end=1, count=1, mean_abs=0.0, max_abs=0.0),)


def test_the_worst_tokens_are_those_of_any_two_scorers() -> None:
    given = scored()
    given.logprobs[VLLM][4] += 3.0
    given.logprobs[MEGATRON][9] -= 5.0
    given.logprobs[TRANSFORMERS][2] += 1.0
    assert largest_differences(given, 3).tolist() == [9, 4, 2]


def test_thresholds() -> None:
    pairs = [statistics(*pair, scored(**{MEGATRON: moved(0.2)})) for pair in PAIRS]
    assert exceeded(pairs, DifferenceLimits(max_abs=10.0, mean_abs=10.0)) == ()
    said = exceeded(pairs, DifferenceLimits(max_abs=1e-4, mean_abs=10.0))
    assert len(said) == 2 and all("megatron" in words and "maximum" in words for words in said)
    assert len(exceeded(pairs, DifferenceLimits(max_abs=1e-4, mean_abs=1e-4))) == 4
    nothing = [dataclasses.replace(pairs[0], max_abs=math.nan)]
    assert len(exceeded(nothing, DifferenceLimits(max_abs=10.0, mean_abs=10.0))) == 1, "NaN keeps no limit"


# Causes


def test_agreement_has_no_cause() -> None:
    given = scored()
    evidence = Evidence(differing_weights={VLLM: {}, MEGATRON: {}}, num_responses=3)
    assert set(found_in(given, evidence).values()) == {False, None}
    pairs = [statistics(*pair, given) for pair in PAIRS]
    assert verdict(pairs, listed(given, evidence)).startswith("They agree")


def test_weights_are_named_first() -> None:
    given = scored(**{MEGATRON: moved(0.2)})
    evidence = Evidence(differing_weights={VLLM: {}, MEGATRON: {f"w{i}": float(i) for i in range(1, 8)}})
    weights = listed(given, evidence)[0]
    assert weights.found and weights.cause is MismatchCause.weights
    assert weights.evidence == (
        "megatron holds 7 tensors otherwise than --hf: w7 (by 7.0e+00), w6 (by 6.0e+00), w5 (by 5.0e+00), "
        "w4 (by 4.0e+00), w3 (by 3.0e+00) and 2 more"
    )
    pairs = [statistics(*pair, given) for pair in PAIRS]
    assert "Cause: the weights" in verdict(pairs, listed(given, evidence))
    # Also where nobody sees it in the numbers: an expert that no token went to.
    assert not verdict([statistics(*PAIRS[0], scored())], [weights]).startswith("They agree")
    assert found_in(given, Evidence())[MismatchCause.weights] is None


def model(**fields: object) -> dict[str, dict[str, object]]:
    return {"layer 0": {"norm_epsilon": 1e-6, "moe.top_k": 2} | fields}


def test_another_configuration_is_found_whatever_the_numbers_say() -> None:
    given = scored()
    same = {name: model() for name in (VLLM, TRANSFORMERS, MEGATRON)}
    assert found_in(given, Evidence(configs=same))[MismatchCause.configuration] is False
    assert found_in(given, Evidence())[MismatchCause.configuration] is None
    other = Evidence(configs=same | {VLLM: model(norm_epsilon=1e-3)})
    causes = listed(given, other)
    (configuration,) = (each for each in causes if each.cause is MismatchCause.configuration)
    assert configuration.evidence == "norm_epsilon of layer 0: vllm 0.001, transformers 1e-06, megatron 1e-06"
    assert configuration.found
    pairs = [statistics(*pair, given) for pair in PAIRS]
    assert "Cause: the configuration is not the same" in verdict(pairs, causes)
    weights = dataclasses.replace(other, differing_weights={VLLM: {"w": 1.0}})
    assert "the weights and the configuration are" in verdict(pairs, listed(given, weights))


def test_what_a_side_does_not_tell_is_said() -> None:
    told = {VLLM: {"layer 0": {"norm_epsilon": 1e-6}}, TRANSFORMERS: model(), MEGATRON: model()}
    outcomes = listed(scored(), Evidence(configs=told, unstated=True))
    (configuration,) = (each for each in outcomes if each.cause is MismatchCause.configuration)
    assert not configuration.found
    assert "not read back from vllm: moe.top_k" in configuration.evidence
    assert "does not say what it was trained with" in configuration.evidence


def test_another_temperature_is_found() -> None:
    """vLLM returned raw log-probs, say, and not those after temperature."""
    other = moved(0.5)
    given = scored(**{VLLM: other + NOISE})
    evidence = Evidence(sampled_from={"something else": moved(0.5, seed=2), "temperature 1": other})
    (sampling,) = (each for each in listed(given, evidence) if each.cause is MismatchCause.sampling)
    assert sampling.found and "those of temperature 1" in sampling.evidence
    assert not found_in(scored(), evidence)[MismatchCause.sampling], "it drew as asked"


def test_sampling_is_not_blamed_for_noise() -> None:
    """A candidate that is closer by chance explains nothing where there is nothing to explain."""
    given = scored()
    evidence = Evidence(sampled_from={"temperature 1": given.logprobs[VLLM]})
    assert not found_in(given, evidence)[MismatchCause.sampling]


def test_routing_is_the_cause_where_replay_mends_it() -> None:
    given = scored(**{MEGATRON: moved(0.2)})
    mended = replay(0.03, moved(NOISE))
    assert found_in(given, mended)[MismatchCause.routing] is True
    assert found_in(given, replay(0.0, moved(NOISE)))[MismatchCause.routing] is False
    assert found_in(given, replay(0.03, moved(0.19)))[MismatchCause.routing] is False
    assert found_in(given, Evidence())[MismatchCause.routing] is None


def test_routing_is_the_cause_of_a_few_large_differences() -> None:
    """Replay leaves the rounding of all tokens, and with it nearly the mean, and mends the one that went elsewhere."""
    mended = moved(0.1)
    elsewhere = mended.copy()
    elsewhere[3] += 0.6
    given = scored(**{MEGATRON: elsewhere})
    reference = given.logprobs[TRANSFORMERS]
    assert abs(mended - reference).mean() > 0.5 * abs(elsewhere - reference).mean()
    assert found_in(given, replay(0.01, mended))[MismatchCause.routing] is True


def test_the_routing_of_vllm_is_compared_where_it_is_recorded() -> None:
    given = scored(**{VLLM: moved(0.2)})  # Megatron goes where transformers goes, and vLLM does not
    theirs = Replay(differs=0.0, logprobs=given.logprobs[MEGATRON])
    went_elsewhere = Replay(differs=0.02, logprobs=given.logprobs[VLLM] + NOISE)
    evidence = Evidence(replays={TRANSFORMERS: theirs, VLLM: went_elsewhere})
    (routing,) = (each for each in listed(given, evidence) if each.cause is MismatchCause.routing)
    assert (
        routing.found and "2.00% of tokens and layers chose other experts in Megatron than in vllm" in routing.evidence
    )
    assert found_in(given, Evidence(replays={TRANSFORMERS: theirs}))[MismatchCause.routing] is False


def test_precision_is_the_cause_where_float32_agrees() -> None:
    truth = {TRANSFORMERS: moved(NOISE), MEGATRON: moved(NOISE, seed=2)}
    rounded = scored(**{name: moved(0.01, seed) for seed, name in enumerate((VLLM, TRANSFORMERS, MEGATRON))})
    evidence = Evidence(float32=truth)
    assert found_in(rounded, evidence, "bfloat16")[MismatchCause.precision] is True
    wrong_in_both = Evidence(float32=truth | {MEGATRON: moved(0.02)})
    assert found_in(rounded, wrong_in_both, "bfloat16")[MismatchCause.precision] is False
    vllm_is_wrong = dataclasses.replace(rounded, logprobs=rounded.logprobs | {VLLM: moved(0.2)})
    assert found_in(vllm_is_wrong, evidence, "bfloat16")[MismatchCause.precision] is False
    assert found_in(rounded, Evidence())[MismatchCause.precision] is False, "float32 is what it was computed in"


def in_fp8(left: float) -> tuple[Scored, Evidence]:
    """vLLM in fp8: rounding moves log-probs by 0.3, and kernels by ``left``."""
    plain, weights, activations = moved(0.0), moved(0.2), moved(0.2) + 0.1
    drawn = activations + left
    given = scored(**{VLLM: drawn, TRANSFORMERS: plain + 0.02, MEGATRON: plain - 0.02})
    both = RoundedScores(weights=weights, activations=activations)
    alone = RoundedScores(weights=plain + 0.05, activations=plain + 0.04)
    return given, Evidence(
        float32={TRANSFORMERS: plain, MEGATRON: plain}, rounded={ALL: both, "attention": alone, "dense": both}
    )


def test_the_difference_of_fp8_in_parts() -> None:
    given, evidence = in_fp8(left=-0.03)
    parts = rounding_report(given, evidence)
    assert parts is not None
    assert (parts.left_mean, parts.left_max) == pytest.approx((0.03, 0.03))
    assert parts.expected_mean == pytest.approx(np.abs(moved(0.2) + 0.1 - moved(0.0)).mean())
    assert (parts.bfloat16_mean, parts.bfloat16_max) == pytest.approx((0.02, 0.02))
    moved_by = 0.2 * np.random.default_rng(1).standard_normal(N)
    assert parts.whole_mean == pytest.approx(np.abs(moved_by + 0.07).mean())
    assert parts.whole_max == pytest.approx(np.abs(moved_by + 0.07).max())
    whole, attention, dense = parts.effects
    assert (whole.group, attention.group, dense.group) == (ALL, "attention", "dense")
    assert (whole.weights_mean, whole.weights_max) == pytest.approx((np.abs(moved_by).mean(), np.abs(moved_by).max()))
    assert (whole.activations_mean, whole.activations_max) == pytest.approx((0.1, 0.1))
    assert (attention.weights_mean, attention.activations_mean) == pytest.approx((0.05, 0.01))
    assert rounding_report(given, Evidence()) is None


def test_quantisation_is_the_cause_where_rounding_explains_it() -> None:
    """Kernels that are wrong are no rounding: the difference is then much larger than what rounding makes."""
    assert found_in(*in_fp8(left=0.01), "bfloat16")[MismatchCause.quantisation] is True
    assert found_in(*in_fp8(left=0.01), "bfloat16")[MismatchCause.precision] is True, "of the other two"
    assert found_in(*in_fp8(left=2.0), "bfloat16")[MismatchCause.quantisation] is False
    assert found_in(scored(), Evidence())[MismatchCause.quantisation] is False


def test_tokenisation_is_found_and_explains_nothing() -> None:
    given = scored()
    evidence = Evidence(num_responses=3, retokenised=2)
    outcomes = listed(given, evidence)
    assert outcomes[-1].found and "2 of 3 responses" in outcomes[-1].evidence
    assert verdict([statistics(*pair, given) for pair in PAIRS], outcomes).startswith("They agree")


def test_what_nothing_explains_is_said() -> None:
    given = scored(**{MEGATRON: moved(0.2)})
    outcomes = listed(given, Evidence(differing_weights={VLLM: {}, MEGATRON: {}}))
    assert "nothing that was examined explains it" in verdict([statistics(*pair, given) for pair in PAIRS], outcomes)


def test_the_report_is_json() -> None:
    given = scored()
    pairs = tuple(statistics(*pair, given) for pair in PAIRS)
    report = LogprobReport(
        settings={"dtype": "float32"},
        num_tokens=N,
        verdict="fine",
        findings=listed(given, Evidence()),
        pairs=pairs,
        top1=Top1(count=4, agreement={MEGATRON: 1.0}),
        worst=(),
        exceeded=(),
    )
    assert report.is_sound
    assert not dataclasses.replace(report, exceeded=("too far",)).is_sound
    other = listed(given, Evidence(configs={VLLM: model(), MEGATRON: model(norm_epsilon=1.0)}))
    assert not dataclasses.replace(report, findings=other).is_sound
    read = json.loads(json.dumps(report.as_json()))
    assert [finding["cause"] for finding in read["findings"]] == [cause.value for cause in MismatchCause]
    assert read["pairs"][0]["bins"][0]["count"] == 3 and read["top1"]["count"] == 4
