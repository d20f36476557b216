"""Records in each checkpoint what its run is, and checks on resume whether the run is still the same.

A resume with another model, other weights or first adapters (the KL reference is made of them again), adapters of
another rank or scale, another tokenizer or template, other training data or other roles is refused.  So are other
rewards and other validation data, unless the checkpoint is named by ``trainer.resume_from_path``.  Every other
difference is allowed, and shown to the user.

Of weights, tokenizer, rewards, data, agents and code only the content counts.  Where files are, what they are called
and when they were written does not, so that models, data and whole runs can be copied elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
import yaml

from mcore_rl.checkpoints.manifest import sum_of, sum_text
from mcore_rl.config.role_groups import POLICY
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.data.media.placed import Placed
from mcore_rl.families.config_json import read_config
from mcore_rl.ground.errors import CheckpointError, Violation, refuse_if_any
from mcore_rl.ground.json_text import read_json
from mcore_rl.ground.secrets import redact_settings
from mcore_rl.hub.names import with_names
from mcore_rl.tracking.run_directory import plain

Sums = dict[str, str]  # name of a file -> its length and checksum
TOKENIZER = "tokenizer"
TEMPLATE = "chat template"
PICTURES = "data.image_key"
MAX_SUMS = 4096  # of pictures; of more, one sum is of several
ADAPTERS = "actor.lora.path"
# Of weights of hundreds of GB, this much of each file is read: the header, which says where each tensor lies, and
# pieces at even distances.  Training changes nearly every element.
WHOLE_BYTES = 64 << 20
HEADER_BYTES = 1 << 20
PIECES = 64
PIECE_BYTES = 64 << 10
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
UNIMPORTANT_SETTINGS = (
    "chat_template",
    "name_or_path",
    "tokenizer_file",
    "transformers_version",
    "local_files_only",
    "is_local",
)
RUN = "run.json"
# What may change where the user names the checkpoint: how results are judged, episodes run and advantages computed.
JUDGES = (
    *("custom_reward_function.path", "reward_model.model.path", "reward_model.model", "reward.judge.path"),
    "data.val_files",
    *(f"{AGENT}{key}" for key in AGENT_FILES),
    *ALGORITHM_FILES,
)
MEANT = ". If the change is meant, name the checkpoint: trainer.resume_mode=path trainer.resume_from_path="
ANEW = "Write what the checkpoint was made with, or begin another run with trainer.resume_mode=off"
# Keys of places only: the run directory, the checkpoint to resume from, a copy of the model, the Ray cluster.
NOT_COMPARED = (
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "model.staged",
    "ray_init.",
)
# The keys of what has no key of its own.
KEYS = {TOKENIZER: "model.tokenizer_path", TEMPLATE: "model.tokenizer_path"}
MAX_FILES = 3
# By the end of a key, how older versions wrote that nothing is set; now None.
WAS_UNSET = {".optim.total_steps": 0}
# Fields of config.json that affect neither weights nor results.
UNIMPORTANT = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")


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
        place = Path(judge["model"]["path"])
        key = "reward_model.model"
        contents[f"{key}.path"] = weights_of(place)
        contents |= _tokenizer_of(Path(judge["model"].get("tokenizer_path") or place), key, key)
    if served := ((values.get("reward") or {}).get("judge") or {}).get("path"):
        place = Path(served)
        key = "reward.judge.path"
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
        contents[tokenizer][SETTINGS] = _of(
            {key: each for key, each in settings.items() if key not in UNIMPORTANT_SETTINGS}
        )
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


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a run is.

    config: the composed configuration, without secrets.
    model: the content of its config.json, with what the run changes of it.
    data: name, bytes and checksum of each training file.
    roles: the names of the trained roles.
    contents: checksums of all else that a resume depends on (``contents_of``); {} in checkpoints of older versions,
    with which nothing is compared.
    """

    config: dict[str, Any]
    model: dict[str, Any]
    data: list[list[Any]]
    roles: list[str]
    contents: dict[str, Sums] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        roles: Sequence[str],
        weights: Mapping[str, Path],
        media: Sequence[Sequence[Placed]] = (),
    ) -> Identity:
        """The identity of the run of ``config``.  Reads every data file once, and samples of the weights.

        weights: the Hugging Face checkpoints of its roles, by the configuration keys that name them.
        media: the pictures of each training row.
        """
        values = json.loads(json.dumps(plain(config)))
        model = read_config(weights.get(POLICY) or Path(values["model"]["path"]))
        sums = [(Path(name).name, sum_of(Path(name))) for name in values["data"]["train_files"]]
        data = [[name, file_sum.num_bytes, file_sum.checksum] for name, file_sum in sums]
        contents = contents_of(values, weights, media)
        return cls(
            config=redact_settings(with_names(values)), model=model, data=data, roles=list(roles), contents=contents
        )

    @classmethod
    def read(cls, checkpoint: Path) -> Identity:
        """The identity of the run that wrote ``checkpoint``.  CheckpointError: it cannot be read."""
        try:
            read = cls(**read_json((checkpoint / RUN).read_text(encoding="utf-8")))
            return replace(read, config=redact_settings(read.config))  # older versions redacted less
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                str(checkpoint), [f"{RUN} cannot be read: {error}. Resume from another step"]
            ) from error

    def keep(self, directory: Path) -> None:
        """Writes the identity into ``directory``.  OSError: the disk is full, or fails."""
        (directory / RUN).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def check(self, checkpoint: Path) -> list[str]:
        """The differences from the run that wrote ``checkpoint``, one line each.

        ConfigError, with every violation: it is another run.
        """
        theirs = Identity.read(checkpoint)
        changed = {key: said for key, said in self.changed(theirs) if key in JUDGES and self._is_named}
        refuse_if_any([*self._refused(theirs), *self._refused_contents(theirs, checkpoint)])
        ours = flat_settings(self.config)
        before = flat_settings(theirs.config)
        return [f"{key}: {said}" for key, said in changed.items()] + [
            f"{key}: {before.get(key)} when the checkpoint was made, now {ours.get(key)}"
            for key in sorted(ours.keys() | before.keys())
            if ours.get(key) != before.get(key) and not key.startswith(NOT_COMPARED)
        ]

    @property
    def _is_named(self) -> bool:
        """Whether the user named the checkpoint to resume from."""
        return bool(self.config.get("trainer", {}).get("resume_mode") == ResumeMode.path.value)

    def changed(self, theirs: Identity) -> Iterator[tuple[str, str]]:
        """The keys whose files have other content than they had, and which files."""
        for key, sums in self.contents.items():
            before = theirs.contents.get(key)
            if before is None or [*before.values()] == [*sums.values()]:  # files may have new names
                continue
            if key == PICTURES and len(before) != len(sums):
                continue  # of another number of rows, which is refused
            files = [name for name in sorted(before.keys() | sums.keys()) if before.get(name) != sums.get(name)]
            shown = ", ".join(files[:MAX_FILES]) + (f" and {len(files) - MAX_FILES} more" if files[MAX_FILES:] else "")
            yield key, f"{shown} differ{'s' if len(files) == 1 else ''} from what the checkpoint was made with"

    def _refused_contents(self, theirs: Identity, checkpoint: Path) -> Iterator[Violation]:
        flat = _flat(self.config)
        for key, said in self.changed(theirs):
            if key in JUDGES and self._is_named:
                continue
            written = KEYS.get(key, key)
            why = "; the KL reference would be another one" if key in ("model.path", ADAPTERS) else ""
            problem = f"{f'its {key}: ' if key in KEYS else ''}{said}{why}"
            remedy = f"{ANEW}{MEANT}{checkpoint}" if key in JUDGES else ANEW
            yield Violation(written, flat.get(written) or flat.get("model.path"), problem, remedy)

    def _refused(self, theirs: Identity) -> Iterator[Violation]:
        names = self.model.keys() | theirs.model.keys()
        other = [
            f"{name} {theirs.model.get(name)} there, {self.model.get(name)} here"
            for name in sorted(names - set(UNIMPORTANT))
            if self.model.get(name) != theirs.model.get(name)
        ]
        if other:
            problem = f"is another model than the checkpoint's: {'; '.join(other)}"
            yield Violation("model.path", self.config["model"]["path"], problem, ANEW)
        yield from self._other_adapters(theirs)
        if self.data and [each[1:] for each in self.data] != [each[1:] for each in theirs.data]:  # val_only needs none
            there, here = (
                ", ".join(f"{name} of {size:,} bytes" for name, size, _ in each.data) for each in (theirs, self)
            )
            problem = f"are other data than the checkpoint's, so that its place in them means nothing: {there} there"
            problem += f", {here} here"
            yield Violation("data.train_files", self.config["data"]["train_files"], problem, ANEW)
        if self.roles != theirs.roles:
            key = "algorithm.adv_estimator"
            estimator = self.config.get("algorithm", {}).get("adv_estimator")
            problem = f"trains {' and '.join(self.roles)}; the checkpoint has {' and '.join(theirs.roles)}"
            yield Violation(key, estimator, problem, ANEW)

    def _other_adapters(self, theirs: Identity) -> Iterator[Violation]:
        """The settings without which the checkpoint's adapters are no adapters, or compute something else."""
        ours = _flat(self.config)
        before = _flat(theirs.config)
        for rank in sorted(key for key in ours if key.endswith(".lora.rank")):
            names = ["rank"]
            group = rank.removesuffix("rank")
            if (before.get(rank) or 0) == ours[rank]:
                names = ["alpha", "use_rslora"] if ours[rank] else []
            for key in (group + name for name in names):
                if before.get(key) != ours[key]:
                    yield Violation(key, ours[key], f"was {before.get(key) or 0} when the checkpoint was made", ANEW)
        if ours.get("actor.lora.rank") and bool(before.get(ADAPTERS)) != bool(ours.get(ADAPTERS)):
            problem = f"was {before.get(ADAPTERS)} when the checkpoint was made; the KL reference would be another one"
            yield Violation(ADAPTERS, ours.get(ADAPTERS), problem, ANEW)


def note_differences(identity: Identity, checkpoint: Path) -> None:
    """Shows how the settings differ from those of the run of ``checkpoint``.  Raises as ``Identity.check``."""
    if differences := identity.check(checkpoint):
        note(
            "\n  - ".join(
                [f"Resuming from {checkpoint} with other settings, so that results may differ:", *differences]
            )
        )


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``config`` by their keys, as this version writes them."""
    flat = _flat(config)
    unset = {key for end, value in WAS_UNSET.items() for key in flat if key.endswith(end) and flat[key] == value}
    return {key: None if key in unset else value for key, value in flat.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
