"""Reads the user's yaml files: every value as the text that is written there, and within limits.

yaml takes ``8:00:00`` for 28800, ``0123`` for 83, ``on`` for true and ``1e3`` for 1000.0.  Here such a value stays
text, and the declared type of its key says what it means.  Where no type is declared, in ``FREE`` groups, yaml decides.
The limits: an alias may otherwise stand for more than any memory holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from mcore_rl.config.files import input_problem
from mcore_rl.ground.errors import ConfigError, Violation

MAX_BYTES = 128 << 10  # the parser takes seconds for more
MAX_VALUES = 100_000  # with every alias written out
MAX_DEPTH = 32
FREE = (
    "chat_template_kwargs",
    "checkpoints",
    "config_overrides",
    "engine",
    "loops",
    "megatron",
    "reward_kwargs",
)  # groups, by last name, whose keys no dataclass knows
TEXT = "tag:yaml.org,2002:str"
READ_BY_YAML = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp"))
OmegaConfLoader: Any = get_yaml_loader()


class TextLoader(OmegaConfLoader):  # type: ignore[misc]  # omegaconf makes the class in a function
    """A yaml loader whose numbers, booleans and dates are the texts that were written, but in ``FREE`` groups."""

    def construct_document(self, node: yaml.Node) -> Any:
        """The value of a document."""
        _keep_text(node, set())
        return super().construct_document(node)


class TextSource(ConfigSource):
    """Reads yaml files for hydra as ``read_yaml`` does.  It stands for ``text://DIRECTORY`` of hydra's search path."""

    @staticmethod
    def scheme() -> str:
        """How an entry of hydra's search path begins that this class reads."""
        return "text"

    def load_config(self, config_path: str) -> ConfigResult:
        """The values of a file, by its path from DIRECTORY, and the package that its first comments may name."""
        path = self._file(config_path)
        values = OmegaConf.create(read_yaml(path))
        header = self._get_header_dict(read_limited(path, MAX_BYTES))
        return ConfigResult(provider=self.provider, path=f"text://{self.path}", config=values, header=header)

    def available(self) -> bool:
        """Whether DIRECTORY exists."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Whether it is a folder."""
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether it is a yaml file, by its name without ``.yaml``."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names of the folders and yaml files in a folder, without ``.yaml``."""
        names = list[str]()
        for each in (Path(self.path) / config_path).iterdir():
            self._list_add_result(names, str(Path(config_path) / each.name), each.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


class UsersFirst(SearchPathPlugin):
    """Makes hydra look into the user's directory before ours.  ``directory``: that one, while ``searched`` is open."""

    directory: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """What hydra calls when it begins."""
        if self.directory is not None:
            search_path.prepend("user", f"{TextSource.scheme()}://{self.directory.resolve()}", anchor="main")


@contextmanager
def searched(directory: Path | None) -> Iterator[None]:
    """Lets hydra find the yaml files of ``directory``, as ``TextSource`` reads them, before its own."""
    for plugin in (TextSource, UsersFirst):
        Plugins.instance().register(plugin)
    UsersFirst.directory = directory
    try:
        yield
    finally:
        UsersFirst.directory = None


def parse_yaml(text: str) -> Any:
    """The value that a yaml text stands for.  Raises yaml.YAMLError, and ValueError beyond the limits."""
    _demand_small(text)
    return yaml.load(text, TextLoader)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a yaml file; {} if it is empty.

    Raises ConfigError if it cannot be read, is no yaml, exceeds the limits above, or holds no keys.
    """
    text = read_limited(path, MAX_BYTES)
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = ", ".join(line.strip() for line in str(error).splitlines())
        raise ConfigError([Violation(str(path), "", problem, "Mend the file")]) from error
    if values is None:
        return {}
    if isinstance(values, dict):
        return {str(key): value for key, value in values.items()}
    raise ConfigError([Violation(str(path), "", "holds no keys", "Write `key: value` lines")])


def read_limited(path: Path, max_bytes: int) -> str:
    """The text of a regular file of at most ``max_bytes``.  Raises ConfigError if it is none."""
    try:
        problem = input_problem(path)
        if problem is None and (size := path.stat().st_size) > max_bytes:
            problem = f"has {size:,} bytes, and at most {max_bytes:,} are read", "Write a smaller file"
        text = "" if problem else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}", "Mend the file"
    if problem:
        raise ConfigError([Violation(str(path), "", *problem)])
    return text


@dataclass(frozen=True)
class YamlFile:
    """A yaml file of the user's that a configuration is composed of.

    values: its keys and values, without ``defaults``.
    chooses: whether its defaults choose an algorithm, themselves or by beginning with the package's train.yaml.
    """

    path: Path
    values: dict[str, Any]
    chooses: bool


def read_defaults(directory: Path | None, name: str, chosen: Iterable[str] = ()) -> list[YamlFile]:
    """Reads what hydra is about to: ``directory``/``name``.yaml and the files that its defaults name there.

    chosen: further files of the directory, such as ``group/name`` of an override.
    Returns ``name``.yaml and those that stand in defaults by name alone; a file of a group may say by itself where its
    keys belong.  Raises ConfigError, as ``read_yaml``.
    """
    files = list[YamlFile]()
    if directory is None:
        return files
    seen = set[str]()
    waiting = [(name, True), *((each, False) for each in chosen)]
    while waiting:
        name, plain = waiting.pop()
        path = directory / f"{name}.yaml"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        values = read_yaml(path)
        defaults = values.pop("defaults", None)
        chooses = False
        for entry in defaults if isinstance(defaults, list) else ():
            if isinstance(entry, dict):
                groups = [(str(key).split()[-1] if str(key).split() else "", each) for key, each in entry.items()]
                chooses |= any(group == "algorithm" for group, _ in groups)
                waiting += [(f"{group}/{each}", False) for group, each in groups]
            else:
                chooses |= entry == "train" and not (directory / "train.yaml").exists()
                waiting.append((str(entry), plain))
        if plain:
            files.append(YamlFile(path, values, chooses))
    return files


def _keep_text(node: yaml.Node, seen: set[int]) -> None:
    """Makes texts of what yaml would read in another way, in ``node`` and below.  seen: ids of nodes that are done."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode) and node.tag in READ_BY_YAML:
        node.tag = TEXT
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _keep_text(each, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _keep_text(key, seen)
            if key.value not in FREE:
                _keep_text(value, seen)


def _demand_small(text: str) -> None:
    """Raises ValueError if ``text`` nests too deep, or has too many values once every alias is written out."""
    counts = [0]
    anchors = dict[str, int]()
    names = list[str | None]()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise ValueError(f"*{event.anchor} is an alias of what it stands in")
            counts[-1] += anchors.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            anchors |= {event.anchor: 1} if event.anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            names.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            count = counts.pop()
            name = names.pop()
            counts[-1] += count
            anchors |= {name: count} if name else {}
        if len(counts) > MAX_DEPTH:
            raise ValueError(f"nests deeper than {MAX_DEPTH}")
        if counts[-1] > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES:,} values, with every alias written out")
