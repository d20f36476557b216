"""``mcore-rl evaluate`` with a reward model: one real engine, and transformers' scores of the same texts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoTokenizer

from mcore_rl.config.compose import compose
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.controller.programs.evaluate import run_evaluate
from mcore_rl.ground.errors import ConfigError
from tests.support import prompt_files, reward_models
from tests.support.run_task import nothing_left
from tests.support.vllm_device import ON_VLLM_DEVICE

QUESTIONS = ("why?", "how many apples?", "and then?")
ANSWERS = ("because", "3 apples and 4 more", "")


def rows(style: str) -> list[dict[str, Any]]:
    asked = [
        prompt_files.row(
            question,
            data_source="chat",
            reward_model={"style": style, "ground_truth": None},
            responses=[f"{answer} {index}" for index, answer in enumerate(ANSWERS)],
        )
        for question in QUESTIONS
    ]
    graded = prompt_files.row(answer="4", data_source="gsm8k", responses=["#### 4", "#### 5", "#### 4"])
    return [*asked, graded]


def evaluate(path: Path, *more: str) -> dict[str, Any]:
    out = path.with_suffix(".json")
    written = [f"path={path}", f"out={out}", "reward.num_workers=1", *more]
    assert asyncio.run(run_evaluate(compose(EvaluateConfig, "evaluate", written))) == 0
    numbers: dict[str, Any] = json.loads(out.read_text())["data_sources"]
    return numbers


@pytest.mark.tier("full")
def test_rows_are_scored_by_who_they_ask_for(tmp_path: Path, fast_ray: None) -> None:
    judge = tmp_path / "judge"
    reward_models.write_judge(judge)
    path = reward_models.write_rows(tmp_path / "r.parquet", rows("model"))
    asked = [
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.max_length=64",
        "reward_model.dtype=float32",
        ON_VLLM_DEVICE["reward_model"],
        "reward_model.kv_cache_memory_bytes=16777216",
    ]
    with nothing_left():
        numbers = evaluate(path, *asked)
    tokenizer, model = AutoTokenizer.from_pretrained(judge), reward_models.load(judge)
    texts = []
    for row in rows("model")[:-1]:
        for response in row["responses"]:
            told = [*row["prompt"], {"role": "assistant", "content": response}]
            texts.append(
                tokenizer.encode(tokenizer.apply_chat_template(told, tokenize=False), add_special_tokens=False)
            )
    expected = reward_models.reference(model, texts)
    assert max(expected) - min(expected) > 1
    assert numbers["chat"]["metrics"]["score"]["value"] == pytest.approx(fmean(expected), abs=1e-4)
    assert numbers["chat"]["num_responses"] == 9 and not any(numbers["chat"]["errors"].values())
    assert numbers["gsm8k"]["metrics"]["accuracy"]["value"] == pytest.approx(2 / 3)
    assert (tmp_path / "r-logs" / "reward-engine-0.log").is_file()


def test_without_each_other_they_are_refused(tmp_path: Path) -> None:
    path = reward_models.write_rows(tmp_path / "r.parquet", rows("model"))
    with pytest.raises(
        ConfigError, match=r"style is model in 3 rows, and nobody scores them; r\.parquet:0 is the first"
    ):
        evaluate(path)
    path = prompt_files.write(tmp_path / "s.parquet", rows("rule")[-1:])
    with pytest.raises(ConfigError, match="no row asks for it"):
        evaluate(path, "reward_model.enable=true", f"reward_model.model.path={tmp_path}", "reward_model.max_length=64")
    wrong = ["reward_model.enable=true", f"reward_model.model.path={tmp_path}", "reward_model.max_length=64"]
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path.*config\.json: cannot be read"):
        evaluate(reward_models.write_rows(path, rows("model")), *wrong)
