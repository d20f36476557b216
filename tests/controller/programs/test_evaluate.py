"""Responses graded and counted, from parquet to numbers: every number by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from mcore_rl.config.compose import compose
from mcore_rl.config.data import PreferenceDataConfig
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.controller.programs.evaluate import default_k, request_of, run_evaluate, work_of
from mcore_rl.data.preferences import PreferenceSet, RowForm
from mcore_rl.data.responses import ResponseSet
from mcore_rl.ground.errors import ConfigError, DataError
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.tracking.journal import journal, journal_of
from tests.support.prompt_files import row, user, write


def answers(*numbers: int | str) -> list[str]:
    return [f"so\n#### {number}" if isinstance(number, int) else number for number in numbers]


def sums(gold: object, *numbers: int | str, source: str = "gsm8k", **columns: Any) -> dict[str, Any]:
    return row(answer=str(gold), data_source=source, responses=answers(*numbers), **columns)


def evaluate(path: Path, *overrides: str) -> dict[str, Any]:
    out = path.with_suffix(".json")
    written = [f"path={path}", f"out={out}", "overwrite=true", "reward.num_workers=1", *overrides]
    assert asyncio.run(run_evaluate(compose(EvaluateConfig, "evaluate", written))) == 0
    numbers = json.loads(out.read_text())
    assert numbers["confidence"] == 0.95 and numbers["path"] == str(path)
    sources: dict[str, Any] = numbers["data_sources"]
    return sources


def values(report: dict[str, Any]) -> dict[str, float]:
    return {name: metric["value"] for name, metric in report["metrics"].items()}


def test_every_number_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        sums(4, 4, 4, 5, 4, response_num_tokens=[3, 4, 5, 8], finish_reasons=["stop", "stop", "stop", "length"]),
        sums(4, 5, 5, 5, 4, response_num_tokens=[4] * 4, finish_reasons=["stop"] * 4),
        sums(7, 1, 2, "?", 7, source="arithmetic", response_num_tokens=[4] * 4, finish_reasons=["stop"] * 4),
    ]
    numbers = evaluate(write(tmp_path / "r.parquet", rows), "reward.gsm8k.format_score=0.2")
    assert list(numbers) == ["gsm8k", "arithmetic"]
    report = numbers["gsm8k"]
    assert values(report) == {
        "score": pytest.approx((3.2 + 1.6) / 8),
        "accuracy": 0.5,
        "pass@1": 0.5,
        "pass@2": pytest.approx((1.0 + 0.5) / 2),  # of 6 pairs of the second prompt 3 hold its one right response
        "pass@4": 1.0,
        "maj@2": pytest.approx(((1 + 0.5) / 2 + (0 + 0.5) / 2) / 2),
        "maj@4": 0.5,
    }
    assert {name: metric["method"] for name, metric in report["metrics"].items()} == dict.fromkeys(
        ("score", "accuracy", "pass@1", "pass@2", "maj@2"), "bootstrap"
    ) | dict.fromkeys(("pass@4", "maj@4"), "wilson")
    assert all(metric["low"] < metric["value"] <= metric["high"] for metric in report["metrics"].values())
    counts = ("num_prompts", "num_responses", "num_samples", "num_tokens", "truncated")
    assert [report[name] for name in counts] == [2, 8, [4, 4], pytest.approx(36 / 8), pytest.approx(1 / 8)]
    other = numbers["arithmetic"]  # 1, 2 and 7 have a vote each, "?" has none
    assert values(other) == {
        "score": pytest.approx(0.35),
        "accuracy": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "pass@4": 1.0,
        "maj@2": pytest.approx((0 + 1) / 2),
        "maj@4": pytest.approx(1 / 3),
    }
    assert other["metrics"]["accuracy"]["low"] is None  # one prompt says nothing of the spread
    shown = capsys.readouterr().out
    assert "gsm8k: 2 prompts, 8 responses" in shown and "12.5% of responses cut off" in shown


def test_one_response_a_prompt_is_a_share_with_wilsons_interval(tmp_path: Path) -> None:
    """``response_key`` of a text: 8 right of 10 lie between 0.4902 and 0.9433 (Wilson, by hand)."""
    rows = [row(answer="4", data_source="gsm8k", said=f"#### {4 if n < 8 else 5}") for n in range(10)]
    report = evaluate(write(tmp_path / "r.parquet", rows), "response_key=said")["gsm8k"]
    assert values(report) == {"score": 0.8, "accuracy": 0.8, "pass@1": 0.8}
    accuracy = report["metrics"]["accuracy"]
    assert (accuracy["low"], accuracy["high"]) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94332, abs=1e-5))
    assert report["num_tokens"] is None and report["truncated"] is None


def test_the_same_file_gives_the_same_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [sums(4, 4, 5), sums(4, 4, 4), sums(4, 5, 5)])
    assert evaluate(path) == evaluate(path)


def test_what_cannot_be_graded_counts_as_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sums(4, 4, 4), sums("four", 4, 4)]
    report = evaluate(write(tmp_path / "r.parquet", rows), "reward.error_score=-1", "k=[1]")["gsm8k"]
    assert values(report) == {"score": 0.0, "accuracy": 0.5, "pass@1": 0.5}
    assert report["errors"] == {"raised": 2, "not_a_number": 0, "timeout": 0, "died": 0, "lost": 0}
    assert "ground truth 'four' is not a number" in report["example"]
    assert "not graded, and counted as wrong: 2 raised; the first: raised: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "metrics", "missing"),
    [
        ("len(solution_str)", {"score": 1.5}, {"accuracy", "pass@k", "maj@k"}),
        ("{'score': 0, 'acc': solution_str == 'ab'}", {"score": 0, "accuracy": 0.5, "pass@2": 1.0}, {"maj@k"}),
        (
            "{'score': 0, 'acc': extra_info['level'] == 3, 'pred': solution_str}",
            {"score": 0, "accuracy": 1.0, "pass@2": 1.0, "maj@2": 1.0},
            set(),
        ),
    ],
)
def test_a_function_of_ones_own(tmp_path: Path, answer: str, metrics: dict[str, float], missing: set[str]) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert set(extra_info) == {'ability', 'reward_model', 'level', 'index'}, extra_info  # as in training\n"
        f"    return {answer}\n"
    )
    path = write(tmp_path / "r.parquet", [row(level=3, responses=["a", "ab"], finish_reasons=["stop"] * 2)])
    report = evaluate(path, f"custom_reward_function.path={function}", "k=[2]")["sums"]
    assert values(report) == metrics and set(report["missing"]) == missing
    assert sum(report["errors"].values()) == 0


def test_reward_kwargs_of_the_command_line_reach_the_function(tmp_path: Path) -> None:
    """As verl gives them; in each process that grades, with the types that yaml gives them."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, *, scale, words, exact=False):\n"
        "    assert (type(scale), type(exact)) == (float, bool), (scale, exact)\n"
        "    return scale * (solution_str in words if exact else any(word in solution_str for word in words))\n"
    )
    path = write(tmp_path / "r.parquet", [row(responses=["a", "ab", "c"], finish_reasons=["stop"] * 3)])
    out, custom = tmp_path / "out.json", "custom_reward_function"
    words = [f"path={path}", f"out={out}", f"{custom}.path={tmp_path / 'mine.py'}", f"{custom}.reward_kwargs.scale=1.5"]
    for number, (more, mean) in enumerate([([], 1.0), ([f"{custom}.reward_kwargs.exact=true"], 0.5)]):
        given = [*words, f"{custom}.reward_kwargs.words=[a]", *more, f"overwrite={str(number > 0).lower()}"]
        assert main(["evaluate", *given]) == 0
        report = json.loads(out.read_text())["data_sources"]["sums"]
        assert values(report)["score"] == pytest.approx(mean) and sum(report["errors"].values()) == 0
    assert main(["evaluate", *words, f"{custom}.reward_kwargs.wordz=[a]", "overwrite=true"]) == 2


def pairs_of(path: Path) -> list[tuple[str, str, float]]:
    """The texts of each pair of a file, and its margin."""
    rows = pq.read_table(path).to_pylist()
    assert all([len(each["chosen"]), len(each["rejected"])] == [1, 1] for each in rows)
    return [(each["chosen"][0]["content"], each["rejected"][0]["content"], each["margin"]) for each in rows]


def test_pairs_are_of_better_and_worse_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Best with worst; of equal scores the first; none twice, none of what could not be graded."""
    rows = [
        sums(4, 5, 4, "a\n#### 4", 6, 7),
        sums(3, 3, 3, 3),
        sums(8, 8, 8, 9, 9),
        sums("eight", 1, 2),
        sums(2, "no", 1, 2),
    ]
    out = tmp_path / "pairs.parquet"
    settings = ("reward.gsm8k.format_score=0.25", "reward.error_score=5")
    evaluate(write(tmp_path / "r.parquet", rows), f"pairs={out}", *settings)
    a, b, c = (answers(number)[0] for number in (4, 6, 7))
    assert pairs_of(out) == [
        (a, c, 0.75),
        ("a\n#### 4", b, 0.75),
        (answers(8)[0], answers(9)[0], 0.75),
        (answers(2)[0], "no", 1.0),
    ]
    assert {each["data_source"] for each in pq.read_table(out).to_pylist()} == {"gsm8k"}
    assert f"pairs: 4 in {out}; 2 of 5 prompts have none" in capsys.readouterr().out


def test_pairs_of_agents_have_all_turns(tmp_path: Path) -> None:
    said = [[{"role": "assistant", "content": f"call {n}"}, {"role": "tool", "content": "7"}] for n in range(2)]
    turns = [[*each, {"role": "assistant", "content": text}] for each, text in zip(said, answers(4, 5), strict=True)]
    out = tmp_path / "pairs.parquet"
    evaluate(write(tmp_path / "r.parquet", [sums(4, 4, 5, response_turns=turns)]), f"pairs={out}")
    (pair,) = pq.read_table(out).to_pylist()
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (user("2 + 3?"), *turns)


def test_preferences_are_read_from_pairs(tmp_path: Path) -> None:
    """As `mcore-rl prefer` and `reward` read them, margins too."""
    out = tmp_path / "pairs.parquet"
    evaluate(write(tmp_path / "r.parquet", [sums(4, 4, 5), sums(1, 2, 1)]), f"pairs={out}")
    config = PreferenceDataConfig(max_length=200, margin_key="margin")
    form = RowForm()
    made = PreferenceSet.load([out], config, encoded, max_samples=None, title="t", form=form)
    assert [each.margin for each in map(made.__getitem__, range(len(made)))] == [1.0, 1.0]


def encoded(messages: list[dict[str, Any]], first: int) -> tuple[list[int], list[bool]]:
    """A token a character, the answer's trained."""
    parts = [(each["content"], place >= first) for place, each in enumerate(messages)]
    return [ord(c) for text, _ in parts for c in text], [trained for text, trained in parts for _ in text]


def test_pairs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    equal = write(tmp_path / "equal.parquet", [sums(4, 4, 4), sums(5, 1, 1)])
    out = tmp_path / "pairs.parquet"
    with pytest.raises(DataError, match="no prompt of 2 has two responses of different scores"):
        evaluate(equal, f"pairs={out}")
    assert not out.exists() and equal.with_suffix(".json").exists(), "what was graded is not lost"
    with pytest.raises(ConfigError, match="is the file with the responses"):
        evaluate(equal, f"pairs={equal}")
    with pytest.raises(ConfigError, match="is the file of the numbers, too"):
        evaluate(equal, f"pairs={equal.with_suffix('.json')}")
    texts = write(tmp_path / "texts.parquet", [sums(4, 4, 5) | {"prompt": "2 + 2?"}])
    nothing = write(tmp_path / "nothing.parquet", [sums(4, 4, 5), sums(4, 4, 5) | {"prompt": None}])
    for path, row_id in ((texts, "texts.parquet:0"), (nothing, "nothing.parquet:1")):
        with pytest.raises(ConfigError, match=f"begins with its prompt, and prompt is no messages in {row_id}"):
            evaluate(path, f"pairs={out}")


def test_the_overlong_punishment_knows_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [sums(4, 4, 4, response_num_tokens=[5, 10])])
    overlong = ["reward.overlong.enable=true", "reward.overlong.length=4", "max_response_length=10"]
    assert values(evaluate(path, *overlong)["gsm8k"])["score"] == pytest.approx(0.5)  # 1 and 1 - 1
    with pytest.raises(ConfigError, match="does not say how long its responses are"):
        evaluate(write(tmp_path / "s.parquet", [sums(4, 4)]), *overlong)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [sums(4, 4, 4), sums(4, 4)])
    with pytest.raises(ConfigError, match=r"k=\[2\]: 2 of 1 responses cannot be drawn.*Write up to 1"):
        evaluate(path, "k=[2]")
    with pytest.raises(ConfigError, match="data_source=sums: no grader is known"):
        evaluate(write(tmp_path / "s.parquet", [row(responses=["a"])]))
    for name, said in ((path, "is the file with the responses"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=said):
            evaluate(path, f"out={name}")
    (tmp_path / "old.json").write_text("old")
    with pytest.raises(ConfigError, match=r"old.json: exists\. Write another name, or overwrite=true"):
        evaluate(path, f"out={tmp_path / 'old.json'}", "overwrite=false")
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_grader_is_told_what_it_is_told_in_training(tmp_path: Path) -> None:
    columns = dict(response_num_tokens=[5, 10], finish_reasons=["stop", "length"])
    path = write(tmp_path / "r.parquet", [sums(4, 4, 5, level=3, extra_info={"level": 7, "index": 1}, **columns)])
    (only,) = ResponseSet.load(path, "prompt", "responses")
    graded_by = {"style": "rule", "ground_truth": "4"}
    told = {"ability": "math", "reward_model": graded_by, "level": 7, "index": 1}
    for index, (text, length, cut) in enumerate([("so\n#### 4", 5, False), ("so\n#### 5", 10, True)]):
        said = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": text}]
        expected = RewardRequest(("r.parquet:0", index), "gsm8k", text, "4", told, length, 10, cut, said)
        assert request_of(only, index, 10) == expected


def test_a_grader_is_told_of_all_turns(tmp_path: Path) -> None:
    turns = [("assistant", "2 + 3"), ("tool", "5"), ("user", "Sure?"), ("assistant", "#### 5")]
    said = [{"role": role, "content": content} for role, content in turns]
    path = write(tmp_path / "r.parquet", [sums(5, 5, response_turns=[said])])
    (only,) = ResponseSet.load(path, "prompt", "responses")
    request = request_of(only, 0, 10)
    assert request.messages == [{"role": "user", "content": "2 + 3?"}, *said]
    assert request.num_turns == 2


def test_the_score_counts_what_turns_earned(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, messages):\n"
        "    return {'score': len(messages), 'turn_rewards': [0.5]}\n"
    )
    path = write(tmp_path / "r.parquet", [sums(5, 5)])
    numbers = evaluate(path, f"custom_reward_function.path={tmp_path / 'reward.py'}")
    assert numbers["gsm8k"]["metrics"]["score"]["value"] == 2.5


@pytest.mark.parametrize(
    ("fewest", "expected"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_k_that_nobody_chose(fewest: int, expected: list[int]) -> None:
    assert default_k(fewest) == expected


WATCHED = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(solution_str.split()[-1] + "\\n")
    if solution_str.endswith("6") and (HERE / "stay").exists():
        time.sleep(3600)
    return {"score": float(len(solution_str) % 3), "acc": float(solution_str.endswith(str(ground_truth)))}
"""


def test_an_evaluation_that_was_killed_goes_on_and_writes_the_same_file(tmp_path: Path, processes: None) -> None:
    """Killed while the seventh of nine responses is graded: the six before it are not graded again.

    Every start tries the function once, with the first row's ground truth as the response: the first call is that.
    """
    path = write(tmp_path / "r.parquet", [sums(n, 3 * n, 3 * n + 1, 3 * n + 2) for n in range(3)])
    (tmp_path / "grade.py").write_text(WATCHED)
    out, calls = tmp_path / "out.json", tmp_path / "calls.txt"
    own = f"custom_reward_function.path={tmp_path / 'grade.py'}"
    words = [f"path={path}", own, "reward.num_workers=1", "reward.timeout_s=86400"]
    config = compose(EvaluateConfig, "evaluate", [*words, f"out={out}"])
    assert asyncio.run(run_evaluate(config)) == 0
    whole = out.read_bytes()
    assert calls.read_text().split() == ["0", *"012345678"] and not journal_of(out).exists()
    out.unlink(), calls.unlink()

    (tmp_path / "stay").touch()
    command = [sys.executable, "-m", "mcore_rl.cli", "evaluate", *words, f"out={out}"]
    run = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_graded() -> bool:
        """Whether the sixth is on the disk and the seventh begun; which comes first is not said."""
        begun = calls.exists() and "6" in calls.read_text().split()
        return begun and len(journal_of(out).read_text().splitlines()) == 1 + 6

    while not is_graded():
        assert run.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    (tmp_path / "stay").unlink()
    assert not out.exists()
    calls.unlink()
    assert asyncio.run(run_evaluate(config)) == 0
    assert calls.read_text().split() == ["0", "6", "7", "8"]
    assert out.read_bytes() == whole and not journal_of(out).exists()


def test_scores_of_other_settings_are_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [sums(4, 4, 5)])
    out = path.with_suffix(".json")
    begun = compose(EvaluateConfig, "evaluate", [f"path={path}", f"out={out}"])
    with suppress(KeyboardInterrupt), journal(out, work_of(begun), afresh=False) as kept:
        kept.append({"row": "r.parquet:0", "index": 0, "score": asdict(Score(9.0))})
        raise KeyboardInterrupt
    other = compose(EvaluateConfig, "evaluate", [f"path={path}", f"out={out}", "reward.gsm8k.score=2"])
    with pytest.raises(ConfigError, match="was begun by another command"):
        asyncio.run(run_evaluate(other))
    assert evaluate(path, "reward.gsm8k.score=2")["gsm8k"]["metrics"]["score"]["value"] == 1.0, "overwrite=true"
