"""Record facts of verl from a clone of it: its keys with their defaults, and what its published scripts ask for.

python tools/record_verl.py CLONE            # writes keys.json and published.json
python tools/record_verl.py CLONE --check    # exits with 1 where they are out of date, or where our reader of scripts
                                             # reads one of all of verl's scripts otherwise than bash does

``keys.json``: each key's name, and its default in each published version.  ``ppo_trainer`` (FSDP) has only the keys
whose defaults differ from ``ppo_megatron_trainer``'s; null: it lacks the key.  ``published.json``: the arguments that
bash gives to verl's module in a script, with every other command replaced by one that does nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcore_rl.config.verl.shell import UNKNOWN, arguments

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "mcore_rl" / "config" / "verl" / "keys.json"
PUBLISHED = ROOT / "tests" / "config" / "verl" / "published.json"
SCRIPTS = {
    "0.4.1": (
        "examples/grpo_trainer/run_qwen2-7b_math_megatron.sh",
        "examples/grpo_trainer/run_qwen2-7b_seq_balance_math_megatron.sh",
        "examples/grpo_trainer/run_moonlight16b_math_megatron.sh",
        "examples/tuning/32b/qwen2_32B_grpo_8_h20_megatron_vllm.sh",
        "examples/grpo_trainer/run_deepseek671b_math_megatron.sh",
        "examples/ppo_trainer/run_qwen2-7b_math_gsm8k_megatron.sh",
    ),
    "0.7.0": (
        "examples/grpo_trainer/run_qwen3-235b_megatron_96gb.sh",
        "examples/grpo_trainer/run_qwen2_5-7b_math_megatron_diff_tp.sh",
        "examples/grpo_trainer/run_qwen2-7b_math_megatron_lora.sh",
        "recipe/dapo/test_dapo_7b_math_megatron.sh",
    ),
    "0.9.0": (
        "examples/grpo_trainer/run_qwen3_8b_megatron.sh",
        "examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh",
        "examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh",
        "examples/ppo_trainer/run_qwen3_8b_megatron.sh",
        "examples/gspo_trainer/run_qwen3_30b_a3b_megatron.sh",
    ),
}
ENVIRONMENT = {"HOME": "/users/me", "PWD": "/users/me/verl"}
# No command is found but bash's own; the module's arguments are written down, and the script ends.
STUB = """
python3() { printf '%s\\0' "$@" >"$TOLD"; exit 0; }
python() { python3 "$@"; }
source() { :; }
command_not_found_handle() { :; }
"""
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
    defaults: dict[str, Ranges] = {}
    for place, version in enumerate(VERSIONS):
        for key, default in of_version(clone, version, name).items():
            known = defaults.setdefault(key, [])
            if known and place and known[-1][1] == VERSIONS[place - 1] and known[-1][2] == default:
                known[-1][1] = version
            else:
                known.append([version, version, default])
    return dict(sorted(defaults.items()))


def recorded(clone: Path) -> str:
    """The text of the file."""
    megatron, fsdp = (ranges(clone, name) for name in TRAINERS)
    other: dict[str, Any] = {
        key: fsdp.get(key) for key in sorted({*megatron, *fsdp}) if fsdp.get(key) != megatron.get(key)
    }
    tables = {TRAINERS[0]: megatron, TRAINERS[1]: other} | {name: ranges(clone, name) for name in OTHERS}
    lines = []
    for name, keys in tables.items():
        inside = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in keys.items())
        lines.append(f"{json.dumps(name)}: {{\n{inside}\n}}")
    return f'{{\n"versions": {json.dumps(VERSIONS)},\n' + ",\n".join(lines) + "\n}\n"


def as_bash_reads(script: str) -> list[str] | None:
    """The arguments of verl's module, by bash; None if the script ends without starting one."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        text = STUB + script.replace("set -xeuo pipefail", "").replace("set -x", "")
        environment = {**ENVIRONMENT, "PATH": folder, "TOLD": str(told)}
        command = ["/bin/bash", "--norc", "--noprofile", "-c", text]
        subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=60, check=False)
        words = told.read_text(encoding="utf-8").split("\0")[:-1] if told.exists() else []
        words = [word.replace(folder, ENVIRONMENT["PWD"]) for word in words]  # bash is where it is
    modules = [place for place, word in enumerate(words) if word.startswith("verl.")]
    return words[modules[0] + 1 :] if modules else None


def published(clone: Path) -> str:
    """The text of the file of scripts."""
    scripts = {}
    for version, paths in SCRIPTS.items():
        for path in paths:
            words = as_bash_reads(shown(clone, version, path))
            assert words, f"{path} of {version} starts nothing"
            scripts[f"{version} {path}"] = words
    return json.dumps(scripts, indent=1) + "\n"


def misread(clone: Path) -> list[str]:
    """The scripts of verl's that our reader reads otherwise than bash, in all versions."""
    wrong = []
    for version in VERSIONS:
        listing = subprocess.run(
            ["git", "-C", str(clone), "ls-tree", "-r", "--name-only", f"v{version}"],
            capture_output=True,
            text=True,
            check=True,
        )
        for path in (each for each in listing.stdout.split() if each.endswith(".sh") and "tests/" not in each):
            script = shown(clone, version, path)
            words = as_bash_reads(script) if "verl." in script else None
            if words is None:
                continue
            ours = arguments(script, ENVIRONMENT)[1]
            if len(ours) != len(words) or any(a != b and UNKNOWN not in a for a, b in zip(ours, words, strict=False)):
                wrong.append(f"{version} {path}")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a git repository of verl with its tags")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where it is out of date")
    options = parser.parse_args(words)
    texts = {OUT: recorded(options.clone), PUBLISHED: published(options.clone)}
    if options.check:
        stale = [str(path) for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
        wrong = misread(options.clone)
        print("\n".join([*stale, *wrong]))
        return int(bool(stale or wrong))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
