"""Write the tables of docs/algorithms.md from the objects of mcore_rl/config/algorithms.

python tools/algorithms.py            # writes the page
python tools/algorithms.py --check    # exits with 1 where it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from mcore_rl.config.algorithm_object import Estimator
from mcore_rl.config.algorithm_registry import algorithms, estimators, policy_losses

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
BEGIN = "<!-- made by tools/algorithms.py: {} -->"
END = "<!-- end -->"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def needs(row: Estimator) -> str:
    """What an estimator cannot do without."""
    group = [f"{row.min_group} samples of a prompt or more"] if row.min_group > 1 else []
    rest = {"a greedy response": row.greedy, "the rows' own answers": row.answers}
    return ", ".join([*row.role_names, *group, *(what for what, needed in rest.items() if needed)])


def override(key: str, value: object) -> str:
    """As it is written on a command line."""
    shown = value.value if isinstance(value, Enum) else str(value).lower() if isinstance(value, bool) else value
    return f"`{key}={shown}`"


def tables() -> dict[str, str]:
    """Each table of the page, by its name."""
    published = algorithms().values()
    return {
        "algorithms": table(
            ["`algorithm=`", "", "what it is", "paper"],
            [[f"`{each.name}`", each.title, each.about, each.paper] for each in published],
        ),
        "estimators": table(
            ["name", "advantage", "per", "needs", "paper"],
            [[f"`{x.name}`", x.formula, x.scope.value, needs(x), x.paper] for x in estimators().values()],
        ),
        "losses": table(
            ["name", "loss of a token", "updates of a batch", "paper"],
            [
                [f"`{x.name}`", x.formula, "any" if x.updates_per_batch is None else str(x.updates_per_batch), x.paper]
                for x in policy_losses().values()
            ],
        ),
        "settings": table(
            ["`algorithm=`", "sets", "after"],
            [
                [f"`{each.name}`" if not row else "", override(key, setting.value), setting.source]
                for each in published
                for row, (key, setting) in enumerate(each.all_settings().items())
            ],
        ),
    }


def page(text: str) -> str:
    """``text`` of the page with its tables made anew."""
    for name, made in tables().items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        assert begin and end, f"docs/algorithms.md has lost the place of its table of {name}"
        text = f"{before}{begin}\n{made}\n{end}{after}"
    return text


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
