"""Every block of commands in the pages runs, or says why it cannot run here.

The blocks of a page run one after the other in one folder, as a reader types them; where something fails, the rest of
the page does not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.verdict import gain
from tests.house.source import ROOT
from tests.support.doc_blocks import COMMANDS, PAGES, SHORTCUTS, Block, blocks, write_stage

REASONS = ("a cluster", "a container", "a GPU", "the network", "an installation", "what other blocks and tests run")
COMMAND = re.compile(r"^(?:\$ )?(?:python3?|mcore-rl|make|pip|docker|ray|hf|sbatch|nsys) ", re.MULTILINE)
QUICK, FULL = ([page for page in PAGES if any(tier in block.tiers for block in blocks(page) if block.note == "run")]
               for tier in ("quick", "full"))  # fmt: skip
FIRST = ("README.md", "docs/first_run.md")  # whose quick commands the tier `ci` runs
LEARN = {"docs/first_run.md": "runs/arithmetic/grpo", "docs/own_data_and_reward.md": "runs/words"}
SECONDS = re.compile(r"[\d.]+ s$", re.MULTILINE)


def complaints(block: Block) -> list[str]:
    """What is wrong with the comment before ``block``."""
    if block.language not in COMMANDS:
        return [f"{block}: has commands. Begin it with ```bash"] if COMMAND.search(block.text) else []
    if block.note != "run":
        return [f"{block}: does not say whether a test runs it. Write <!-- run: quick --> before it"]
    if block.said.startswith("no, ") and block.said.removeprefix("no, needs ") not in REASONS:
        return [f"{block}: {block.said} is no known reason. Write no, needs and one of {', '.join(REASONS)}"]
    return [f"{block}: {each} is neither quick nor full" for each in block.tiers - {"quick", "full"}]


def test_every_block_of_commands_runs_or_says_why_not() -> None:
    page_blocks = [block for page in PAGES for block in blocks(page)]
    assert [complaint for block in page_blocks for complaint in complaints(block)] == []
    assert sum(block.language in COMMANDS for block in page_blocks) > 20


def test_the_rule_refuses_what_is_not_accounted_for() -> None:
    def block(note: str, said: str, language: str, text: str = "make test\n") -> Block:
        return Block("page.md", 1, note, said, language, text)

    for bad in (
        block("", "", ""),
        block("", "", "bash"),
        block("file", "x.sh", "bash"),
        block("run", "quickly", "bash"),
        block("run", "no, tired", "bash"),
    ):
        assert len(complaints(bad)) == 1, bad
    for good in (
        block("run", "quick, full", "bash"),
        block("run", "no, needs a GPU", "bash"),
        block("", "", "", "a: 1"),
    ):
        assert complaints(good) == [], good


MODEL_OF_A_COMMAND = re.compile(r"(?:model\.path=|--hf )([^\s\\]+)")


def test_a_model_of_a_command_can_be_had() -> None:
    """By its Hub id, or in a folder; a bare name is neither, unless it stands for the reader's: MODEL."""
    commands = [(block, block.commands) for page in PAGES for block in blocks(page) if block.language in COMMANDS]
    named = [(str(block), model) for block, text in commands for model in MODEL_OF_A_COMMAND.findall(text)]
    assert len(named) > 10
    assert [(place, model) for place, model in named if "/" not in model and not model.isupper()] == []


def test_the_first_run_lists_what_make_train_runs() -> None:
    made = subprocess.run(["make", "--dry-run", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.removeprefix(".venv/bin/") for line in made.splitlines() if line.startswith(".venv/bin/mcore-rl ")]
    first, second, *_ = (block for block in blocks("docs/first_run.md") if block.language == "bash")
    assert first.text.startswith("make train\n") and len(lines) == 4
    assert second.text.splitlines() == lines


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stage")
    write_stage(directory)
    return directory


@pytest.fixture
def stage(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "stage", symlinks=True))


def run(block: Block, folder: Path, prelude: str) -> str:
    """What the commands print."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    script = f"set -euo pipefail\n{prelude}\n{block.commands}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{block.commands}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def run_page(page: str, tier: str, folder: Path) -> None:
    for block in blocks(page):
        if block.note == "file":
            (folder / block.said).write_text(block.text)
        elif block.note == "run" and tier in block.tiers:
            said = run(block, folder, SHORTCUTS if tier == "quick" else "")
            if block.language == "console":
                assert missing(block, said) == []


def missing(block: Block, said: str) -> list[str]:
    """What a block shows and the command did not say, but for spaces, and for seconds; between dots, anything."""
    printed = " ".join(SECONDS.sub("", said).split())
    lines = (SECONDS.sub("", line) for line in block.text.splitlines() if not line.startswith("$ "))
    return [piece for line in lines for part in line.split("...") if (piece := " ".join(part.split())) not in printed]


@pytest.mark.tier("ci")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.tier("full")) for page in QUICK]
)
def test_quick_commands_run(page: str, stage: Path) -> None:
    run_page(page, "quick", stage)


@pytest.mark.tier("full")
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", FULL)
def test_commands_run(page: str, stage: Path) -> None:
    run_page(page, "full", stage)
    if page in LEARN:
        for accuracies in read_run(stage / LEARN[page]).accuracies.values():
            change = gain(accuracies[0], accuracies[-1])
            assert change.significant and change.points > 0.1, change
