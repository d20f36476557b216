"""Checksums of what a resumed run depends on, besides its checkpoint: weights, tokenizer, rewards, data, agents.

Only content counts.  Where files are, what they are called and when they were written does not, so that models, data
and whole runs can be copied elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mcore_rl.checkpoints.manifest import sum_of, sum_text

Sums = dict[str, str]  # name of a file -> its length and checksum
TOKENIZER = "tokenizer"
TEMPLATE = "chat template"
ADAPTERS = "actor.lora.path"
# Of weights of hundreds of GB, this much of each file is read: the header, which says where each tensor lies, and
# pieces at even distances.  Training changes nearly every element.
WHOLE_BYTES, HEADER_BYTES = 64 << 20, 1 << 20
PIECES, PIECE_BYTES = 64, 64 << 10
# Keys of ``rollout.agent`` that name files, or FILE.py:NAME, or a list or mapping of those.
AGENT = "rollout.agent."
AGENT_FILES = (
    *("tools", "loops", "tool_parser", "program.function", "program.command"),
    *("tool_config_path", "mcp_config_path", "interaction_config_path", "search_corpus"),
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
SETTINGS = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# Entries of tokenizer_config.json that do not change what a text becomes.
UNIMPORTANT = (
    "chat_template",
    "name_or_path",
    "tokenizer_file",
    "transformers_version",
    "local_files_only",
    "is_local",
)


def contents_of(values: Mapping[str, Any], weights: Mapping[str, Path]) -> dict[str, Sums]:
    """The checksums of everything that a resume of the run of ``values`` depends on, by configuration key.

    weights: the Hugging Face checkpoints of its roles, by the keys that name them.
    ``tokenizer`` and ``chat template`` are of the policy; what the run does not have is left out.  OSError: a file
    cannot be read.
    """
    model = values["model"]
    contents = {key: weights_of(path) for key, path in weights.items()}
    if adapters := ((values.get("actor") or {}).get("lora") or {}).get("path"):
        contents[ADAPTERS] = weights_of(Path(adapters))
    contents |= _tokenizer_of(Path(model.get("tokenizer_path") or model["path"]), TOKENIZER, TEMPLATE)
    judge = values.get("reward_model") or {}
    if judge.get("enable"):
        place, key = Path(judge["model"]["path"]), "reward_model.model"
        contents[f"{key}.path"] = weights_of(place)
        contents |= _tokenizer_of(Path(judge["model"].get("tokenizer_path") or place), key, key)
    if served := ((values.get("reward") or {}).get("judge") or {}).get("path"):
        place, key = Path(served), "reward.judge.path"
        contents[key] = weights_of(place) | _tokenizer_of(place, key, key)[key]
    custom = (values.get("custom_reward_function") or {}).get("path")
    contents["custom_reward_function.path"] = _whole([Path(custom)] if custom else [])
    files = [Path(name) for name in values["data"].get("val_files") or []]
    contents["data.val_files"] = {f"file {number}": _sum(file) for number, file in enumerate(files, 1)}
    contents |= _agents_files((values.get("rollout") or {}).get("agent") or {})
    return {key: sums for key, sums in contents.items() if sums}


def _agents_files(agent: Mapping[str, Any]) -> dict[str, Sums]:
    """The files that say how episodes run: tools, loops, programs and their data."""
    contents = dict[str, Sums]()
    for key in AGENT_FILES:
        value: Any = agent
        for part in key.split("."):
            value = (value or {}).get(part)
        names = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
        files = [file for name in names if name for file in _files_at(str(name))]
        contents[f"{AGENT}{key}"] = {f"{file.name} ({number})": _sampled(file) for number, file in enumerate(files, 1)}
    return contents


def _files_at(place: str) -> list[Path]:
    """The files at a path, in a folder, or of FILE.py:NAME; none where it names something else."""
    for name in (place, place.rpartition(":")[0]):
        path = Path(name).expanduser()
        try:
            if name and path.is_file():
                return [path]
            if name and path.is_dir() and name == place:
                return sorted(file for file in path.rglob("*") if file.is_file())
        except (OSError, ValueError):  # too long for a name, or not one at all
            continue
    return []


def weights_of(directory: Path) -> Sums:
    """The checksums of a Hugging Face checkpoint's weights; of large files, of pieces of them."""
    return {path.name: _sampled(path) for path in sorted(directory.glob("*.safetensors"))}


def _tokenizer_of(directory: Path, tokenizer: str, template: str) -> dict[str, Sums]:
    contents: dict[str, Sums] = {tokenizer: {}, template: {}}
    named = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    contents[tokenizer] |= _whole([*named, *sorted(directory.glob("*.tiktoken"))])
    contents[template] |= _whole([directory / name for name in TEMPLATE_FILES if (directory / name).is_file()])
    if (directory / SETTINGS).is_file():
        settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
        if written := settings.get("chat_template"):
            contents[template][SETTINGS] = _of(written)
        contents[tokenizer][SETTINGS] = _of({key: each for key, each in settings.items() if key not in UNIMPORTANT})
    return contents


def _whole(files: Sequence[Path]) -> Sums:
    return {file.name: _sum(file) for file in files}


def _sum(file: Path) -> str:
    each = sum_of(file)
    return f"{each.num_bytes} bytes, {each.checksum}"


def _of(value: Any) -> str:
    return sum_text(xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()))


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return _sum(path)
    hashed = xxhash.xxh3_64()
    with path.open("rb") as file:
        hashed.update(file.read(HEADER_BYTES))
        for number in range(PIECES):
            file.seek(HEADER_BYTES + (size - HEADER_BYTES - PIECE_BYTES) * number // (PIECES - 1))
            hashed.update(file.read(PIECE_BYTES))
    return f"{size} bytes, sampled {sum_text(hashed)}"
