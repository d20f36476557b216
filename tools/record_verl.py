"""Record facts of verl from a clone of it: its keys with their defaults, and what its published scripts ask for.

python tools/record_verl.py CLONE            # writes keys.json and published.json
python tools/record_verl.py CLONE --check    # exits with 1 where they are out of date

``keys.json``: each key's name, and its default in each published version.  ``ppo_trainer`` (FSDP) has only the keys
whose defaults differ from ``ppo_megatron_trainer``'s; null: it lacks the key.  ``published.json``: the arguments that
bash gives to verl's module in a script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcore_rl.from_verl.shell import expand
from mcore_rl.from_verl.written import launch_of

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "mcore_rl" / "from_verl" / "keys.json"
PUBLISHED = ROOT / "tests" / "from_verl" / "published.json"
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
NEXT = "0.10.0.dev"  # the head of the clone
VERSIONS = ("0.4.0", "0.4.1", "0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", NEXT)
TRAINERS = ("ppo_megatron_trainer", "ppo_trainer")
OTHERS = ("generation", "evaluation", "sft_trainer", "sft_trainer_engine")
ENGINES = ("fsdp", "megatron")  # of the fine-tuning: groups with the same names
IGNORED = ("_target_", "defaults")  # hydra's own
Ranges = list[list[Any]]  # of a key: [first version, last version, default]


def shown(clone: Path, version: str, path: str) -> str:
    """The text of a file in a version; "" if it has none."""
    command = ["git", "-C", str(clone), "show", f"{'HEAD' if version == NEXT else f'v{version}'}:{path}"]
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
    groups = dict[str, Any]()
    for each in values.pop("defaults", []) if "_generated" not in text else []:
        # "model@model: hf_model" is the file hf_model.yaml in the folder model, under the key model
        for group, file in each.items() if isinstance(each, dict) else ():
            inside, _, place = group.partition("@")
            for chosen in ENGINES if file in ENGINES else (file,):
                inside_file = OmegaConf.to_container(
                    OmegaConf.create(shown(clone, version, f"{folder}/{inside}/{chosen}.yaml") or "{}")
                )
                assert isinstance(inside_file, dict)
                groups |= dict(leaves({str(key): value for key, value in inside_file.items()}, f"{place or inside}."))
    return groups | dict(leaves({str(key): value for key, value in values.items()}))


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


def published(clone: Path) -> str:
    """The text of the file of scripts."""
    scripts = {}
    for version, paths in SCRIPTS.items():
        for path in paths:
            launches = [
                launch_of(each) for each in expand(shown(clone, version, path), environment=ENVIRONMENT).programs
            ]
            (launch,) = filter(None, launches)
            scripts[f"{version} {path}"] = [word.replace(os.getcwd(), ENVIRONMENT["PWD"]) for word in launch.words]
    return json.dumps(scripts, indent=1) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a git repository of verl with its tags")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where it is out of date")
    options = parser.parse_args(words)
    texts = {OUT: recorded(options.clone), PUBLISHED: published(options.clone)}
    if options.check:
        stale = [str(path) for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
        print("\n".join(stale))
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
