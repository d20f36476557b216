"""Compares log-probs of the same tokens by vLLM, transformers and Megatron, and names why they differ.

Pure: arrays in, a report out; ``scoring`` runs the models.  A difference alone means little, so the report examines
weights, routing, precision, sampling parameters and tokenisation too, and names the cause that the evidence supports,
or states that there is none.

All statistics are over the N response tokens that vLLM drew; prompts are not scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np

from mcore_rl.config.engine import Precision
from mcore_rl.ground.arrays import Float64Array, Int64Array
from mcore_rl.proofs.effective_config import EffectiveConfig, config_differences, unread
from mcore_rl.reports.question import ALL, RoundedScores

VLLM = "vllm"
TRANSFORMERS = "transformers"
MEGATRON = "megatron"
SCORERS = (VLLM, TRANSFORMERS, MEGATRON)
PAIRS = ((VLLM, TRANSFORMERS), (MEGATRON, TRANSFORMERS), (VLLM, MEGATRON))
QUANTILES = (0.5, 0.9, 0.99, 0.999)
RATIO_BOUNDS = (0.8, 1.2)  # PPO's clip range of 0.2 (arXiv:1707.06347)
ROUNDING = 1e-4  # nats: effect of the order of float32 sums on a log-prob; measured maxima are in docs/logprobs.md
EXPLAINED = 0.5  # a cause explains the difference if removing it leaves at most this share of the mean
MAX_WORST = 10
MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class DifferenceLimits:
    """What every pair must keep, in nats: the largest difference of a token, and the mean over all tokens."""

    max_abs: float
    mean_abs: float


# What no pair of sound scorers came near; docs/logprobs.md has the measurements.
LIMITS = {
    Precision.float32: DifferenceLimits(max_abs=1e-4, mean_abs=1e-5),
    Precision.bfloat16: DifferenceLimits(max_abs=1.0, mean_abs=0.03),
}


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Differences at response positions ``begin`` to ``end`` (exclusive), from 0.  count: number of tokens."""

    begin: int
    end: int
    count: int
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class PairStatistics:
    """``first`` minus ``second``, in nats.  quantiles: of the absolute difference, by QUANTILES.

    ratio_*: of exp(second - first), with ``first`` the sampler and ``second`` the trainer the probability ratio of a
    policy-gradient step before its first update.  ratio_outside: share of tokens outside RATIO_BOUNDS.
    """

    first: str
    second: str
    max_abs: float
    mean_abs: float
    mean: float
    quantiles: dict[str, float]
    ratio_min: float
    ratio_max: float
    ratio_mean: float
    ratio_outside: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """A token with the largest difference between any two scorers.

    position: in the response.  text: the text around it, with the token in brackets.  logprobs: by scorer.
    """

    prompt: str
    sample: int
    position: int
    token: int
    text: str
    difference: float
    logprobs: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Top1:
    """Agreement on the likeliest token.  count: greedy tokens of vLLM.  agreement: share of them, by other scorer."""

    count: int
    agreement: dict[str, float]


class MismatchCause(Enum):
    """A reason why log-probs of the same tokens differ, in the order of examination."""

    weights = "weights"
    configuration = "configuration"
    sampling = "sampling parameters"
    routing = "routing"
    quantisation = "quantisation"
    precision = "precision"
    tokenisation = "tokenisation"


MODEL = (MismatchCause.weights, MismatchCause.configuration)  # found: the scorers do not have the same model


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome for one cause.

    found: whether the evidence shows it; None if nothing could be examined.  evidence: numbers, in words.
    """

    cause: MismatchCause
    found: bool | None
    evidence: str


Examined = tuple[bool | None, str]  # found and evidence of a ``Finding``


@dataclass(frozen=True, kw_only=True)
class Scored:
    """N response tokens and their log-probs.

    sample_N: index of the sample.  position_N: in its response.  token_N: token id.  logprobs: by scorer, [N] each,
    under log_softmax(logits / temperature) (vLLM's: as it reports them).
    """

    sample_N: Int64Array
    position_N: Int64Array
    token_N: Int64Array
    logprobs: Mapping[str, Float64Array]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """differs: share of (token, layer) with other experts in Megatron.  logprobs: Megatron's, with those experts."""

    differs: float
    logprobs: Float64Array


@dataclass(frozen=True, kw_only=True)
class RoundingEffect:
    """What rounding does to transformers' log-probs in float32, where a group of layers alone is rounded; in nats.

    weights: the group's matrices are dequantised.  activations: what they multiply is rounded, besides.
    """

    group: str
    weights_mean: float
    weights_max: float
    activations_mean: float
    activations_max: float


@dataclass(frozen=True, kw_only=True)
class RoundingReport:
    """The difference between vLLM in fp8 and transformers in float32, taken apart; mean and maximum, in nats.

    whole: between both.  expected: what rounding of all layers makes in transformers.  left: between vLLM and
    transformers so rounded; not only kernels, since bfloat16 moves inputs over the middle of two numbers of fp8.
    bfloat16: what the dtype alone makes in transformers.  effects: of all layers, then of each group.
    """

    whole_mean: float
    whole_max: float
    expected_mean: float
    expected_max: float
    left_mean: float
    left_max: float
    bfloat16_mean: float
    bfloat16_max: float
    effects: tuple[RoundingEffect, ...]

    @property
    def is_explained(self) -> bool:
        """Whether rounding alone makes at least half of vLLM's mean difference; wrong kernels make much more."""
        return self.expected_mean >= EXPLAINED * self.whole_mean


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Other measurements; None or empty if not made.

    differing_weights: scorer -> Hugging Face name -> largest absolute difference of an element.
    float32: log-probs of transformers and Megatron in float32, if the scores have another dtype.
    sampled_from: description -> transformers' log-probs under another distribution that vLLM may have drawn from.
    truncated: whether top-p or top-k cut the distribution.
    configs: what each scorer's model computes with, read back from it.
    unstated: Megatron's weights are of a checkpoint that does not say which configuration it was trained with.
    rounded: group of layers -> transformers' log-probs in float32 after vLLM's rounding, where it quantises.
    replays: scorer -> what Megatron makes of its expert choices: transformers', and vLLM's where it records them.
    num_responses, retokenised: responses with text, and those whose text encodes to other tokens.
    """

    differing_weights: Mapping[str, Mapping[str, float]] | None = None
    float32: Mapping[str, Float64Array] = field(default_factory=dict)
    sampled_from: Mapping[str, Float64Array] = field(default_factory=dict)
    truncated: bool = False
    configs: Mapping[str, EffectiveConfig] = field(default_factory=dict)
    unstated: bool = False
    rounded: Mapping[str, RoundedScores] = field(default_factory=dict)
    replays: Mapping[str, Replay] = field(default_factory=dict)
    num_responses: int = 0
    retokenised: int = 0


@dataclass(frozen=True, kw_only=True)
class LogprobReport:
    """The report.  settings: of the question.  verdict: one sentence.  exceeded: exceeded limits, in words."""

    settings: dict[str, Any]
    num_tokens: int
    verdict: str
    findings: tuple[Finding, ...]
    pairs: tuple[PairStatistics, ...]
    top1: Top1 | None
    worst: tuple[WorstToken, ...]
    exceeded: tuple[str, ...]
    rounding: RoundingReport | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no limit is exceeded, and all scorers have the same model, whether or not their numbers show it."""
        return not self.exceeded and not any(each.found for each in self.findings if each.cause in MODEL)

    def as_json(self) -> dict[str, Any]:
        """The report as a dictionary that ``json.dump`` can write."""
        fields = asdict(self)
        for finding in fields["findings"]:
            finding["cause"] = finding["cause"].value
        return fields


def statistics(first: str, second: str, scored: Scored) -> PairStatistics:
    """How the log-probs of two scorers differ.  N must be positive."""
    d_N = scored.logprobs[first] - scored.logprobs[second]
    abs_N = np.abs(d_N)
    ratio_N = np.exp(-d_N)
    low, high = RATIO_BOUNDS
    return PairStatistics(
        first=first,
        second=second,
        max_abs=float(abs_N.max()),
        mean_abs=float(abs_N.mean()),
        mean=float(d_N.mean()),
        quantiles={f"{q:g}": float(np.quantile(abs_N, q)) for q in QUANTILES},
        ratio_min=float(ratio_N.min()),
        ratio_max=float(ratio_N.max()),
        ratio_mean=float(ratio_N.mean()),
        ratio_outside=float(((ratio_N < low) | (ratio_N > high)).mean()),
        bins=_bins(abs_N, scored.position_N),
    )


def _bins(abs_N: Float64Array, position_N: Int64Array) -> tuple[Bin, ...]:
    """Positions 0, 1, 2-3, 4-7, ...: as many bins as the longest response has bits."""
    edges = [0, *(1 << bit for bit in range(int(position_N.max()).bit_length() + 1))]
    bins = []
    for begin, end in pairwise(edges):
        part = abs_N[(position_N >= begin) & (position_N < end)]
        if len(part):
            mean = float(part.mean())
            bins.append(Bin(begin=begin, end=end, count=len(part), mean_abs=mean, max_abs=float(part.max())))
    return tuple(bins)


def largest_differences(scored: Scored, count: int = MAX_WORST) -> Int64Array:
    """The rows with the largest spread between scorers, largest first."""
    rows = np.stack([scored.logprobs[name] for name in SCORERS])
    return np.argsort(-np.ptp(rows, axis=0), kind="stable")[:count]


def exceeded(pairs: Sequence[PairStatistics], limits: DifferenceLimits) -> tuple[str, ...]:
    """The limits that pairs exceed, in words; NaN exceeds every limit."""
    messages = []
    for pair in pairs:
        for what, value, limit in (("maximum", pair.max_abs, limits.max_abs), ("mean", pair.mean_abs, limits.mean_abs)):
            if not value <= limit:
                messages.append(f"{pair.first} and {pair.second}: {what} {value:.2e} exceeds {limit:g}")
    return tuple(messages)


def findings(scored: Scored, evidence: Evidence, dtype: str, rounding: RoundingReport | None) -> tuple[Finding, ...]:
    """The outcome for every cause, in the order of ``MismatchCause``.

    dtype: of the scores.  rounding: as ``rounding_report`` has it.
    """
    outcomes = {
        MismatchCause.weights: _weights(evidence),
        MismatchCause.configuration: _configuration(evidence),
        MismatchCause.sampling: _sampling(scored, evidence),
        MismatchCause.routing: _routing(scored, evidence),
        MismatchCause.quantisation: _quantisation(rounding),
        MismatchCause.precision: _precision(scored, evidence, dtype),
        MismatchCause.tokenisation: _tokenisation(evidence),
    }
    return tuple(Finding(cause=cause, found=is_cause, evidence=words) for cause, (is_cause, words) in outcomes.items())


def verdict(pairs: Sequence[PairStatistics], outcomes: Sequence[Finding]) -> str:
    """One sentence: which scorers differ most, and the causes found."""
    largest = max(pairs, key=lambda pair: pair.max_abs)
    who = f"{largest.first} and {largest.second} differ most, by {largest.max_abs:.1e}"
    # The scored tokens are the drawn ones, so tokenisation explains nothing here; in training it would.
    causes = [each.cause.value for each in outcomes if each.found and each.cause is not MismatchCause.tokenisation]
    if wrong := [cause.value for cause in MODEL if cause.value in causes]:
        verb = "is" if wrong == [MismatchCause.configuration.value] else "are"
        cause = f"the {' and the '.join(wrong)} {verb} not the same"
        return f"{who}. Cause: {cause}; what else was found may follow from it."
    if largest.max_abs <= ROUNDING:
        return f"They agree: {who}."
    if not causes:
        return f"{who}, and nothing that was examined explains it: look at the worst tokens and the positions."
    return f"{who}. Cause: {', '.join(causes)}."


def _weights(evidence: Evidence) -> Examined:
    if evidence.differing_weights is None:
        return None, "not examined"
    wrong = {holder: names for holder, names in evidence.differing_weights.items() if names}
    if not wrong:
        holders = " and ".join(evidence.differing_weights)
        return False, f"every tensor of {holders} is that of --hf"
    messages = []
    for holder, names in wrong.items():
        listed = sorted(names.items(), key=lambda item: -item[1])
        some = ", ".join(f"{name} (by {largest:.1e})" for name, largest in listed[:MAX_NAMED])
        more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
        messages.append(f"{holder} holds {len(listed)} tensors otherwise than --hf: {some}{more}")
    return True, "; ".join(messages)


def _configuration(evidence: Evidence) -> Examined:
    if not evidence.configs:
        return None, "not examined"
    lines = config_differences(evidence.configs)
    words = "; ".join(lines) or f"{', '.join(evidence.configs)}: every field is the same"
    for holder, names in unread(evidence.configs).items():
        words += f"; not read back from {holder}: {', '.join(names)}"
    if evidence.unstated:
        words += "; the checkpoint of --megatron does not say what it was trained with, so that of --hf was taken"
    return bool(lines), words


def _sampling(scored: Scored, evidence: Evidence) -> Examined:
    drawn = scored.logprobs[VLLM]
    before = _mean_abs(drawn, scored.logprobs[TRANSFORMERS])
    others = {name: _mean_abs(drawn, other) for name, other in evidence.sampled_from.items()}
    name = min(others, key=others.__getitem__, default="")
    if others and before > ROUNDING / 10 and others[name] <= EXPLAINED * before:
        words = f"vLLM's log-probs are those of {name}: mean difference {others[name]:.1e} instead of {before:.1e}"
        return True, words
    words = "vLLM's log-probs are those of the whole distribution at the temperature asked for"
    if evidence.truncated:
        words += ", as far as can be told: top-p and top-k cut little off"
    return False, words


def _routing(scored: Scored, evidence: Evidence) -> Examined:
    if not evidence.replays:
        return None, "the model has no experts"
    is_cause = False
    messages = []
    for name, replay in evidence.replays.items():
        reference = scored.logprobs[name]
        before_N = np.abs(scored.logprobs[MEGATRON] - reference)
        after_N = np.abs(replay.logprobs - reference)
        before, after = ((float(d_N.mean()), float(d_N.max())) for d_N in (before_N, after_N))
        # Few tokens choose other experts, and these differ much: replay often reduces the maximum, and hardly the mean.
        mended = any(with_ <= EXPLAINED * without for with_, without in zip(after, before, strict=True))
        is_cause = is_cause or (replay.differs > 0 and mended)
        words = f"{replay.differs:.2%} of tokens and layers chose other experts in Megatron than in {name}"
        words += f"; with those of {name} replayed they differ by {after[0]:.1e} in the mean and {after[1]:.1e} at most"
        messages.append(f"{words} instead of {before[0]:.1e} and {before[1]:.1e}")
    return is_cause, "; ".join(messages)


def rounding_report(scored: Scored, evidence: Evidence) -> RoundingReport | None:
    """The parts of the difference that fp8 makes; None where vLLM does not quantise."""
    if not evidence.rounded:
        return None
    plain_N = evidence.float32[TRANSFORMERS]
    drawn_N = scored.logprobs[VLLM]
    rounded_N = evidence.rounded[ALL].activations
    effects = tuple(
        RoundingEffect(
            group=group,
            **_mean_and_max("weights", made.weights - plain_N),
            **_mean_and_max("activations", made.activations - made.weights),
        )
        for group, made in evidence.rounded.items()
    )
    return RoundingReport(
        **_mean_and_max("whole", drawn_N - plain_N),
        **_mean_and_max("expected", rounded_N - plain_N),
        **_mean_and_max("left", drawn_N - rounded_N),
        **_mean_and_max("bfloat16", scored.logprobs[TRANSFORMERS] - plain_N),
        effects=effects,
    )


def _mean_and_max(name: str, d_N: Float64Array) -> dict[str, float]:
    """The fields ``NAME_mean`` and ``NAME_max`` of the absolute differences."""
    abs_N = np.abs(d_N)
    return {f"{name}_mean": float(abs_N.mean()), f"{name}_max": float(abs_N.max())}


def _quantisation(parts: RoundingReport | None) -> Examined:
    if parts is None:
        return False, "vLLM holds plain weights"
    words = f"vllm is {parts.whole_mean:.1e} from transformers in float32; rounding weights and inputs as vllm does "
    words += f"moves transformers by {parts.expected_mean:.1e}, where bfloat16 alone makes {parts.bfloat16_mean:.1e}"
    return parts.is_explained, words


def _precision(scored: Scored, evidence: Evidence, dtype: str) -> Examined:
    if not evidence.float32:
        words = f"all three computed in {dtype}, where orders of sums make less than {ROUNDING:g}"
        return False, words
    before = _mean_abs(scored.logprobs[MEGATRON], scored.logprobs[TRANSFORMERS])
    after = _mean_abs(evidence.float32[MEGATRON], evidence.float32[TRANSFORMERS])
    truth = evidence.float32[TRANSFORMERS]
    errors = {name: _mean_abs(scored.logprobs[name], truth) for name in SCORERS}
    if evidence.rounded:
        del errors[VLLM]  # of fp8
    words = f"in float32 Megatron and transformers differ by {after:.1e} in the mean instead of {before:.1e}; from "
    words += "transformers in float32 " + ", ".join(f"{name} is {error:.1e}" for name, error in errors.items())
    # vLLM has no float32 run: we assume that it rounds like the others if it is as close to float32 as they are.
    alike = VLLM not in errors or errors[VLLM] <= errors[TRANSFORMERS] / EXPLAINED
    return after <= EXPLAINED * before and alike, words


def _tokenisation(evidence: Evidence) -> Examined:
    if not evidence.num_responses:
        return None, "no tokenizer"
    words = f"{evidence.retokenised} of {evidence.num_responses} responses encode to other tokens than were drawn"
    if evidence.retokenised:
        words += ": train on the tokens, never on the text"
    return evidence.retokenised > 0, words


def _mean_abs(one: Float64Array, other: Float64Array) -> float:
    return float(np.abs(one - other).mean())
