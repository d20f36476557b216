"""``mcore-rl evaluate`` with a judge over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.controller.programs.evaluate import check_evaluate, run_evaluate
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.llm_judge import JudgeCostError
from tests.support.judge_server import JudgeServer, Reply, serving
from tests.support.prompt_files import row, write


def rows(style: str = "judge") -> list[dict[str, Any]]:
    judged = row("why?", data_source="chat", reward_model={"style": style, "ground_truth": None})
    graded = row(answer="4", data_source="gsm8k", responses=["#### 4", "#### 5"])
    return [judged | {"responses": ["because", "so", "because"]}, graded]


def said(prompt: str) -> str:
    return "Score: 9" if "\nbecause\n" in prompt else "Score: 2"


def configured(path: Path, server: JudgeServer, *more: str) -> EvaluateConfig:
    judge = [f"reward.judge.address={server.url}", "reward.judge.model=m", *more]
    written = [f"path={path}", f"out={path.with_suffix('.json')}", "reward.num_workers=1", *judge]
    return compose(EvaluateConfig, "evaluate", written)


def test_rows_are_graded_by_who_they_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.parquet", rows())
    with serving(said) as server:
        assert check_evaluate(configured(path, server)) == 0
        assert len(server.requests) == 1, "the check asks once"
        config = configured(path, server, "reward.judge.price_per_million=[1000,0]")
        assert asyncio.run(run_evaluate(config)) == 0
        assert len(server.requests) == 4, "once at the start, and each text once"
    numbers = json.loads((tmp_path / "r.json").read_text())["data_sources"]
    assert numbers["chat"]["metrics"]["score"]["value"] == pytest.approx((0.9 + 0.2 + 0.9) / 3)
    assert numbers["gsm8k"]["metrics"]["accuracy"]["value"] == 0.5
    assert "judge: requests 2, cached 1, retries 0, failed 0, prompt_tokens 200" in capsys.readouterr().out


def test_what_cannot_be_judged_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", rows())
    with serving(lambda prompt: said(prompt) if "\nso\n" not in prompt else "Hm.") as server:
        assert asyncio.run(run_evaluate(configured(path, server))) == 0
    report = json.loads((tmp_path / "r.json").read_text())["data_sources"]["chat"]
    assert report["errors"]["not_a_number"] == 1 and report["metrics"]["score"]["value"] == pytest.approx(0.6)
    assert report["example"].startswith("not_a_number: the judge gave no score")


def test_an_evaluation_ends_at_the_limit_of_its_cost_and_goes_on_with_another(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", rows())
    priced = ["reward.judge.price_per_million=[1000,0]", "reward.judge.concurrency=1"]  # a request costs 0.1
    with serving(said) as server:
        with pytest.raises(JudgeCostError, match="Raise the limit to go on"):
            asyncio.run(run_evaluate(configured(path, server, *priced, "reward.judge.max_cost=0.1")))
        assert not (tmp_path / "r.json").exists()
        assert asyncio.run(run_evaluate(configured(path, server, *priced, "reward.judge.max_cost=1"))) == 0
    assert json.loads((tmp_path / "r.json").read_text())["data_sources"]["chat"]["num_responses"] == 3


def test_without_each_other_they_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", rows())
    with pytest.raises(
        ConfigError, match=r"style is judge in 1 rows, and nobody scores them; r\.parquet:0 is the first"
    ):
        asyncio.run(run_evaluate(compose(EvaluateConfig, "evaluate", [f"path={path}"])))
    with serving(said) as server:
        with pytest.raises(ConfigError, match=r"reward\.judge\.address.*no row asks for it"):
            asyncio.run(run_evaluate(configured(write(tmp_path / "s.parquet", rows()[1:]), server)))
        server.replies.append(Reply(b'{"error": "no such model"}', 404))
        with pytest.raises(ConfigError, match=r"reward\.judge\.address=.*does not judge: answered 404.*no such model"):
            asyncio.run(run_evaluate(configured(path, server)))
