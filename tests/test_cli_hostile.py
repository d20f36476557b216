"""Command lines and files that nobody can mean: one message that names the key or file, and no traceback, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main

LONG = "x" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
PLAN = ("plan", "recipe=qwen2_7b_grpo", "cluster=nvidia_h100")
SUBMIT = ("submit", "recipe=qwen2_7b_grpo", "cluster=nvidia_h100", "--dry-run")
PREPARE = ("prepare", "arithmetic", "--train", "4", "--val", "4")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command that must be refused says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")

    def run(*words: str) -> str:
        try:
            code = main(words)
        except SystemExit as left:  # argparse's
            code = left.code
        written = capsys.readouterr()
        assert code == 2, written
        assert "Traceback" not in written.err and len(written.err) < 3000
        return written.err

    return run


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        ((*PLAN, "cluster.gpus_per_node=0"), "cluster.gpus_per_node=0", "leaves a run without a device"),
        ((*PLAN, "cluster.gpus_per_node=-1"), "cluster.gpus_per_node=-1", "must not be negative"),
        ((*PLAN, "cluster.gpu_memory_gib=0"), "cluster.gpu_memory_gib=0", "must be positive"),
        ((*PLAN, "cluster.host_memory_gib=0"), "cluster.host_memory_gib=0", "must be positive"),
        ((*PLAN, "cluster.cpus_per_node=0"), "cluster.cpus_per_node=0", "must be positive"),
        ((*PLAN, "cluster.wizards=1"), "cluster.wizards=1", "there is no such key"),
        ((*PLAN, "trainer.nnodes=0"), "trainer.nnodes=0", "must be positive"),
        ((*SUBMIT, "cluster.gpus_per_node=0"), "cluster.gpus_per_node=0", "leaves a run without a device"),
        ((*SUBMIT, "nodes=0"), "trainer.nnodes=0", "must be positive"),
        ((*SUBMIT, "trainer.default_local_dir=file/run"), "trainer.default_local_dir=", "is no directory"),
        ((*SUBMIT, "trainer.default_local_dir=file"), "trainer.default_local_dir=", "is a file, and no directory"),
        ((*SUBMIT, "trainer.default_local_dir=/proc/run"), "dir=/proc/run", "nothing can be made"),
        ((*SUBMIT, "trainer.default_local_dir=/dev/null"), "trainer.default_local_dir=", "is a device, and no"),
        ((*PREPARE, "--out", "file/data"), "--out=file/data", "is no directory"),
        ((*PREPARE, "--out", "/proc/data"), "--out=/proc/data", "nothing can be made in /proc"),
        (("prepare", "tiny-model", "--data", ".", "--out", "m", "--vocab-size", "261"), "--vocab-size=261", "262"),
        (("generate", "model.path=m", "data.files=[file]", "out=x.csv"), "out=x.csv", "is written as parquet"),
        (("generate", "model.path=m", "data.files=[file]", "out=x.jsonl"), "out=x.jsonl", "is written as parquet"),
        (("plan", f"recipe={LONG}"), "recipe=x", "can be no file"),
        (("plan", "recipe=qwen2_7b_grpo", f"cluster={LONG}"), "cluster=x", "can be no file"),
        (("recipes", LONG), "recipe=x", "can be no file"),
        (("train", f"model.path={LONG}"), "model.path=x", "at most 4,096 are read"),
        (("train", LONG), "xxx...=", "is a key of 5,000 characters"),
        (("report", LONG), "run_dir=x", ""),
        (("convert", LONG), "x...", "invalid choice"),
        (("doctor", f"--{LONG}"), "x...", "unrecognized arguments"),
        (("train", "data", "~"), "data=", "is no override"),
        (("train", "data="), "data=", "is a group of keys"),
        (("train", "data.train_files=null"), "data.train_files=null", "must have a value"),
        (("train", "data.train_files=[(x]"), "data.train_files=[(x]", "Write it in quotes"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_its_key(
    words: tuple[str, ...], key: str, problem: str, told: Callable[..., str]
) -> None:
    message = told(*words)
    assert key in message and problem in message


@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
def test_json_that_nests_too_deep_is_said_with_its_file(name: str, tmp_path: Path, told: Callable[..., str]) -> None:
    (tmp_path / name).write_text(f'{{"question": "a", "answer": {DEEP}}}\n')
    for words in (("prepare", "gsm8k"), ("prepare", "eurus2-rl")):
        assert name in told(*words, "--source", name, "--out", "o")


def test_a_folder_of_all_files_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    monkeypatch.setattr("mcore_rl.data.sources.MAX_ENTRIES", 5)
    (tmp_path / "many").mkdir()
    for number in range(6):
        (tmp_path / "many" / f"{number}.json").touch()
    assert "more than 5 files and folders" in told("prepare", "gsm8k", "--source", "many", "--out", "o")
