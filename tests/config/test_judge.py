"""Settings of a judge that contradict each other are refused, all at once, and the key is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations
from mcore_rl.config.judge import RUBRIC, JudgeConfig, JudgeEnginesConfig, judge_violations
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.run import RunConfig, run_violations

GOOD = JudgeConfig(address="https://judge.example/v1", model="m", api_key_env="JUDGE_API_KEY")


def keys(judge: JudgeConfig) -> list[str]:
    return [each.key.removeprefix("reward.judge.") for each in judge_violations(judge)]


def test_everything_wrong_is_said_at_once() -> None:
    judge = JudgeConfig(
        address="https://user:sk-secret@host/v1", api_key_env="sk-abcdef0123", prompt="no file", pattern="Score: \\d",
        scale=[1, 1], price_per_million=[1.0], max_cost=None,
    )  # fmt: skip
    assert keys(judge) == ["address", "model", "api_key_env", "prompt", "pattern", "scale", "price_per_million"]
    said = "\n".join(map(str, judge_violations(judge)))
    assert "sk-secret" not in said and "sk-abcdef0123" not in said and "https://***@host/v1" in said
    assert keys(JudgeConfig(address="http://x/v1", model="m", scale=[1, 5])) == ["scale"], "the rubric asks for 0 to 10"
    assert keys(GOOD) == [] and keys(JudgeConfig(pattern="(")) == [], "without an address nothing is read"


@pytest.mark.parametrize(
    "address", ["judge:8000/v1", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x/v1?key=1"]
)
def test_addresses_that_are_none(address: str) -> None:
    assert keys(JudgeConfig(address=address, model="m")) == ["address"]


def test_a_limit_of_cost_needs_prices_and_a_pattern_must_compile() -> None:
    assert keys(JudgeConfig(address="http://x/v1", model="m", max_cost=1.0, pattern="(")) == ["pattern", "max_cost"]


def test_the_rubric_is_a_text_or_a_file(tmp_path: Path) -> None:
    assert GOOD.template == RUBRIC
    assert JudgeConfig(prompt="Rate {response}").template == "Rate {response}"
    path = tmp_path / "rubric.txt"
    path.write_text("Is {response} good?\n")
    judge = JudgeConfig(address="http://x/v1", model="m", prompt=str(path))
    assert judge.template == "Is {response} good?\n" and keys(judge) == []
    path.write_text("Is it good?")
    assert keys(judge) == ["prompt"]


def test_scores_follow_from_the_rubric_and_not_from_the_way_to_the_judge(tmp_path: Path) -> None:
    other = JudgeConfig(
        address="http://y/v1", model="m", retries=1, timeout_s=1.0, max_cost=5.0, price_per_million=[1, 1]
    )
    assert GOOD.scoring == other.scoring != JudgeConfig(address="http://y/v1", model="n").scoring
    assert GOOD.scoring.prompt == RUBRIC


def test_settings_of_no_judge_are_refused() -> None:
    run = compose(RunConfig, "train", ["algorithm=grpo", "reward.judge.model=m"])
    (violation,) = [each for each in run_violations(run, planned=True) if each.key.startswith("reward.judge")]
    assert violation.key == "reward.judge.model" and "reward.judge.address=http://HOST:8000/v1" in violation.remedy


SERVED = ["reward.judge.path=/models/judge"]


@pytest.mark.parametrize(
    ("more", "key", "said"),
    [
        (["reward.judge.address=http://x/v1", "reward.judge.model=m"], "path", "reward.judge.address"),
        (["reward.judge.max_tokens=300", "reward.judge.engines.max_length=300"], "engines.max_length", "no room"),
        (["reward.judge.temperature=0.001"], "temperature", "vLLM draws as if it were 0.01"),
        (["+reward.judge.engines.engine.model=x"], "engines.engine.model", ""),
        (["reward.judge.model=m"], "model", "behind no address"),
        (["reward.judge.retries=3"], "retries", "behind no address"),
        (["reward.judge.max_cost=3"], "max_cost", "behind no address"),
        (["reward.judge.engines.gpu_memory_utilization=0.6"], "engines.gpu_memory_utilization", "more than a device"),
    ],
)
def test_a_judge_of_the_run_refuses_what_it_cannot_be(more: list[str], key: str, said: str) -> None:
    good = run_violations(compose(RunConfig, "train", SERVED), planned=True)
    assert not [each for each in good if each.key.startswith("reward.judge")]
    violations = run_violations(compose(RunConfig, "train", [*SERVED, *more]), planned=True)
    (violation,) = [each for each in violations if each.key.startswith("reward.judge")]
    assert violation.key.startswith(f"reward.judge.{key}") and said in str(violation) and violation.remedy


def test_engines_of_a_judge_are_not_read_without_one_and_shares_may_be_those_of_devices_of_their_own() -> None:
    alone = run_violations(compose(RunConfig, "train", ["reward.judge.engines.tp=2", "reward.judge.seed=3"]))
    assert {each.key for each in alone} >= {"reward.judge.engines.tp", "reward.judge.seed"}
    address = ["reward.judge.address=http://x/v1", "reward.judge.model=m", "reward.judge.engines.tp=2"]
    (unread,) = [each for each in run_violations(compose(RunConfig, "train", address)) if "engines" in each.key]
    assert "no engines for a judge" in unread.problem and "reward.judge.path=DIR" in unread.remedy
    apart = [*SERVED, "reward.judge.engines.gpu_memory_utilization=0.9", "trainer.placement=separate"]
    keys = [each.key for each in run_violations(compose(RunConfig, "train", apart))]
    assert not [key for key in keys if "gpu_memory" in key]


def test_an_evaluation_starts_no_engines_of_a_judge() -> None:
    config = EvaluateConfig(path="x.parquet", reward=RewardConfig(judge=JudgeConfig(path="/models/judge")))
    (violation,) = [each for each in evaluate_violations(config) if each.key == "reward.judge.path"]
    assert "reward.judge.address" in violation.remedy


def test_a_score_follows_from_the_rubric_and_the_sampling_and_from_no_place() -> None:
    here = JudgeConfig(path="/a", concurrency=1, engines=JudgeEnginesConfig(tp=2))
    assert here.scoring == JudgeConfig(path="/b").scoring != JudgeConfig(path="/b", seed=1).scoring
    assert here.scoring != JudgeConfig(address="http://x/v1").scoring
