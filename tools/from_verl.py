"""Write the tables of docs/from_verl.md from the table in mcore_rl/from_verl.

python tools/from_verl.py            # writes the page
python tools/from_verl.py --check    # exits with 1 where it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.from_verl.facts import CONFIGS, PROGRAM, keys_of, span
from mcore_rl.from_verl.row import KeyRow
from mcore_rl.from_verl.table import SECTIONS, Section, row_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_verl.md"
BEGIN = "<!-- made by tools/from_verl.py -->"
END = "<!-- end -->"
SHARED = ("megatron.", "optim.", "profiler", "profile")  # of the critic, as the actor's


def spans(row: KeyRow, program: str) -> str:
    """The versions that have the keys of a row, if not all have them all."""
    keys = [
        key
        for config in CONFIGS
        if PROGRAM[config] == program
        for key in keys_of(config)
        if row.matches(key) and row_for(key, program) is row
    ]
    if not keys:
        return "with `+`" if program == "train" else ""
    told = {span(key) for key in keys}
    return told.pop() if len(told) == 1 else ""


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|")


def line(row: KeyRow, section: Section) -> str:
    """A row of the page."""
    verl = f"`{row.verl.removeprefix(section.prefix).replace(',', ', ')}`"  # a browser breaks lines at spaces
    ours = ", ".join(f"`{each}`" for each in row.ours)
    note = f"not here: {row.note}" if row.absent and not row.note.startswith("not ") else row.note
    return f"| {verl} | {ours} | {cell(note)} | {spans(row, section.program)} |"


def is_shared(row: KeyRow, section: Section) -> bool:
    """Whether the critic's row says what the actor's does."""
    return section.title == "Critic" and any(row.verl.startswith(f"critic.{each}") for each in SHARED)


def table(section: Section) -> str:
    """The heading and the table of a section."""
    prefix = f" (`{section.prefix}`)" if section.prefix else ""
    program = "" if section.program == "train" else f": `mcore-rl {section.program}`"
    lines = [
        f"## {section.title}{program}",
        "",
        f"| verl{prefix} | here | what is different, or why | verl's versions |",
    ]
    lines += ["|---|---|---|---|", *(line(row, section) for row in section.rows if not is_shared(row, section))]
    if section.title == "Critic":
        lines += [
            "",
            "`critic.megatron.*` and `critic.optim.*` are as the actor's, with `critic.` in the place of `actor.`.",
        ]
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` of the page with its tables made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "docs/from_verl.md has lost the place of its tables"
    return f"{before}{begin}\n\n" + "\n\n".join(map(table, SECTIONS)) + f"\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    chosen = parser.parse_args(arguments)
    there = PAGE.read_text(encoding="utf-8")
    made = page(there)
    if chosen.check:
        return int(made != there)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
