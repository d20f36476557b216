"""The tools and commands: each answers --help without torch; a tiny model of any family is one that a run takes;
what moved with an upgrade is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.cli import COMMANDS, main
from mcore_rl.config.engine import Device
from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.role import Head
from mcore_rl.config.rollout import RolloutConfig, context_violations
from mcore_rl.controller.lifecycle.model_checks import demand_weights
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.vllm.engine.admission import admit
from tests.house.source import ROOT
from tests.support import prompt_files
from tools import upgrade_report

FAMILIES = sorted(path.name for path in (ROOT / "model_configs").iterdir() if path.is_dir())
SITE = "docs_site.py"  # which mkdocs calls, and nobody else
TOOLS = [
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py") if path.name != SITE),
    "launch/slurm/submit.py",
]
HELP = """
import contextlib, io, json, runpy, sys
heavy, loaded = {"torch", "transformers", "ray", "vllm", "megatron"}, {}
for command in json.loads(sys.argv[1]):
    sys.argv = [*command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_path(command[0], run_name="__main__")
    assert "usage: " in said.getvalue(), command
    loaded[" ".join(command)] = sorted(heavy & set(sys.modules))
print(json.dumps(loaded))
"""


def test_help_is_answered_without_torch() -> None:
    programs = [["mcore_rl/cli.py"], *(["mcore_rl/cli.py", name] for name in COMMANDS)]
    commands = [*([tool] for tool in TOOLS), *programs]
    command = [sys.executable, "-c", HELP, json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert len(loaded) == len(commands) > 15
    assert {name: modules for name, modules in loaded.items() if modules} == {}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prompt_files.write(folder / "train.parquet", [prompt_files.row(f"{n} + {n}?", str(2 * n)) for n in range(50)])
    return folder


ON_ACCELERATORS_ALONE = ("minimax_m2",)  # vLLM's CPU build has no router of sigmoids without groups


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_every_family_is_one_that_a_run_takes(data: Path, tmp_path: Path, family: str) -> None:
    """As ``train`` looks at it before anything starts, with a context as long as the tool promises."""
    out = tmp_path / family
    asked = ["--data", str(data), "--family", family, "--out", str(out), "--max-length", "700"]
    assert main(["prepare", "tiny-model", *asked]) == 0
    rollout = RolloutConfig(max_prompt_length=350, max_response_length=350)
    platform = detect(Device.cpu)
    if family in ON_ACCELERATORS_ALONE:
        platform = replace(platform, kind=Device.cuda)
    model = admit(out, rollout, platform)
    assert model_violations(model) == context_violations(model, rollout) == []
    demand_weights(out, Head.lm)
    assert model.max_position_embeddings == 700


@pytest.mark.tier("ci")
def test_failures_of_an_upgrade_have_the_names_that_pytest_gives_them(tmp_path: Path) -> None:
    """One that fails, one that cannot be collected, and one that passes; by pytest's own summary."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "test_a.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', ['a.b', 'c d'])\ndef test_x(x): assert x == 'c d'\n"
    )
    (tmp_path / "test_b.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", "--junitxml=report.xml"]
    command += ["-q", "--continue-on-collection-errors"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    cases = [case for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase") if len(case)]
    named = {upgrade_report.node_id(case): upgrade_report.reason(case[0]) for case in cases}
    summary = re.findall(r"^(?:FAILED|ERROR) (.*?\.py\S*)", said, re.M)
    assert (
        sorted(test.removesuffix("::") for test in named)
        == sorted(summary)
        == [
            "below/test_a.py::test_x[a.b]",
            "test_b.py",
        ]
    )
    missing = "ModuleNotFoundError: No module named 'no_such_module'"
    assert upgrade_report.alike("test_b.py", named) == {missing: [""]}
