"""Checksums of what a resumed run depends on besides its checkpoint: weights, tokenizer, rewards, data, agents, code.

Only content counts.  Where files are, what they are called and when they were written does not, so that models, data
and whole runs can be copied elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
import yaml

from mcore_rl.checkpoints.manifest import sum_of, sum_text
from mcore_rl.data.media.placed import Placed

Sums = dict[str, str]  # name of a file -> its length and checksum
TOKENIZER = "tokenizer"
TEMPLATE = "chat template"
PICTURES = "data.image_key"
MAX_SUMS = 4096  # of pictures; of more, one sum is of several
ADAPTERS = "actor.lora.path"
# Of weights of hundreds of GB, this much of each file is read: the header, which says where each tensor lies, and
# pieces at even distances.  Training changes nearly every element.
WHOLE_BYTES, HEADER_BYTES = 64 << 20, 1 << 20
PIECES, PIECE_BYTES = 64, 64 << 10
# Keys of ``rollout.agent`` that name files, or FILE.py:NAME, or a list or mapping of those.
AGENT = "rollout.agent."
CORPUS = "search_corpus"  # may be a folder
YAML = ("tool_config_path", "mcp_config_path", "interaction_config_path")  # name classes and programs
AGENT_FILES = ("tools", "loops", "tool_parser", "program.function", "program.command", *YAML, CORPUS)
# Keys that name parts of an algorithm as FILE.py:NAME.
ALGORITHM_FILES = ("algorithm.adv_estimator", "actor.loss_mode")
OURS = "mcore_rl"  # whose own classes are of its version, which may change
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


def contents_of(
    values: Mapping[str, Any], weights: Mapping[str, Path], media: Sequence[Sequence[Placed]] = ()
) -> dict[str, Sums]:
    """The checksums of everything that a resume of the run of ``values`` depends on, by configuration key.

    weights: the Hugging Face checkpoints of its roles, by the keys that name them.  media: see ``pictures_of``.
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
    for key in ALGORITHM_FILES:
        contents[key] = _numbered(_files_at(str(_value(values, key))))
    for key in AGENT_FILES:
        contents[f"{AGENT}{key}"] = _numbered(_agents_files(key, _value(values, f"{AGENT}{key}")))
    contents[PICTURES] = pictures_of(media)
    return {key: sums for key, sums in contents.items() if sums}


def pictures_of(media: Sequence[Sequence[Placed]]) -> Sums:
    """The checksums of pictures in files of their own; those that rows hold are of the rows' files.

    media: the pictures of each training row.
    """
    images = {each.image.source: each.image.sha256 for of_row in media for each in of_row}
    files = [(Path(source), sha256) for source, sha256 in images.items() if Path(source).is_absolute()]
    count = max(1, -(-len(files) // MAX_SUMS))
    sums = Sums()
    for start in range(0, len(files), count):
        some = files[start : start + count]
        last = "" if len(some) == 1 else f" to {start + len(some)}"
        sums[f"{some[0][0].name} ({start + 1}{last})"] = _of([sha256 for _, sha256 in some])
    return sums


def _value(values: Mapping[str, Any], key: str) -> Any:
    held: Any = values
    for part in key.split("."):
        held = (held or {}).get(part)
    return held


def _numbered(files: Sequence[Path]) -> Sums:
    return {f"{file.name} ({number})": _sampled(file) for number, file in enumerate(files, 1)}


def _agents_files(key: str, value: Any) -> list[Path]:
    """The files that ``value`` of a key of ``rollout.agent`` names: tools, loops, programs and their data."""
    names = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
    places = [str(name) for name in names if name]
    if key == CORPUS and places and (folder := Path(places[0]).expanduser()).is_dir():
        return sorted(file for file in folder.rglob("*") if file.is_file())
    files = [file for place in places for file in _files_at(place)]
    return [*files, *(inner for file in files if key in YAML for inner in _named_in(file))]


def _files_at(place: str) -> list[Path]:
    """The file at a path, or of FILE.py:NAME; none where it names something else."""
    for name in (place, place.rpartition(":")[0]):
        path = Path(name).expanduser()
        try:
            if name and path.is_file():
                return [path]
        except (OSError, ValueError):  # too long for a name, or not one at all
            continue
    return []


def _named_in(file: Path) -> Iterator[Path]:
    """The files that a yaml file names: those of its classes, and the programs of its MCP servers."""
    try:
        held = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return  # whoever reads it says what is wrong
    held = held if isinstance(held, dict) else {}
    for entry in [*_listed(held.get("tools")), *_listed(held.get("interaction"))]:
        yield from _module_of(str(entry.get("class_name"))) if isinstance(entry, dict) else ()
    servers = held.get("mcpServers")
    for server in servers.values() if isinstance(servers, dict) else ():
        if isinstance(server, dict):
            for word in [server.get("command"), *_listed(server.get("args"))]:
                yield from _files_at(os.path.join(str(server.get("cwd") or ""), str(word or "")))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _module_of(name: str) -> list[Path]:
    """The file of the class at ``MODULE.CLASS``."""
    module = name.rpartition(".")[0]
    try:
        spec = find_spec(module) if module and module.partition(".")[0] != OURS else None
    except Exception:  # noqa: BLE001  whatever a package of the user's does when it is imported; its loader says it
        return []
    return [Path(spec.origin)] if spec is not None and spec.has_location and spec.origin else []


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
