"""CI and pre-commit run targets of the Makefile and nothing else; actions are pinned and jobs are bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.house.source import ROOT, repository_files

WORKFLOWS = [path for path in repository_files() if path.startswith(".github/workflows/")]
HOOKS = ".pre-commit-config.yaml"
# The keys of GitHub's workflow syntax that we use; a misspelt one would be refused or, worse, ignored there.
KNOWN = {
    "": {"name", "on", "permissions", "concurrency", "env", "jobs"},
    "job": {"runs-on", "timeout-minutes", "strategy", "steps"},
    "step": {"uses", "with", "run"},
}
PINNED = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}")


def targets() -> set[str]:
    """What the Makefile can make."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def unmade(command: str) -> str | None:
    """What is wrong with a command of CI or of a hook; None if it is ``make TARGET [NAME=VALUE]``."""
    match = re.fullmatch(r"make ([a-z-]+)(?: [A-Z0-9_]+=\S+)*", command)
    if match is None:
        return f"{command!r} is no `make TARGET`: write a target, so that everyone can run what CI runs"
    return None if match[1] in targets() else f"{command!r}: the Makefile has no such target"


def problems(text: str) -> Iterator[str]:
    """What is wrong with a workflow."""
    workflow: dict[Any, Any] = yaml.safe_load(text)
    on = workflow.pop(True, workflow.pop("on", None))  # yaml 1.1 reads the key `on` as true
    if not on or workflow.get("permissions") != {"contents": "read"}:
        yield "it says when it runs, and reads contents alone"
    if "secrets." in text:
        yield "it reads no secret"
    yield from unknown("", workflow)
    for name, job in workflow["jobs"].items():
        yield from unknown("job", job)
        if not 1 <= job.get("timeout-minutes", 0) <= 90:
            yield f"{name}: give it a timeout-minutes of 90 or less"
        first = job["steps"][0].get("uses", "")
        if not first.startswith("actions/checkout@"):
            yield f"{name}: checks out first"
        for step in job["steps"]:
            yield from unknown("step", step)
            if "uses" in step and not PINNED.fullmatch(step["uses"]):
                yield f"{step['uses']}: pin it to a commit"
            if "run" in step and (problem := unmade(step["run"])):
                yield problem
        matrix = job.get("strategy", {}).get("matrix", {})
        read = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", yaml.safe_dump(job)))
        if read != set(matrix):
            yield f"{name}: its matrix has {sorted(matrix)}, and its steps read {sorted(read)}"


def unknown(kind: str, values: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(set(values) - KNOWN[kind]):
        yield f"{kind or 'workflow'}: {key} is not known here. Look it up in GitHub's syntax, and add it"


def test_there_is_one() -> None:
    assert WORKFLOWS == [".github/workflows/ci.yml"]


@pytest.mark.parametrize("path", WORKFLOWS)
def test_a_workflow_makes_targets(path: str) -> None:
    assert list(problems((ROOT / path).read_text(encoding="utf-8"))) == []


def test_what_the_readme_promises_is_what_ci_runs() -> None:
    runs = set(re.findall(r"- run: (make [a-z-]+)", (ROOT / WORKFLOWS[0]).read_text(encoding="utf-8")))
    assert runs >= {"make train", "make test-ci", "make docs"}
    pythons = yaml.safe_load((ROOT / WORKFLOWS[0]).read_text(encoding="utf-8"))["jobs"]["install"]["strategy"]["matrix"]
    assert pythons == {"python": ["3.11", "3.12", "3.13"]}


def test_hooks_make_targets() -> None:
    (repo,) = yaml.safe_load((ROOT / HOOKS).read_text(encoding="utf-8"))["repos"]
    assert repo["repo"] == "local", "no hook is fetched from elsewhere"
    for hook in repo["hooks"]:
        assert unmade(hook["entry"]) is None and hook["language"] == "system" and hook["pass_filenames"] is False
    assert [hook["id"] for hook in repo["hooks"]] == ["format", "lint", "types"]


GOOD = (ROOT / WORKFLOWS[0]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("run: make docs", "run: pip install x", "is no `make TARGET`"),
        ("run: make docs", "run: make docks", "no such target"),
        ("run: make docs", "run: make docs; rm x", "is no `make TARGET`"),
        ("timeout-minutes: 15", "timeout-minutes: 600", "timeout-minutes of 90"),
        ("    timeout-minutes: 15\n", "", "timeout-minutes of 90"),
        ("checkout@11bd71901bbe5b1630ceea73d27597364c9af683", "checkout@v4", "pin it"),
        ("vars.TORCH_INDEX_URL", "secrets.TORCH_INDEX_URL", "no secret"),
        ("contents: read", "contents: write", "reads contents alone"),
        ("matrix.python ", "matrix.pyton ", "its matrix has"),
        ("runs-on: ubuntu-24.04\n    timeout-minutes: 15", "runs_on: x\n    timeout-minutes: 15", "runs_on"),
    ],
)
def test_the_rule_refuses(old: str, new: str, problem: str) -> None:
    assert old in GOOD
    assert any(problem in each for each in problems(GOOD.replace(old, new)))
