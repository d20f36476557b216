"""Which program of verl's a command starts, and the configuration of that run.

It is what was written, over the defaults of a version, as verl's hydra composes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_rl.config.names import leaf_values
from mcore_rl.from_verl.facts import FSDP, MEGATRON, PROGRAM, VERL_GROUPS, VerlGroups, defaults, newest_with
from mcore_rl.from_verl.shell import OUTPUT
from mcore_rl.from_verl.table import config_of

SYNC = "sync"
ASYNC = "async"
ONE_STEP_OFF = "one_step_off"
PROGRAMS = {  # the last name of verl's module -> our program
    "main_ppo": "train",
    "main_ppo_v0": "train",
    "main_ppo_sync": "train",
    "main_dapo": "train",
    "main_spin": "train",
    "fully_async_main": "train",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fsdp_sft_trainer": "sft",
    "main_generation": "generate",
    "main_generation_server": "generate",
    "main_eval": "evaluate",
}
ELSEWHERE = {  # what is no run: verl's module -> what to do
    "model_merger": "mcore-rl convert writes Hugging Face checkpoints of our runs; verl's own are merged with verl",
    "main_prime": "write algorithm=prime (docs/algorithms.md), with the keys of the script",
    "main_sppo": "write algorithm=sppo (docs/algorithms.md), with the keys of the script",
}
MODULE = re.compile(r"(?:verl|recipe)(?:\.\w+)+")
FILE = re.compile(r"(?:.*/)?((?:fully_async_)?main(?:_\w+)?|\w*sft_trainer\w*)\.py")
MAX_BYTES = 1 << 20  # of a file of verl's
MODEL_PATHS = ("actor_rollout_ref.model.path", "model.path", "model.partial_pretrain")  # of the model that is trained
# main_generation_server has the keys of a trainer, and its defaults -> those of main_generation.
SERVER = {
    "data.train_files": "data.path",
    "actor_rollout_ref.rollout.n": "data.n_samples",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.model.": "model.",
}
SERVER_DEFAULTS = {
    "data.n_samples": 1,
    "rollout.temperature": 1.0,
    "rollout.top_k": -1,
    "rollout.top_p": 1,
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.tensor_model_parallel_size": 2,
}
# Of the configurations of verl's other trainers, over those of main_ppo.
MODE_DEFAULTS: dict[str, dict[str, Any]] = {
    SYNC: {},
    ONE_STEP_OFF: {"algorithm.rollout_correction.bypass_mode": True, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8},
    ASYNC: {
        "algorithm.rollout_correction.bypass_mode": True,
        "async_training.staleness_threshold": 0.1,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 8,
        "rollout.total_rollout_steps": 100,
    },
}


@dataclass(frozen=True)
class Launch:
    """A program of verl's that is started.

    module: its name; "": words alone.  words: its arguments.  nodes, devices: of torchrun's, which decides them.
    """

    module: str
    words: list[str] = field(default_factory=list)
    nodes: str = ""
    devices: str = ""

    @property
    def program(self) -> str:
        """Ours that stands for it; "" if none does."""
        return PROGRAMS.get(self.module.rpartition(".")[2], "") if self.module else "train"

    @property
    def mode(self) -> str:
        """Whether sampling and training take turns."""
        if "fully_async" in self.module:
            return ASYNC
        return ONE_STEP_OFF if "one_step_off" in self.module else SYNC

    @property
    def remedy(self) -> str:
        """What to do where no program of ours stands for it."""
        known = next((each for name, each in ELSEWHERE.items() if name in self.module.split(".")), "")
        return known or f"Read are {', '.join(PROGRAMS)}"


def launch_of(words: Sequence[str]) -> Launch | None:
    """The program of verl's that a command starts, whatever starts it: ray, torchrun, srun, a container; or None."""
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        file = FILE.fullmatch(word)
        if (before == "-m" and MODULE.fullmatch(word)) or (file and file[1] != "main"):
            folders = word.removesuffix(".py").replace("/", ".") if file else word
            given = [each for each in words[place + 1 :] if each != "&"]
            return Launch(folders, given, _option(words[:place], "nnodes"), _option(words[:place], "nproc_per_node"))
    return None


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option of torchrun's; "" if it is none or no number."""
    names = (f"--{name}", f"--{name.replace('_', '-')}")
    for place, word in enumerate(words):
        option, given, value = word.partition("=")
        if option in names:
            value = value if given else next(iter(words[place + 1 : place + 2]), "")
            return value if value.isdigit() else ""
    return ""


@dataclass
class Verl:
    """program: ours that stands for it.  config, version: verl's configuration and version whose defaults hold.

    written: dotted key -> value.  unread: (text, why) of what could not be read.  mode: whether sampling and training
    take turns.  others: defaults that are not the configuration's.  defaulted: keys that a file
    has, with verl's default.
    """

    program: str
    config: str
    version: str
    written: dict[str, Any]
    unread: list[tuple[str, str]] = field(default_factory=list)
    mode: str = SYNC
    others: Mapping[str, Any] = field(default_factory=dict)
    defaulted: frozenset[str] = frozenset()

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron trains in verl, too."""
        engine = "megatron" in (self.written.get("engine"), self.written.get("optim"))
        return self.config == MEGATRON or (self.program == "sft" and engine)

    @property
    def places(self) -> Mapping[str, VerlGroups]:
        """Where verl has the settings of the roles that are trained, by our names of them."""
        return VERL_GROUPS.get(self.program, {})

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """verl's own value of each key that it has."""
        return {**defaults(self.config, self.version), **MODE_DEFAULTS[self.mode], **self.others}

    @property
    def model_path(self) -> str:
        """The model that is trained; "": none was written."""
        return next((str(path) for key in MODEL_PATHS if (path := self.written.get(key))), "")

    @property
    def keys(self) -> set[str]:
        """The keys that it has: those of the version, and those that were written."""
        return {*self.defaults, *self.written}

    @cached_property
    def _tree(self) -> Any:
        from omegaconf import OmegaConf  # a tenth of a second; --help needs none

        tree: dict[str, Any] = {}
        for key, value in {**self.defaults, **self.written}.items():
            *groups, name = key.split(".")
            place = tree
            for group in groups:
                if not isinstance(place.get(group), dict):
                    place[group] = {}
                place = place[group]
            if not isinstance(place.get(name), dict):  # ``engine=megatron`` chooses, and is no value
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


def of_launch(launch: Launch, version: str = "") -> Verl:
    """What a program of verl's composes of its command line.

    version: of verl; "": the newest that has the keys.
    """
    written = dict[str, Any]()
    unread = list[tuple[str, str]]()
    config = ""
    waiting = list(launch.words)
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
        elif OUTPUT.search(word):
            unread.append((word, "only a run of that program would tell: write its value"))
        elif not text:
            unread.append((word, "has no value: a variable of the script is not set"))
        else:
            read = None if key.startswith("~") else value_of(word, text)
            written |= dict(leaf_values({key.lstrip("+~"): read}))
    program = launch.program
    if program == "sft":
        torchrun = {"trainer.nnodes": launch.nodes, "trainer.n_gpus_per_node": launch.devices}
        written = {key: int(value) for key, value in torchrun.items() if value} | written
    others: Mapping[str, Any] = {}
    if launch.module.endswith("main_generation_server"):
        written = {_of_server(key): value for key, value in written.items()}
        others = SERVER_DEFAULTS
    if PROGRAM.get(config) != program:
        asked = f"{config} {written.get('model_engine')}"
        config = config_of(program, set(written))
        if "megatron" in asked and program == "train":
            config = MEGATRON
        elif config == MEGATRON and not _names_megatron(written):
            config = FSDP  # verl's own default
    return Verl(program, config, version or newest_with(config, written), written, unread, launch.mode, others)


def _of_server(key: str) -> str:
    for theirs, ours in SERVER.items():
        if key == theirs or (theirs.endswith(".") and key.startswith(theirs)):
            return key.replace(theirs, ours, 1)
    return key


def of_tree(values: Mapping[str, Any], version: str = "") -> Verl:
    """What a yaml file of verl's configuration says; keys that have verl's default count as not written."""
    tree = {str(key): value for key, value in values.items() if key not in ("defaults", "hydra")}
    leaves = dict(leaf_values(tree))
    program = "train"
    if "data.output_path" in leaves:
        program = "generate"
    elif "data.reward_model_key" in leaves:
        program = "evaluate"
    elif "model.path" in leaves or "model.partial_pretrain" in leaves:
        program = "sft"
    mode = ASYNC if "async_training" in tree else ONE_STEP_OFF if "rollout" in tree and program == "train" else SYNC
    config = config_of(program, set(leaves))
    version = version or newest_with(config, leaves)
    there = {**defaults(config, version), **MODE_DEFAULTS[mode]}
    written = {key: value for key, value in leaves.items() if key not in there or there[key] != value}
    written = {key: value for key, value in written.items() if not key.endswith("_target_")}
    return Verl(program, config, version, written, mode=mode, defaulted=frozenset(leaves.keys() - written.keys()))


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
    if isinstance(value, str) and value.startswith("["):  # a list in quotes that a script did not mean for hydra
        return value_of(f"key={value}", value)
    return value


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
