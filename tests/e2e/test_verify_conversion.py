"""``mcore-rl verify`` as a user runs it: verdict, exit code, JSON, and one message per mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.proofs.statements import STATEMENTS
from mcore_rl.rollout.vllm import oracle
from mcore_rl.rollout.vllm.oracle import VllmProcess
from tests.house.source import ROOT
from tests.support import checkpoints, picture_models


@pytest.fixture(scope="module")
def vllm(processes: None) -> Iterator[VllmProcess]:
    with VllmProcess() as process:
        yield process


@pytest.fixture
def one_vllm(vllm: VllmProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's calls share one process of vLLM, whose import takes 7 s."""
    monkeypatch.setattr(oracle, "VllmProcess", lambda: nullcontext(vllm))


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; here, because Megatron's import takes 6 s a process."""
    monkeypatch.setenv("COLUMNS", "200")
    code = main(["verify", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.tier("full")
def test_the_verdict_of_a_process_of_its_own(processes: None) -> None:
    command = [sys.executable, "tools/verify_conversion.py", "--model", "tiny-mixtral", "--layout", "tp=2,ep=2"]
    done = subprocess.run([*command, "--rollout", "tp=2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PROVEN in" in done.stdout and "NOT PROVEN" not in done.stdout
    assert "1.00 of the least" in done.stdout
    assert done.stderr == ""


@pytest.mark.tier("full")
def test_json(one_vllm: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--model", "tiny-deepseek-v3", "--layout", "tp=2,ep=4", "--rollout", "tp=2,dp=2,ep=4", "--json")
    code, out, _ = run(capsys, monkeypatch, *arguments)
    report = json.loads(out)
    assert code == 0 and report["proven"] and report["world_size"] == 4
    assert report["traffic"]["over_bound"] == 1.0
    assert len({check["proves"] for check in report["checks"]}) == len(report["checks"]) >= 9
    assert all(check["found"] and not check["failures"] for check in report["checks"])


def test_the_whole_of_a_model_that_sees_pictures(
    one_vllm: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture_models.write("qwen3_vl", tmp_path / "model")
    arguments = ("--hf", str(tmp_path / "model"), "--layout", "tp=2", "--rollout", "tp=2", "--json")
    counts = {}
    for pictures in ((), ("--pictures",)):
        code, out, _ = run(capsys, monkeypatch, *arguments, *pictures)
        report = json.loads(out)
        assert code == 0 and report["proven"]
        names = next(check["found"] for check in report["checks"] if "consumed once" in check["proves"])
        counts[report["family"]] = int(names.split()[0])
    assert counts["qwen3_vl"] > counts["qwen3"], counts
    code, _, err = run(capsys, monkeypatch, *arguments, "--pictures", "--rollout", "tp=4")
    assert code == 2 and "model.vision.num_heads=2" in err
    code, _, err = run(capsys, monkeypatch, "--model", "tiny-llama", "--pictures", "--check")
    assert code == 2 and "is of no model that sees pictures here" in err


def test_a_preset_names_its_layouts(
    one_vllm: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "--model", "qwen2.5-0.5b", "--preset", "h100_80gb")
    assert code == 0 and "qwen2, 24 layers" in out


def test_a_directory_is_held_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write("mixtral", tmp_path)
    code, out, _ = run(capsys, monkeypatch, "--hf", str(tmp_path), "--layout", "pp=2")
    assert code == 0 and "the checkpoint" in out, out
    checkpoints.edit_config(tmp_path, num_local_experts=3)
    code, out, _ = run(capsys, monkeypatch, "--hf", str(tmp_path))
    assert code == 1
    assert "NOT PROVEN" in out
    assert "block_sparse_moe.experts.3.w1.weight" in out


def test_the_mutation_score(
    one_vllm: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table; with a family that nobody made a statement of, as JSON and exit code 1."""
    code, out, _ = run(capsys, monkeypatch, "--mutate", "llama")
    lines = [line.replace("llama adapters", "llama+adapters") for line in out.splitlines()]
    rows = [line.split() for line in lines if line.startswith("llama")]
    tables = [("llama", "weights"), ("llama", "rollout"), ("llama+adapters", "weights"), ("llama+adapters", "rollout")]
    assert code == 0 and [(row[0], row[1]) for row in rows] == tables, out
    assert all(int(row[2]) == int(row[3]) + int(row[4]) and row[5] == "0" for row in rows)
    monkeypatch.delitem(STATEMENTS, "llama")
    code, out, _ = run(capsys, monkeypatch, "--mutate", "llama", "--json")
    assert code == 1 and "no statement of this family" in json.loads(out)[0]["failures"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "mixtral-8x220b"], "is no known checkpoint"),
        (["--model", "tiny-mixtral", "--layout", "tp=3"], "--layout tp=3"),
        (["--model", "tiny-mixtral", "--layout", "tp=2,xp=3"], "no such axis"),
        (["--model", "tiny-mixtral", "--rollout", "tp=2,ep=3"], "--rollout ep=3"),
        (["--model", "deepseek-v3", "--layout", "pp=16"], "Write --pipeline-layers=["),
        (["--model", "tiny-mixtral", "--preset", "z80"], "preset=z80: is no preset of it"),
        (["--model", "tiny-mixtral", "--pipeline-layers", "1,x"], "pipeline-layers=1,x"),
        (["--mutate", "lama"], "mutate=lama: is no family. Write one of llama"),
        (["--hf", "nowhere"], "--hf=nowhere: there is no such directory"),
    ],
)
def test_a_mistake_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert err.startswith("error: ") and said in err
    assert out == "" and "Traceback" not in err
