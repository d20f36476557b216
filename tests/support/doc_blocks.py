"""The code of the pages, and where its commands are run: README.md, CONTRIBUTING.md and docs/.

A comment before a block of commands says whether a test runs it: ``<!-- run: quick -->`` with ``SHORTCUTS``, those
of the README and of the first run in the tier ``ci``; ``<!-- run: full -->`` in the tier ``full`` and without them;
both words, both ways; or ``<!-- run: no, REASON -->``.
``<!-- file: NAME -->`` before other code: the commands of the page find it as NAME.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.data.datasets import DATASETS
from tests.house.source import ROOT, repository_files
from tests.support import checkpoints, prompt_files, rank_files, shadows

PAGES = [path for path in repository_files() if re.fullmatch(r"README\.md|CONTRIBUTING\.md|docs/\w+\.md", path)]
BLOCK = re.compile(r"(?:^<!-- (\w+): (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("bash", "console")  # of a console: lines after "$ " are typed, the others are what it says
# What a quick run leaves out: the training itself, and the cluster.  The command line is read and checked as it stands.
SHORTCUTS = """
mcore-rl() {
    case $1 in
        train | sft | prefer | reward | generate | evaluate) command mcore-rl "$@" --cfg ;;
        sample) command mcore-rl "$@" --check ;;
        submit) command mcore-rl "$@" --dry-run ;;
        *) command mcore-rl "$@" ;;
    esac
}
"""


@dataclass(frozen=True)
class Block:
    """note: what kind of comment stands before it.  said: the rest of it.  line: of the page, where it begins."""

    page: str
    line: int
    note: str
    said: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def tiers(self) -> set[str]:
        """ "quick", "full", both or neither."""
        return set() if self.said.startswith("no, ") else set(self.said.split(", "))

    @property
    def commands(self) -> str:
        """What a person types."""
        if self.language == "bash":
            return self.text
        return "\n".join(line[2:] for line in self.text.splitlines() if line.startswith("$ "))


def blocks(page: str) -> Iterator[Block]:
    """All code of ``page``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        note, said, language, code = match.groups(default="")
        yield Block(page, text.count("\n", 0, match.start(3)) + 1, note, said, language, code)


def write_stage(directory: Path) -> None:
    """What the pages take for granted: the repository, and small things under the names that they use."""
    for name in ("launch", "mcore_rl", "model_configs", "tools"):
        (directory / name).symlink_to(ROOT / name)
    task = shadows.write_task(directory / "task")
    for model, family in (
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral"),
        ("MODEL", "llama"),
        ("models/Qwen2.5-Math-7B", "qwen2"),
        ("runs/run/hf/final", "qwen2"),
    ):
        shutil.copytree(task / "models" / family, directory / model)
    for source, name in (
        ("gsm8k", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "dapo-math"),
        ("BytedTsinghua-SIA/AIME-2024", "aime24"),
        ("PRIME-RL/Eurus-2-RL-Data", "eurus2-rl"),
        ("hiyouga/geometry3k", "geo3k"),
    ):
        assert name in DATASETS
        shutil.copytree(task / "source" / name, directory / source)
    shutil.copytree(task / "data", directory / "data")
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(256)]
    prompt_files.write(directory / "pairs.parquet", pairs)
    prompt_files.write(directory / "held_out.parquet", pairs[:8])
    shutil.copytree(ROOT / "launch" / "recipes", directory / "my_recipes")
    shutil.copy(ROOT / "launch" / "recipes" / "qwen25_05b_ppo.yaml", directory / "my_recipes" / "gsm8k.yaml")
    checkpoints.write("mixtral", directory / "task" / "hf")
    for step in (40, 100):
        run = directory / "RUN" / "checkpoints" / f"step_{step}"
        rank_files.write_run(run, "mixtral", directory / "task" / "hf", "ep=2", 2)
