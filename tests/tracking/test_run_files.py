from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.samples import write_samples
from tests.tracking.recorded_run import record


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(record(tmp_path / "run", total_steps=4, test_freq=2))
    assert (run.name, run.last_step, run.total_steps, run.complete) == ("run", 4, 4, True)
    assert [(each.step, each.num_prompts, each.mean) for each in run.accuracies["arithmetic"]] == [
        (0, 200, 0.1), (2, 200, 0.35), (4, 200, 0.6)
    ]  # fmt: skip
    assert run.phases() == ["generate", "score", "logprobs", "reference", "advantages", "update_actor", "sync"]
    assert [step for step, _ in run.values("reward/mean")] == [1, 2, 3, 4]
    assert "val/arithmetic/accuracy" in run.metric_keys() and "step" not in run.metric_keys()


def test_a_killed_run_with_a_torn_line_and_a_half_written_file(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=10, until=6)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/me')
    (path / "validation/step_10.parquet").write_bytes(b"PAR1 half")
    run = read_run(path)
    assert (run.last_step, run.complete) == (6, False)
    assert [each.step for each in run.accuracies["arithmetic"]] == [0, 5]


def test_missing_parts(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=4)
    (path / "environment.json").write_text("{half")
    (path / "config.yaml").unlink()
    run = read_run(path)
    assert (run.total_steps, run.complete, run.config, run.environment) == (None, False, "", {})
    (path / "metrics.jsonl").unlink()
    assert read_run(path).last_step is None


def test_several_samples_of_a_prompt_are_averaged_and_sources_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    rows = [("a", 1, True), ("a", 1, False), ("a", 2, True), ("b/c", 1, False), ("b/c", 2, None)]
    columns = ("data_source", "prompt_id", "correct")
    write_samples(tmp_path, 0, "validation", [dict(zip(columns, row, strict=True)) for row in rows])
    accuracies = read_run(tmp_path).accuracies
    assert {source: each[0].by_prompt for source, each in accuracies.items()} == {
        "a": {"1": 0.5, "2": 1.0},
        "b/c": {"1": 0.0},
    }


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run_dir=.*holds none of metrics.jsonl.*trainer.default_local_dir"):
        read_run(tmp_path / "nowhere")
