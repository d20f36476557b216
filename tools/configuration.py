"""Write docs/configuration.md, every key of every command with its bounds, from the dataclasses of mcore_rl/config.

python tools/configuration.py            # writes the page
python tools/configuration.py --check    # exits with 1 where it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

from mcore_rl.config.bounds import LARGEST_FLOAT, LARGEST_INT, PathKind, Setting, settings
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
COMMANDS: dict[str, type[Any]] = {
    "train": RunConfig,
    "sft": SftConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "cluster": ClusterConfig,
}
INTRODUCTION = f"""# Every key and its bounds

<!-- made by tools/configuration.py -->

Every command checks all values before it imports torch or starts anything, and says everything that is wrong at once:
the key, the value, what is wrong, what to write instead. The exit code is then 2. `mcore-rl train`, `sft`, `generate`,
`evaluate`, `mcore-rl plan`, `mcore-rl rehearse` and `mcore-rl submit` share the checks; options of the other
tools have the same bounds. What a key means is in the docstring of its dataclass in `mcore_rl/config/`; contradictions
between keys are refused too, and not listed here.

`[0, 1)` is 0 <= x < 1. Where a range ends at inf, a whole number is at most {LARGEST_INT:,} and another at most
{LARGEST_FLOAT:g}; nan and inf are never taken. A list of one item may be written without brackets. A text is what was
written, on a command line and in a file: `8:00:00`, `0123`, `1e3` and `on` are no numbers and no booleans where a
text belongs. Only below `megatron`, `engine`, `config_overrides` and `chat_template_kwargs`, whose keys have no
declared type, yaml decides. A text has one line of at most 4,096 characters, and is empty only where its default is.
A path that is read must be there and be a regular file (or a directory without pipes and devices in it); a path that
is written must be writable. A yaml file has at most 128 KiB, 32 levels, and 100,000 values with every alias written
out; an override has at most 65,536 characters.
The planner and the rehearsal look at no path of the run.

| key | commands | values | default |
|---|---|---|---|
"""


def values_of(each: Setting) -> str:
    """What a setting may be."""
    place = each.mark(PathKind)
    if each.range is not None:
        kind = f"{'whole ' if each.kind is int else ''}{'numbers' if each.listed else 'number'} in {each.range.text}"
    elif isinstance(each.kind, type) and issubclass(each.kind, Enum):
        kind = " or ".join(f"`{one.value}`" for one in each.kind)
    elif place is not None:
        named = {"": "", "model": " or [Hub id](hub.md)", "dataset": ", folder or [Hub id](hub.md)"}[place.hub]
        kind = f"{place.kind}{' to write' if place.written else ''}{named}"
    else:
        kind = {bool: "`true` or `false`", str: "text"}.get(each.kind, "keys and values")
        assert kind != "keys and values" or get_origin(each.kind) is dict, each.key
    return f"{'list: ' if each.listed else ''}{kind}{', or `null`' if each.optional else ''}"


def default_of(each: Setting) -> str:
    """As it is written on a command line."""
    items = each.default if isinstance(each.default, (list, tuple)) else [each.default]
    shown = [str(item.value) if isinstance(item, Enum) else str(item) for item in items]
    text = f"[{','.join(shown)}]" if isinstance(each.default, (list, tuple)) else shown[0]
    words = {"None": "null", "True": "true", "False": "false", "": ""}
    text = words.get(text, text)
    return f"`{text}`" if text else ""


def page() -> str:
    """The whole page."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command, schema in COMMANDS.items():
        for each in settings(schema):
            key = f"cluster.{each.key}" if command == "cluster" else each.key
            rows.setdefault((key, values_of(each), default_of(each)), []).append(command)
    lines = [
        f"| `{key}` | {', '.join(commands)} | {values} | {default} |"
        for (key, values, default), commands in sorted(rows.items())
    ]
    return INTRODUCTION + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main())
