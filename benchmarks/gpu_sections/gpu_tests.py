"""tests/gpu on the accelerator: how many passed, and every one that did not."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_sections.section import FAILED, Bench, Fact, Facts, Skipped

ROOT = Path(__file__).parents[2]
COMMAND = ("-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*\[ *\d+%\]$", re.MULTILINE)
SUMMARY = re.compile(r"^(FAILED|ERROR) (tests/\S.*)$", re.MULTILINE)
PASSED = "exit status 0"
SPARE_S = 10.0  # to end pytest and to write down what it said


def facts(bench: Bench) -> Facts:
    """pytest in a process of its own, ended in time for its outcomes so far to be counted."""
    if not bench.platform.is_accelerator:
        raise Skipped("the gate runs them on the CPU")
    if find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    limit_s = bench.limit_s - SPARE_S
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen([sys.executable, *COMMAND], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            ended = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            process.terminate()
            ended = f"ENDED after {limit_s:.0f} s, before all had run"
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    print(text[-20_000:], flush=True)
    yield from outcomes(text, ended)


def outcomes(text: str, ended: str) -> Facts:
    """The facts in what ``pytest -v`` printed.  ended: how it ended, in words."""
    counts = Counter(OUTCOME.findall(text))
    told = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(counts.items()))
    yield Fact(what="tests/gpu", value=told or FAILED, beside=ended, ok=ended == PASSED)
    for outcome, test in SUMMARY.findall(text):
        name, _, why = test.partition(" - ")
        yield Fact(what=name.removeprefix("tests/gpu/"), value=FAILED, beside=f"{outcome}: {why}"[:500], ok=False)
