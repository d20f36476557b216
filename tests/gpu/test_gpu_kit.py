"""The kit of benchmarks/gpu_run on a GPU machine without its GPU; and the parts of the run, here on the CPU.

``make test-full`` makes that machine's environment (tools/set_up_bare_machine.sh): Python 3.12, torch 2.11 for CUDA 13.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.skips import not_installed

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3_600), pytest.mark.usefixtures("processes")]
ROOT = Path(__file__).parents[2]
BARE = Path(sys.prefix) / "bare-gpu-machine" / "bin" / "python"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit, built and unpacked by that machine's own Python, which has nothing else."""
    if not BARE.is_file():
        pytest.skip(not_installed("the environment of a bare GPU machine (make test-full)"))
    folder = tmp_path_factory.mktemp("kit")
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_run", "build", str(folder / "kit")], cwd=ROOT, check=True)
    unpacking = [BARE, "-m", "benchmarks.gpu_run", "unpack", str(folder / "kit"), str(folder / "site")]
    subprocess.run(unpacking, cwd=ROOT, env=environment(), check=True)
    return folder / "site"


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """Of a process on that machine: nothing of this one's environment but where its files are."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "HF_HUB_OFFLINE": "1"} | more


def bare(site: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS`` there."""
    command = [str(BARE), "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(site, **more), capture_output=True, text=True)


def test_the_machine_has_nothing_of_the_kit() -> None:
    from benchmarks.gpu_run.packages import LACKING

    if not BARE.is_file():
        pytest.skip(not_installed("the environment of a bare GPU machine (make test-full)"))
    look = f"import importlib.metadata as m; print([n for n in {LACKING!r} if list(m.distributions(name=n))])"
    assert subprocess.run([BARE, "-c", look], env=environment(), capture_output=True, text=True).stdout == "[]\n"


@pytest.fixture(scope="module")
def work(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``data`` and ``model``, prepared there."""
    work = tmp_path_factory.mktemp("work")
    for words in (
        ("arithmetic", "--difficulty", "1", "--train", "400", "--val", "16", "--out", f"{work}/data"),
        ("tiny-model", "--data", f"{work}/data", "--out", f"{work}/model"),
    ):
        done = bare(site, "mcore_rl.cli", "prepare", *words)
        assert done.returncode == 0, done.stderr
    return work


def test_vllm_loads_and_is_configured_for_the_device(site: Path, work: Path, tmp_path: Path) -> None:
    from tests.support.bare_gpu import stub_driver

    stub_driver(site, tmp_path)
    # With no visible device vLLM takes Triton as it is; else it asks whether one is there, and imports none of its own.
    driver = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = bare(site, "tests.support.bare_gpu", f"{work}/model", **driver)
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout.splitlines()[-1])
    assert engine.pop("torch").startswith("2.11.")
    assert engine == {
        "attention": "FLASH_ATTN 3", "experts": "TRITON", "kept": True, "executor": "UniProcExecutor",
        "extension": "mcore_rl.sync.receiver.SyncReceiver", "dtype": "torch.bfloat16", "sleeps": True,
    }  # fmt: skip


def one_device(work: Path, run: str) -> list[str]:
    """Overrides of a recipe of ``make train``."""
    return [
        f"model.path={work}/model",
        f"data.train_files=[{work}/data/train.parquet]",
        f"data.val_files=[{work}/data/val.parquet]",
        "actor.parallel.ep=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        f"trainer.default_local_dir={work}/{run}",
    ]


def test_sft_runs_there(site: Path, work: Path) -> None:
    done = bare(site, "mcore_rl.cli", "sft", "recipe=arithmetic_sft", *one_device(work, "sft"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (work / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["sft/loss"] < rows[1]["sft/loss"]
    assert (work / "sft" / "hf" / "final" / "model.safetensors").is_file()


def test_train_is_checked_and_planned_there(site: Path, work: Path) -> None:
    done = bare(site, "mcore_rl.cli", "train", "recipe=arithmetic_grpo", *one_device(work, "grpo"), "--check")
    assert done.returncode == 0, done.stderr


def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    """With this environment's vLLM: an engine, sft, GRPO, an engine that is killed, adapters."""
    from benchmarks.gpu_run import run
    from benchmarks.gpu_run.parts import PARTS

    words = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--device", "cpu", "--tiny"]
    patient = [replace(part, limit_s=900) for part in PARTS]  # on a busy machine
    assert run.main([*words, "--limit-s", "3400"], patient) == 0
    sections = json.loads((tmp_path / "out" / "gpu_run.json").read_text())["sections"]
    statuses = {section["name"]: section["status"] for section in sections}
    assert statuses == dict.fromkeys(statuses, "ok") | {"engine_graphs": "skipped"}
    assert list(statuses) == [part.name for part in PARTS]
    told = {section["name"]: " ".join(fact["beside"] for fact in section["facts"]) for section in sections}
    assert "weights checked after each" in told["grpo"] and "weights checked after each" in told["lora"]
    output = (tmp_path / "work" / "engine_killed" / "output.log").read_text()
    assert "engine 0: started again, 1 of 3 restarts" in output
