"""tests/gpu and benchmarks/gpu.py on a machine that has torch, megatron-core and little else, as one is borrowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Outcome, Section
from benchmarks.gpu_sections.gpu_tests import outcomes
from tests.support import bare_machine

ROOT = Path(__file__).parents[2]
TESTS = len(list(Path(__file__).parent.glob("test_*.py")))


def run_bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = bare_machine.environment(folder)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


LOOK = """
import importlib.metadata, importlib.util, sys
assert [importlib.util.find_spec(name) for name in sys.argv[1:]] == [None] * len(sys.argv[1:])
try:
    import ray.util
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'ray'"
else:
    raise AssertionError("ray was imported")
assert {each.name for each in importlib.metadata.distributions()} & {"ray", "vllm", "pyarrow"} == set()
assert importlib.metadata.version("megatron-core")
import torch, yaml, psutil, antlr4, omegaconf, hydra, mcore_rl.config.run
"""


def test_a_bare_machine_lacks_what_is_not_named(processes: None, tmp_path: Path) -> None:
    names = ["ray", "vllm", "pyarrow", "wandb", "math_verify", "transformer_engine", "apex", "einops", "xxhash"]
    assert set(names) & packages_distributions().keys() <= bare_machine.hidden()
    looked = run_bare(tmp_path, "-c", LOOK, *names)
    assert looked.returncode == 0, looked.stderr


def test_every_test_of_this_folder_is_collected_on_a_bare_machine(processes: None, tmp_path: Path) -> None:
    ran = run_bare(
        tmp_path, "-m", "pytest", "tests/gpu", "--tier=full", "--collect-only", "-qq", "-p", "no:cacheprovider"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = {
        line.partition(":")[0]: line.rpartition(" ")[2] for line in ran.stdout.splitlines() if line[:5] == "tests"
    }
    assert len(counts) == TESTS and "0" not in counts.values(), ran.stdout


@pytest.mark.tier("full")
def test_the_benchmark_runs_on_a_bare_machine(processes: None, tmp_path: Path) -> None:
    asked = run_bare(tmp_path, "-m", "benchmarks.gpu", "--help")
    assert asked.returncode == 0 and all(section.name in asked.stdout for section in gpu.PLAN), asked.stderr
    files = {"--json": str(tmp_path / "facts.json"), "--table": str(tmp_path / "facts.md")}
    flags = [part for pair in files.items() for part in pair]
    ran = run_bare(tmp_path, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", *flags)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(Path(files["--json"]).read_text())
    by_name = {section["name"]: section for section in record["sections"]}
    assert list(by_name) == [section.name for section in gpu.PLAN]
    skipped = {name: section["why"] for name, section in by_name.items() if section["status"] == "skipped"}
    assert set(skipped) == {"compiler", "tests"} and all(skipped.values())
    assert all(
        section["status"] == "ok" and section["facts"] for name, section in by_name.items() if name not in skipped
    )
    table = Path(files["--table"]).read_text()
    for section in by_name.values():
        assert all(fact["what"].replace("|", "/") in table for fact in section["facts"])
    assert "ray, pyarrow" in next(f["value"] for f in by_name["machine"]["facts"] if f["what"] == "not installed")


# ---- sections that go wrong, which are functions of this module ----


def well(bench: object):  # type: ignore[no-untyped-def]
    from benchmarks.gpu_sections.section import Fact

    yield Fact(what="a number", value=12345.678, unit="GB/s", beside="a | b")
    yield Fact(what="a word", value="yes")


def raises(bench: object):  # type: ignore[no-untyped-def]
    yield from well(bench)
    raise RuntimeError("the third went wrong")


def dies(bench: object):  # type: ignore[no-untyped-def]
    yield from well(bench)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(bench: object):  # type: ignore[no-untyped-def]
    yield from well(bench)
    time.sleep(600)


def wrong_in_part(bench: object):  # type: ignore[no-untyped-def]
    from benchmarks.gpu_sections.section import guarded

    yield from guarded("the first", raises(bench))
    yield from well(bench)


BAD = ("raises", "dies", "hangs", "wrong_in_part", "absent", "well")


def test_a_section_that_goes_wrong_leaves_the_others_alone(processes: None, tmp_path: Path) -> None:
    plan = [Section(name, f"test_bare_machine:{name}", 6 if name == "hangs" else 60, "tests.gpu") for name in BAD]
    files = ["--json", str(tmp_path / "facts.json"), "--table", str(tmp_path / "facts.md")]
    assert gpu.main(["--device", "cpu", "--tiny", *files], plan) == 1
    sections = {each["name"]: each for each in json.loads((tmp_path / "facts.json").read_text())["sections"]}
    assert {name: section["status"] for name, section in sections.items()} == {
        "raises": "failed", "dies": "failed", "hangs": "failed", "wrong_in_part": "wrong", "absent": "failed",
        "well": "ok",
    }  # fmt: skip
    measured = {name: [fact["value"] for fact in section["facts"]] for name, section in sections.items()}
    two = [12345.678, "yes"]
    assert measured == {"raises": two, "dies": two, "hangs": two, "absent": [], "well": two,
                        "wrong_in_part": [*two, "FAILED", *two]}  # fmt: skip
    for name, words in {
        "raises": "the third went wrong",
        "dies": "SIGKILL",
        "hangs": "within 6 s",
        "absent": "absent",
    }.items():
        assert words in sections[name]["why"]
    assert "12,346" in (tmp_path / "facts.md").read_text() and "a / b" in (tmp_path / "facts.md").read_text()


def test_what_no_time_is_left_for_is_said(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "facts.json"), "--table", str(tmp_path / "facts.md")]
    assert gpu.main(["--device", "cpu", "--limit-s", "10", *files], [Section("late", "machine:facts", 60)]) == 1
    (section,) = json.loads((tmp_path / "facts.json").read_text())["sections"]
    assert (section["status"], section["why"]) == ("skipped", "no time was left for it")


def test_without_an_accelerator_nothing_large_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "sees no accelerator; --device cpu --tiny" in capsys.readouterr().out


def test_after_a_compiler_that_fails_the_rest_runs_without_one() -> None:
    options = gpu.parse_options([], [])
    for status, compiles in (("ok", True), ("skipped", True), ("wrong", False), ("failed", False)):
        environment = gpu.environment_of(options, [Outcome(gpu.COMPILER, status, 1.0)])
        assert (environment.get("TORCHDYNAMO_DISABLE") != "1") == compiles, status


PRINTED = """tests/gpu/test_device.py::test_banner[accelerator] PASSED [ 25%]
tests/gpu/test_train_step.py::test_training[accelerator-dense]
dense, local: 0.9 s a step
PASSED                                                                   [ 50%]
tests/gpu/test_parity.py::test_engine[accelerator-moe] FAILED            [ 75%]
tests/gpu/test_parity.py::test_engine[accelerator-te] SKIPPED (needs it) [100%]
=========================== short test summary info ============================
SKIPPED [1] tests/gpu/test_parity.py:12: needs it
FAILED tests/gpu/test_parity.py::test_engine[accelerator-moe] - AssertionError: logprobs_T
"""


def test_what_pytest_printed_is_counted() -> None:
    counted, failing = outcomes(PRINTED, "exit status 1")
    assert (counted.value, counted.beside, counted.ok) == ("1 failed, 2 passed, 1 skipped", "exit status 1", False)
    assert (failing.what, failing.value) == ("test_parity.py::test_engine[accelerator-moe]", "FAILED")
    assert failing.beside == "FAILED: AssertionError: logprobs_T"
    assert [fact.ok for fact in outcomes(PRINTED.partition("tests/gpu/test_parity")[0], "exit status 0")] == [True]
