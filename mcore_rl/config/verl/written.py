"""verl's configuration of a run: what was written, over the defaults of a version, as verl's hydra composes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_rl.config.verl.facts import FSDP, MEGATRON, defaults, newest_with
from mcore_rl.config.verl.shell import UNKNOWN
from mcore_rl.config.verl.table import PROGRAM, config_of

MAX_BYTES = 1 << 20  # of a file of verl's
MODULES = {"main_generation": "generate", "main_generation_server": "generate", "main_eval": "evaluate"}


@dataclass
class Verl:
    """program: ours that stands for it.  config, version: verl's configuration and version whose defaults hold.

    written: dotted key -> value.  unread: (text, why) of what could not be read.
    """

    program: str
    config: str
    version: str
    written: dict[str, Any]
    unread: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron trains in verl, too."""
        return self.config == MEGATRON

    @property
    def keys(self) -> set[str]:
        """The keys that it has: those of the version, and those that were written."""
        return {*defaults(self.config, self.version), *self.written}

    @cached_property
    def _tree(self) -> Any:
        from omegaconf import OmegaConf  # a tenth of a second; --help needs none

        tree: dict[str, Any] = {}
        for key, value in {**defaults(self.config, self.version), **self.written}.items():
            *groups, name = key.split(".")
            place = tree
            for group in groups:
                if not isinstance(place.get(group), dict):
                    place[group] = {}
                place = place[group]
            if not (value == {} and isinstance(place.get(name), dict)):
                place[name] = value
        return OmegaConf.create(tree)

    def __getitem__(self, key: str) -> Any:
        """The value of a key, with interpolations resolved; None if it has none."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(self._tree, key)
        except OmegaConfBaseException:  # of an interpolation of a key that is not there
            return None
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def has(self, *keys: str) -> bool:
        """Whether one of ``keys`` was written."""
        return not self.written.keys().isdisjoint(keys)


def of_overrides(module: str, words: Sequence[str], version: str = "") -> Verl:
    """What verl's ``module`` composes of the arguments of its command line.

    version: of verl; "": the newest that has the keys.
    """
    written, unread, config = dict[str, Any](), list[tuple[str, str]](), ""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("--"):
            name, given, value = word.partition("=")
            value = value if given else waiting.pop(0) if waiting else ""
            config = value.removesuffix(".yaml") if name == "--config-name" else config
            continue
        key, equals, text = word.partition("=")
        if not equals:
            if word.strip(" \\") and not word.startswith("-"):
                unread.append((word, "is no override"))
        elif UNKNOWN in word:
            unread.append((word.replace(UNKNOWN, "..."), "only a run of the script would tell: write its value"))
        elif not text:
            unread.append((word, "has no value: a variable of the script is not set"))
        else:
            written |= dict(_leaves(key.lstrip("+~"), None if key.startswith("~") else value_of(word, text)))
    program = MODULES.get(
        module.rpartition(".")[2] if not module.endswith(".py") else module.rpartition("/")[2][:-3], "train"
    )
    if config not in PROGRAM:
        config = (
            MEGATRON if str(written.get("model_engine")).startswith("megatron") else config_of(program, set(written))
        )
        if program == "train" and config == MEGATRON and not _names_megatron(written):
            config = FSDP  # verl's own default
    return Verl(program, config, version or newest_with(config, written), written, unread)


def of_tree(values: Mapping[str, Any], version: str = "") -> Verl:
    """What a yaml file of verl's configuration says; keys that have verl's default count as not written."""
    tree = {str(key): value for key, value in values.items() if key not in ("defaults", "hydra")}
    leaves = dict(each for key, value in tree.items() for each in _leaves(key, value))
    program = (
        "generate" if "data.output_path" in leaves else "evaluate" if "data.reward_model_key" in leaves else "train"
    )
    config = config_of(program, set(leaves))
    version = version or newest_with(config, leaves)
    there = defaults(config, version)
    written = {key: value for key, value in leaves.items() if key not in there or there[key] != value}
    return Verl(
        program, config, version, {key: value for key, value in written.items() if not key.endswith("_target_")}
    )


def _names_megatron(written: Mapping[str, Any]) -> bool:
    return any(
        ".megatron." in key or (key.endswith(".strategy") and value == "megatron") for key, value in written.items()
    )


def value_of(word: str, text: str) -> Any:
    """What hydra, which verl reads its command line with, takes an override for."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return text
    return str(value) if type(value).__name__ == "QuotedString" else value


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}", each)
    else:
        yield key, value


def read_tree(path: Path) -> dict[str, Any]:
    """The values of a yaml file, as verl reads them: 30 is a number, and true a truth.

    Raises ValueError with what is wrong with it, and as ``read_limited`` does.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from mcore_rl.config.yaml_files import parse_yaml, read_limited

    text = read_limited(path, MAX_BYTES)
    try:
        parse_yaml(text)  # for its limits
        values = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"is no yaml: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or not values:
        raise ValueError("holds no keys")
    return {str(key): value for key, value in values.items()}
