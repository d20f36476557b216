"""``mcore-rl train`` with a judge that it serves itself: what is trained on are transformers' greedy answers."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from mcore_rl.controller.lifecycle.judging import FILE
from tests.support import reward_models, served_judges
from tests.support.ahead_runs import APART
from tests.support.run_task import nothing_left, overrides, write_task

STEPS = 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "placement", [pytest.param((), id="shared"), pytest.param(APART, id="separate", marks=pytest.mark.tier("full"))]
)
def test_a_run_trains_on_what_its_own_judge_says(placement: tuple[str, ...], tmp_path: Path, fast_ray: None) -> None:
    task, run_dir = write_task(tmp_path / "task"), tmp_path / "run"
    judge = served_judges.write_judge(task / "judge")
    for name in ("train", "val"):
        rows = pq.read_table(task / f"{name}.parquet").to_pylist()
        for row in rows[::2]:  # the even ones are the judge's
            row["reward_model"] |= {"style": "judge"}
        reward_models.write_rows(task / f"{name}.parquet", rows)
    asked = [
        f"reward.judge.path={judge}", f"reward.judge.prompt='{served_judges.RUBRIC}'", "reward.judge.scale=[0,9]",
        f"reward.judge.pattern='{served_judges.PATTERN}'", f"reward.judge.max_tokens={served_judges.MAX_TOKENS}",
        "reward.judge.engines.max_length=200", "reward.judge.engines.dtype=float32",
        "reward.judge.engines.kv_cache_memory_bytes=16777216", "reward.judge.engines.max_num_seqs=32",
        f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.save_rollouts=true",
        *placement,
    ]  # fmt: skip
    with nothing_left():
        assert main(["train", *overrides(task, run_dir, *asked)]) == 0

    oracle, texts, scores = served_judges.Transformers(judge), set[str](), set[float | None]()
    metrics = {line["step"]: line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    files = [*(f"rollouts/step_{step}.parquet" for step in metrics), f"validation/step_{STEPS}.parquet"]
    for file in files:
        rows = pq.read_table(run_dir / file).to_pylist()
        judged = [row for row in rows if int(row["prompt_id"].rpartition(":")[2]) % 2 == 0]
        asked_about = [served_judges.RUBRIC.replace("{response}", row["response"]) for row in judged]
        expected = [oracle.score(text) for text in asked_about]
        assert [row["score"] for row in judged] == pytest.approx([score or 0.0 for score in expected])
        texts, scores = texts.union(asked_about), scores.union(expected)
    assert len(scores - {None}) >= 3 and None in scores, "answers differ, and some are cut off or say no score"
    kept = [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]
    assert sorted(line["text"] for line in kept) == sorted(oracle.answer(text)[0] for text in texts)
    for line in metrics.values():
        assert 0 < line["judge/requests"] <= 32 and line["judge/retries"] == 0 < line["judge/failed"]
        assert line["judge/failed"] == line["dropped/grader_errors"] and line["actor/grad_norm"] > 0
