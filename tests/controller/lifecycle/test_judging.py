"""Real runs with a judge over HTTP: rewards, metrics, judgements that a later run finds, the limit of the cost."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.judging import FILE
from mcore_rl.controller.programs.train import check_training, run_training
from mcore_rl.controller.step.preemption import REQUEUE
from mcore_rl.ground.errors import ConfigError
from tests.support import reward_models
from tests.support.judge_server import KEY, NAME, JudgeServer, Reply, serving
from tests.support.run_task import descendants, nothing_left, overrides, write_task

STEPS = 2


def mark(response: str) -> int:
    return zlib.crc32(response.encode()) % 11


def said(prompt: str) -> str:
    """A mark that follows from the response alone, which stands between the last two fences."""
    fence = prompt.rpartition(" end\n")[0].rpartition("\n")[2]
    response = prompt.partition(f"{fence} response\n")[2].partition(f"\n{fence} end\n")[0]
    return f"Score: {mark(response)}"


def judge_rows(task: Path) -> None:
    """The even rows of both files are the judge's."""
    for name in ("train", "val"):
        rows = pq.read_table(task / f"{name}.parquet").to_pylist()
        for row in rows[::2]:
            row["reward_model"] |= {"style": "judge"}
        reward_models.write_rows(task / f"{name}.parquet", rows)


def settings(task: Path, run_dir: Path, server: JudgeServer, *more: str) -> RunConfig:
    judge = [
        f"reward.judge.address={server.url}", "reward.judge.model=m", f"reward.judge.api_key_env={NAME}",
        "reward.judge.price_per_million=[1000,0]",
    ]  # fmt: skip
    length = [f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.save_rollouts=true"]
    return compose(RunConfig, "train", overrides(task, run_dir, *judge, *length, *more))


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {line.pop("step"): line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


def keys_seen() -> list[psutil.Process]:
    """The processes below this one whose environment has the key."""
    return [each for each in descendants() if NAME in each.environ()]


@pytest.mark.tier("full")
def test_a_run_trains_on_what_the_judge_says(
    tmp_path: Path, fast_ray: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NAME, KEY)
    task, run_dir = write_task(tmp_path / "task"), tmp_path / "run"
    judge_rows(task)
    leaked: list[psutil.Process] = []
    with serving(said) as server, nothing_left():
        config = settings(task, run_dir, server, f"trainer.save_freq={STEPS}")
        assert check_training(config) == 0 and len(server.requests) == 1
        assert asyncio.run(run_training(config, [lambda step, metrics: leaked.extend(keys_seen())])) == 0
        assert not leaked and all(headers["Authorization"] == f"Bearer {KEY}" for headers, _ in server.requests)
        asked = len(server.requests)
        _see_rewards(task, run_dir)
        of_steps = metrics_of(run_dir)
        for step in range(1, STEPS + 1):
            line = of_steps[step]
            assert line["judge/requests"] > 0 and line["judge/failed"] == 0 == line["dropped/grader_errors"]
            assert line["judge/prompt_tokens"] == 100 * line["judge/requests"] and line["judge/seconds"] > 0
        kept = len((run_dir / FILE).read_text().splitlines())
        assert kept == asked - 2, "all but the questions of the check and of the start are kept"
        assert of_steps[STEPS]["judge/cost"] == pytest.approx(0.1 * sum(
            of_steps[step]["judge/requests"] for step in range(1, STEPS + 1)
        ))  # fmt: skip

        again = settings(task, run_dir, server, "trainer.resume_mode=off")
        assert asyncio.run(run_training(again)) == 0
        lines = metrics_of(run_dir)
        assert lines[1]["judge/requests"] == 0 and lines[1]["judge/cached"] > 0, "the same step asks nothing again"

        spent = 0.1 * len((run_dir / FILE).read_text().splitlines())
        more = settings(
            task, run_dir, server, "trainer.total_training_steps=9", f"reward.judge.max_cost={spent + 0.15}"
        )
        assert asyncio.run(run_training(more)) == REQUEUE
        assert "on reward.judge.max_cost" in capfd.readouterr().out
        with pytest.raises(ConfigError, match=r"reward\.judge\.max_cost"):
            asyncio.run(run_training(more))
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def _see_rewards(task: Path, run_dir: Path) -> None:
    """What was trained on are the judge's marks, and the others' own."""
    for step in range(1, STEPS + 1):
        rows = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        judged = [row for row in rows if int(row["prompt_id"].rpartition(":")[2]) % 2 == 0]
        assert 0 < len(judged) < len(rows) and not any(row["error"] for row in rows)
        assert [row["score"] for row in judged] == pytest.approx([mark(row["response"]) / 10 for row in judged])
        expected = sum(row["score"] for row in judged) / len(judged)
        assert metrics_of(run_dir)[step]["reward/part/judge"] == pytest.approx(expected)


def test_a_judge_that_is_not_there_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, KEY)
    task = write_task(tmp_path / "task")
    judge_rows(task)
    with serving(said) as server:
        config = settings(task, tmp_path / "run", server)
        server.replies.append(Reply(b"who are you?", 401))
        with pytest.raises(ConfigError, match=r"reward\.judge\.address=.*answered 401: who are you\?"):
            check_training(config)
        monkeypatch.delenv(NAME)
        with pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env=JUDGE_API_KEY: is not set"):
            check_training(config)
    monkeypatch.setenv(NAME, KEY)
    with pytest.raises(ConfigError, match=r"reward\.judge\.address=.*does not judge"):
        check_training(config)
