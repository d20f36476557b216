"""One response in a grading process: whatever a grader does becomes a Score; and what the process imports."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from mcore_rl.config.reward import OverlongConfig, RewardConfig
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.worker import grade, overlong_penalty, packed, unpacked

CONFIG = RewardConfig(error_score=-0.5, overlong=OverlongConfig(enable=True, length=100, penalty_factor=0.5))
REQUEST = RewardRequest(("p", 0), "gsm8k", "#### 18", "18", {}, num_tokens=950, max_tokens=1000)


def test_the_penalty_is_added_to_any_grader() -> None:
    assert grade(REQUEST, CONFIG) == Score(0.75, {"format": 1.0, "overlong": -0.25}, correct=1.0, answer="18")
    assert grade(REQUEST, CONFIG, lambda *_: Score(3.0)) == Score(2.75, {"overlong": -0.25})
    assert grade(REQUEST, RewardConfig()) == Score(1.0, {"format": 1.0}, correct=1.0, answer="18")


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (600, 0.0), (800, 0.0), (801, -0.0025), (850, -0.125), (900, -0.25), (1000, -0.5), (1001, -0.5)],
)
def test_the_overlong_penalty_is_a_line(num_tokens: int, penalty: float) -> None:
    config = OverlongConfig(enable=True, length=200, penalty_factor=0.5)
    assert overlong_penalty(num_tokens, 1000, config) == pytest.approx(penalty, abs=1e-15)


@pytest.mark.parametrize(("limit", "begins"), [(20480, 16384), (1000, 800), (4, 3)])
def test_it_begins_a_fifth_before_the_limit_as_published(limit: int, begins: int) -> None:
    """The paper expects 16,384 tokens and punishes 4,096 more."""
    config = OverlongConfig(enable=True)
    assert overlong_penalty(begins, limit, config) == 0.0
    assert overlong_penalty(limit, limit, config) == -1.0
    middle = (begins + limit) // 2
    assert overlong_penalty(middle, limit, config) == pytest.approx(-(middle - begins) / (limit - begins))


@pytest.mark.parametrize(
    ("response", "whole", "after"),
    [
        (r"\boxed{18} is my guess, but let me", 1.0, 0.0),  # the thought never ended
        (r"\boxed{7}, no. </think> It is \boxed{18}", 1.0, 1.0),
        (r"It is \boxed{18}. </think> I do not know.", 1.0, 0.0),
        (r"a </think> b </think> \boxed{18}", 1.0, 1.0),
    ],
)
def test_an_answer_in_a_thought_counts_by_default_and_not_by_option(response: str, whole: float, after: float) -> None:
    request = RewardRequest(("p", 0), "math", response, "18")
    assert grade(request, RewardConfig()).value == whole
    config = RewardConfig(answer_after="</think>")
    assert grade(request, config).value == after
    own = grade(request, config, lambda seen, _: Score(float(seen.response == response)))
    assert own.value == 1.0, "a function of one's own sees all"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "raised: KeyError: 'x'"),
        (SystemExit(0), "raised: SystemExit: 0"),
        (RecursionError("deep"), "raised: RecursionError: deep"),
        (MemoryError(), "raised: MemoryError: "),
        (ValueError("x" * 10_000), f"raised: ValueError: {'x' * 488}"),
    ],
)
def test_a_grader_that_raises(error: BaseException, text: str) -> None:
    def grader(request: RewardRequest, config: RewardConfig) -> Score:
        raise error

    assert grade(REQUEST, CONFIG, grader) == Score(-0.5, error=text)  # no penalty on top


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_grader_that_gives_no_number(value: object) -> None:
    score = grade(REQUEST, CONFIG, lambda *_: Score(value))  # type: ignore[arg-type]
    assert score == Score(-0.5, error=f"not_a_number: the score is {value!r}, not a finite number")


def test_a_broken_row_is_an_error_of_that_response() -> None:
    score = grade(RewardRequest(("p", 0), "gsm8k", "#### 18", "many"), CONFIG)
    assert score.error is not None
    assert score.error.startswith("raised: ValueError: ground truth 'many' is not a number")


def test_scores_travel_whole() -> None:
    full = Score(0.1, {"a": 1 / 3, "ü": -1e-300}, correct=1.0, answer="\ud800 x")
    for score in (full, Score(1.0), Score(-0.5, error="raised: \0"), Score(1.0, turn_rewards=(1 / 3, -2.0))):
        assert unpacked(packed(score)) == score


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(Bomb()),
        b"",
        b"null",
        b"[" * 100_000,
        b'{"value": 1}',
        b'{"value": NaN, "parts": {}, "correct": null, "error": null, "answer": null, "turn_rewards": []}',
        b'{"value": 1, "parts": {"a": "1"}, "correct": null, "error": null, "answer": null, "turn_rewards": []}',
        b'{"value": 1, "parts": [], "correct": null, "error": null, "answer": null, "turn_rewards": []}',
        b'{"value": 1, "parts": {}, "correct": Infinity, "error": null, "answer": null, "turn_rewards": []}',
        b'{"value": 1, "parts": {}, "correct": null, "error": null, "answer": null}',
        b'{"value": 1, "parts": {}, "correct": null, "error": null, "answer": null, "turn_rewards": 1}',
        b'{"value": 1, "parts": {}, "correct": null, "error": null, "answer": null, "turn_rewards": [NaN]}',
    ],
)
def test_what_is_no_score_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"not answer with a score|Expecting|decode|finite number"):
        unpacked(message)


def test_it_loads_nothing_heavy() -> None:
    program = "import sys, mcore_rl.rewards.worker, mcore_rl.rewards.scorer; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "ray", "numpy", "sympy", "transformers", "hydra", "pyarrow"} & set(loaded)
    assert "mcore_rl.rewards.custom" in loaded
