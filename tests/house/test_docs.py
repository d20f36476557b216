"""What pages say of the code is so: keys are there, messages are written somewhere, links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import COMMANDS
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.launch import load_recipe
from mcore_rl.config.run import RunConfig, any_run_schema, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.typed import all_keys
from tests.house.source import ROOT, python_files, repository_files
from tests.support import doc_blocks

PAGES = [path for path in repository_files() if path.endswith(".md")]
KEY = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)`")
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def rows(page: str) -> list[list[str]]:
    """The cells of every line of a table, without headings."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [each for each in cells if set(each[0]) != {"-"}]


@cache
def keys() -> frozenset[str]:
    schemas = (any_run_schema(), SftConfig, GenerateConfig, EvaluateConfig)
    return frozenset(key for schema in schemas for key in all_keys(schema))


def test_every_key_of_ours_beside_verls_is_there() -> None:
    ours = {key for cells in rows("from_verl.md") for key in KEY.findall(cells[1])}
    assert len(ours) > 80
    assert sorted(ours - keys()) == []


def test_keys_in_prose_beside_verls_are_there() -> None:
    groups = {key.partition(".")[0] for key in keys()}
    text = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    named = {key for key in KEY.findall(prose) if key.partition(".")[0] in groups}
    assert sorted(named - keys()) == []


@cache
def strings() -> str:
    """All of the package's source, with what is between the pieces of a string taken out."""
    text = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in python_files("mcore_rl", "tools", "launch"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def messages() -> list[str]:
    """What the first column of docs/troubleshooting.md quotes: pieces of messages, between dots where they vary."""
    return [piece.strip() for cells in rows("troubleshooting.md") for quoted in re.findall(r"`([^`]+)`", cells[0])
            for piece in quoted.split("...") if piece.strip()]  # fmt: skip


def test_every_message_of_the_page_is_written_somewhere() -> None:
    assert len(messages()) > 20
    assert [message for message in messages() if message not in strings()] == []


def blocks(page: str, language: str) -> list[str]:
    """The code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_own_data_and_reward_is_a_run(tmp_path: Path) -> None:
    prompts, reward = blocks("own_data_and_reward.md", "python")
    (recipe,) = blocks("own_data_and_reward.md", "yaml")
    for name, text in (("make_words.py", prompts), ("words.py", reward), ("words.yaml", recipe)):
        (tmp_path / name).write_text(text)
    run = load_recipe(str(tmp_path / "words.yaml"))
    assert isinstance(run, RunConfig) and run_violations(run) == []
    subprocess.run([sys.executable, tmp_path / "make_words.py", tmp_path], check=True)
    row = pq.read_table(tmp_path / "train.parquet").to_pylist()[0]
    function: dict[str, Any] = {}
    exec(reward, function)
    answer = row["reward_model"]["ground_truth"] + "bc"
    score = function[run.custom_reward_function.name](row["data_source"], answer, answer[0], {})
    assert score == {"score": 1.0, "acc": 1.0, "words": 1}


def missing_imports(text: str) -> list[str]:
    """The names that Python code imports from the package and that no module of it has."""
    return [
        f"{module}.{name.strip()}"
        for module, names in re.findall(r"^from (mcore_rl[\w.]*) import (.+)$", text, re.MULTILINE)
        for name in names.split(",")
        if name.strip() not in names_of(module)
    ]


def names_of(module: str) -> set[str]:
    """The names at the top of ``module``, which is read and not imported; none if there is no such module."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    defined = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    offered = [
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    named = {str(each.value) for node in offered for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return named | {each.id for each in assigned if isinstance(each, ast.Name)} | {each.name for each in defined}


def test_what_python_code_imports_is_there() -> None:
    code = [block for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if block.language == "python"]
    assert sum("import" in block.text for block in code) > 2
    assert {str(block): missing_imports(block.text) for block in code if missing_imports(block.text)} == {}
    assert missing_imports("from mcore_rl.checkpoints.hf_directory import HfCheckpoint, Gone") == [
        "mcore_rl.checkpoints.hf_directory.Gone"
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    targets = [target for target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (folder / target).exists()] == []


CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WITHOUT_MARKS = ((r"\[([^\]]*)\]\([^)]*\)", r"\1"), (r"[`*]", ""))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The places of a page that a link may name: its headings, as GitHub writes them, and what it marks itself."""
    text, counts = CODE.sub("", page.read_text(encoding="utf-8")), Counter[str]()
    named = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+)$", text, re.MULTILINE):
        for mark, left in WITHOUT_MARKS:
            heading = re.sub(mark, left, heading)
        place = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        named.add(f"{place}-{counts[place]}" if counts[place] else place)
        counts[place] += 1
    return frozenset(named)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_place_that_is_there(page: str) -> None:
    """As `make docs` demands, which few have installed."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", text)
    inside = [
        ((ROOT / page).parent / target if target else ROOT / page, place)
        for target, place in targets
        if "://" not in target
    ]
    assert [
        f"{target}#{place}" for target, place in inside if target.suffix == ".md" and place not in anchors(target)
    ] == []


def test_the_table_of_commands_has_every_command() -> None:
    named = [name for cells in rows("install.md") for name in re.findall(r"`([a-z-]+)`", cells[0])]
    assert [name for name in named if name in COMMANDS] == [
        name for name in named if name not in ("cpu", "cuda", "rocm")
    ]
    assert set(COMMANDS) <= set(named)
    doors = [path for cells in rows("install.md") for path in re.findall(r"`((?:tools|launch)/\S+)`", cells[-1])]
    assert len(doors) > 5 and all((ROOT / path).is_file() for path in doors)
