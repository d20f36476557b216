"""Record the keys of verl's configurations, with their defaults, from a clone of verl: mcore_rl/config/verl/keys.json.

python tools/record_verl_keys.py CLONE            # writes the file
python tools/record_verl_keys.py CLONE --check    # exits with 1 where it is out of date

Facts alone are recorded: each key's name, and its default in each published version.  ``ppo_trainer`` (FSDP) has only
the keys whose defaults differ from ``ppo_megatron_trainer``'s; null: it lacks the key.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

OUT = Path(__file__).resolve().parents[1] / "mcore_rl" / "config" / "verl" / "keys.json"
VERSIONS = ("0.4.0", "0.4.1", "0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0")
TRAINERS = ("ppo_megatron_trainer", "ppo_trainer")
OTHERS = ("generation", "evaluation")
IGNORED = ("_target_", "defaults")  # hydra's own
Ranges = list[list[Any]]  # of a key: [first version, last version, default]


def shown(clone: Path, version: str, path: str) -> str:
    """The text of a file in a version; "" if it has none."""
    command = ["git", "-C", str(clone), "show", f"v{version}:{path}"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout if told.returncode == 0 else ""


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value; an empty dict is one."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif name not in IGNORED:
            yield f"{prefix}{name}", value


def of_version(clone: Path, version: str, name: str) -> dict[str, Any]:
    """Every key of a configuration with its default: as verl composes it, where verl has written that down."""
    folder = "verl/trainer/config"
    text = shown(clone, version, f"{folder}/_generated_{name}.yaml") or shown(clone, version, f"{folder}/{name}.yaml")
    values = OmegaConf.to_container(OmegaConf.create(text or "{}"))
    assert isinstance(values, dict)
    return dict(leaves({str(key): value for key, value in values.items()}))


def ranges(clone: Path, name: str) -> dict[str, Ranges]:
    """Key -> its ranges of versions with one default."""
    found: dict[str, Ranges] = {}
    for place, version in enumerate(VERSIONS):
        for key, default in of_version(clone, version, name).items():
            known = found.setdefault(key, [])
            if known and place and known[-1][1] == VERSIONS[place - 1] and known[-1][2] == default:
                known[-1][1] = version
            else:
                known.append([version, version, default])
    return dict(sorted(found.items()))


def recorded(clone: Path) -> str:
    """The text of the file."""
    megatron, fsdp = (ranges(clone, name) for name in TRAINERS)
    other: dict[str, Any] = {key: fsdp.get(key) for key in sorted({*megatron, *fsdp}) if fsdp.get(key) != megatron.get(key)}
    tables = {TRAINERS[0]: megatron, TRAINERS[1]: other} | {name: ranges(clone, name) for name in OTHERS}
    lines = []
    for name, keys in tables.items():
        inside = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in keys.items())
        lines.append(f"{json.dumps(name)}: {{\n{inside}\n}}")
    return f'{{\n"versions": {json.dumps(VERSIONS)},\n' + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a git repository of verl with its tags")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where it is out of date")
    options = parser.parse_args(arguments)
    text = recorded(options.clone)
    if options.check:
        return int(OUT.read_text(encoding="utf-8") != text)
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
