"""Typed options: every mistake of a command line at once, with the bounds of the configuration's own types."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest

from mcore_rl.config.bounds import InputDirectory, InputFile, NonNegativeFloat, OutputFile, PositiveInt, Ranks, Seed
from mcore_rl.config.options import read_options, spelt_as_options, typed
from mcore_rl.config.parallel import parse_layers, parse_layout
from mcore_rl.ground.errors import ConfigError, Violation
from tests.house.source import ROOT

COMMANDS = ROOT / "mcore_rl" / "commands"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--num-prompts", type=typed(PositiveInt), default=32)
    made.add_argument("--max-diff", type=typed(NonNegativeFloat))
    made.add_argument("--seed", type=typed(Seed), default=0)
    made.add_argument("--layout", type=typed(parse_layout), default="ep=2")
    made.add_argument("--layers", type=typed(parse_layers))
    made.add_argument("--data", type=typed(InputFile))
    made.add_argument("--out", type=typed(OutputFile))
    made.add_argument("runs", nargs="*", type=typed(InputDirectory))
    return made


def test_values_have_their_types(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    words = [
        "--num-prompts",
        "3",
        "--max-diff",
        "1e-4",
        "--data",
        str(tmp_path / "d"),
        "--layers",
        "3,1",
        str(tmp_path),
    ]
    options = read_options(parser(), words)
    assert (options.num_prompts, options.max_diff, options.seed, options.layers) == (3, 1e-4, 0, [3, 1])
    assert options.layout.ep == 2 and options.data == tmp_path / "d" and options.runs == [tmp_path]


def test_every_mistake_is_said_at_once(tmp_path: Path) -> None:
    words = [
        "--num-prompts=0",
        "--max-diff=nan",
        f"--seed={'9' * 5000}",
        "--layout=tp=99999999999,zz=1",
        "--layers=3,x",
    ]
    with pytest.raises(ConfigError) as caught:
        read_options(parser(), [*words, "--data=/dev/zero", f"--out={tmp_path}", str(tmp_path / "none")])
    wrong = [(each.key, each.problem) for each in caught.value.violations]
    assert wrong == [
        ("--num-prompts", "must be positive"),
        ("--max-diff", "must be a finite number"),
        ("--seed", "must be a whole number"),
        ("--layout", "a size is a positive integer, of six digits at most"),
        ("--layout", "no such axis"),
        ("--layers", "is no list of numbers of layers"),
        ("--data", "is a device, and no file"),
        ("--out", "is a directory, and no file"),
        ("runs", "there is no such directory"),
    ]
    assert len(str(caught.value)) < 2000, "a value of thousands of digits is cut"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "", "x", "131073", "1" + "0" * 26])
def test_what_is_no_number_of_ranks(text: str) -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--ranks", type=typed(Ranks))
    with pytest.raises(ConfigError, match="--ranks"):
        read_options(made, [f"--ranks={text}"])


def test_no_command_takes_a_bare_number_or_path() -> None:
    """A new option of a command declares what it may be."""
    bare = []
    for path in [*sorted(COMMANDS.glob("*.py")), ROOT / "tools" / "fit_tiny.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "type" and isinstance(node.value, ast.Name):
                bare.append(f"{path.name}:{node.value.lineno}: type={node.value.id}")
    assert bare == []


def test_an_error_is_told_in_the_words_of_the_tool() -> None:
    error = ConfigError(
        [Violation("parallel.tp", 3, "does not divide 8", "Write parallel.tp=2 or parallel.pipeline_layers")]
    )
    said = spelt_as_options(error, {"parallel.": "--layout ", "parallel.pipeline_layers": "--pipeline-layers"})
    assert "--layout tp=3: does not divide 8. Write --layout tp=2 or --pipeline-layers" in said
