"""The card of an export: its numbers are those of the validations, and it tells nothing of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_rl.tracking.model_card import MAX_ROWS, model_card
from tests.tracking.recorded_run import NUM_PROMPTS, record, right_at

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model": {"path": f"Qwen/Qwen2.5-0.5B@{COMMIT}"},
    "data": {
        "train_files": [f"openai/gsm8k@{COMMIT}:main/train.parquet", "/secret place/mine.parquet"],
        "val_files": [f"openai/gsm8k@{COMMIT}:main/test.parquet"],
    },
    "algorithm": {"adv_estimator": "grpo"},
    "rollout": {"n": 8},
    "actor": {"optim": {"lr": 1e-06}},
    "recipe": {"title": "GSM8K | <GRPO>"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path / "run"


def read(text: str) -> tuple[dict[str, object], str]:
    _, front, card = text.split("---\n", 2)
    return yaml.safe_load(front), card


def accuracy(step: int) -> str:
    """Of the recorded run, counted from the rule that its rows follow."""
    return f"{sum(right_at(step, prompt, 20) for prompt in range(NUM_PROMPTS)) / NUM_PROMPTS:.1%}"


def test_the_card_says_from_what_and_what_came_of_it(run: Path) -> None:
    front, card = read(model_card("team/tuned", run / "checkpoints" / "step_20"))
    assert front == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["openai/gsm8k"], "tags": ["mcore_rl", "reinforcement-learning", "grpo"],
    }  # fmt: skip
    assert f"| base model | Qwen/Qwen2.5-0.5B@{COMMIT} |" in card
    assert f"| trained on | openai/gsm8k@{COMMIT}:main/train.parquet, mine.parquet |" in card
    assert "| checkpoint | step_20 |" in card and "| recipe | GSM8K \\| &lt;GRPO> |" in card
    assert (
        f"- arithmetic: {accuracy(0)} after step 0, {accuracy(20)} after step 20: +50.0 points, more than chance"
        in card
    )
    assert "exact sign test on the same 200 prompts: 100 better, 0 worse" in card
    for step in (0, 5, 10, 15, 20):
        assert f"| {step} | {accuracy(step)} | " in card
    assert "`▁▂▃▄▅`" in card, "10, 22.5, 35, 47.5 and 60 % of eight bars"
    assert "| `rollout.n` | 8 |" in card and "| `actor.optim.lr` | 1e-06 |" in card
    assert "Versions: mcore_rl " in card and "torch " in card
    assert "secret place" not in card and str(run) not in card


def test_a_run_that_was_killed_and_one_that_is_none(run: Path, tmp_path: Path) -> None:
    """A folder that happens to lie below that of a run is none of its checkpoints."""
    record(tmp_path / "killed", until=11)
    _, card = read(model_card("team/tuned", tmp_path / "killed" / "hf" / "final"))
    assert "not been recorded to its end: 11 of 20 steps" in card
    front, card = read(model_card("team/tuned", run / "notes" / "megatron"))
    assert front["tags"] == ["mcore_rl"] and "What was learned" not in card
    (run / "config.yaml").write_text("- : {")
    assert "| base model | unknown |" in read(model_card("team/tuned", run / "hf" / "final"))[1]


def test_a_long_curve_is_thinned_to_its_ends(tmp_path: Path) -> None:
    record(tmp_path / "run", total_steps=40, test_freq=1)
    _, card = read(model_card("team/tuned", tmp_path / "run" / "hf" / "final"))
    steps = [
        int(line.split("|")[1])
        for line in card.splitlines()
        if line.startswith("| ") and "%" in line and " to " in line
    ]
    assert len(steps) == MAX_ROWS and steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, 40)
