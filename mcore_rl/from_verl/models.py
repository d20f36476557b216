"""What is known of the model that a run of verl's trains, by its config.json or by its name."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.families.checkpoints import KnownCheckpoint, known_checkpoints, published_config
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.text_part import text_part_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.families.unsupported import NEAREST
from mcore_rl.from_verl.answer import ModelFacts
from mcore_rl.ground.errors import ConfigError

SEES = re.compile(
    r"(?<![a-z])(vl|vlm|vision|omni|llava|pixtral|internvl|minicpm-?[ov]|glm-?4(?:\.[156])?v)(?![a-z])", re.I
)

TOWERS = {  # of names -> the kind of their tower; "": another than those that are read
    r"qwen-?2[.-]?5-?vl": "qwen2_5_vl",
    r"qwen-?3-?vl": "qwen3_vl",
    r"qwen-?(2-?)?vl|qwen[\d.]+-omni|qwen3[.-]5|gemma-?3|kimi-k2[.-]?5|kimi-vl|mistral-small|pixtral": "",
    r"internvl|minicpm-?[ov]|glm-?4(\.[156])?v|deepseek-vl|llava|llama-3[.-]2-\d+b-vision|phi-[34][.\d]*-vision": "",
}
HUB = "models--"  # before OWNER--NAME, of a folder of the Hub's cache


def model_facts(path: str) -> ModelFacts:
    """What is known of the model at ``path``: of its config.json if it is there, else of its name."""
    known = known_checkpoints(MODEL_CONFIGS).values()
    name = name_of(path, known)
    is_seer = bool(SEES.search(name.replace("_", "-")))
    named = named_tower(name)
    sees: bool | None = is_seer or None
    tower: str | None = ""
    alike = relative(name, known)
    there = (Path(path) / CONFIG).is_file()
    try:
        if there:
            config = read_config(Path(path))
        elif alike is not None:
            config = published_config(alike, MODEL_CONFIGS)
        else:
            return ModelFacts(refused=refused(name), sees=sees, tower=named)
        part = text_part_of(config)
        model = model_of(config)[1]
    except ConfigError as error:
        return ModelFacts(refused=error.violations[0].problem, sees=sees, tower=named)
    if part is not None:
        if part.model_type in PICTURES:
            tower = part.model_type
            sees = True
    elif is_seer and not there:
        tower = named  # the relative is its language model
    else:
        sees = False
    known_as = alike.name if alike is not None and is_named(alike, name) else ""
    return ModelFacts(model.num_layers, model.moe is not None, known_as, sees=sees, tower=tower)


def name_of(path: str, known: Collection[KnownCheckpoint]) -> str:
    """The last part of ``path`` that tells what model it is, in lower case; the last part if none does.

    verl saves a model as ``RUN/global_step_100/actor/huggingface``; the Hub's cache has it below ``snapshots``.
    """
    parts = [part.lower() for part in reversed(Path(path).parts)] or [""]
    hub = next((part for part in parts if part.startswith(HUB)), None)
    if hub is not None:
        return hub.rpartition("--")[2]
    for part in parts:
        if SEES.search(part.replace("_", "-")) or named_tower(part) is not None or relative(part, known) is not None:
            return part
    return parts[0]


def named_tower(name: str) -> str | None:
    """The kind of the tower that a model of this name has, as ``TOWERS`` has it; None: the name does not tell."""
    plainly = name.replace("_", "-")
    return next((kind for pattern, kind in TOWERS.items() if re.search(pattern, plainly)), None)


def is_named(checkpoint: KnownCheckpoint, name: str) -> bool:
    """Whether ``name`` is that of ``checkpoint``."""
    return name in (checkpoint.name, checkpoint.hf_id.rpartition("/")[2].lower())


def relative(name: str, known: Collection[KnownCheckpoint]) -> KnownCheckpoint | None:
    """The checkpoint of this name, or one that has the same layers."""
    same = next((each for each in known if is_named(each, name)), None)
    return same or next((each for each in known if plain(each.name) in (plain(name), text_of(name))), None)


def text_of(name: str) -> str:
    """The name of the language model in a model of pictures: the layers are the same."""
    return plain(re.sub(r"[-_]?vl(?=-)", "", name).replace("-thinking", ""))


def plain(name: str) -> str:
    """The name of a checkpoint without what it was tuned for: its layers are those of its relatives."""
    return re.sub(r"-(?:base|instruct|chat|it)(?=-v\d|$)", "", name)


def refused(name: str) -> str:
    """Why a model of this name is not trained; "" if nothing in the name says so."""
    parts = _parts(name)
    begun = {
        each: length
        for each in {*NEAREST, *(near for near, _ in NEAREST.values())}
        if parts[: (length := len(_parts(re.sub(r"For\w+$", "", each))))] == _parts(re.sub(r"For\w+$", "", each))
    }
    best = max(begun, key=lambda each: (begun[each], each not in NEAREST), default="")
    if best not in NEAREST:
        return ""
    nearest, differs = NEAREST[best]
    return f"{best} is not trained here: the nearest is {nearest}, and it differs by {differs}"


def _parts(name: str) -> list[str]:
    """``Qwen3.5-27B`` and ``Qwen3_5`` as qwen, 3, 5 (, 27b): letters that follow one another are one part."""
    parts = re.findall(r"\d+[bm](?![a-z])|\d+|[a-z]+", name.lower())
    joined = list[str]()
    for part in parts:
        if joined and part.isalpha() and joined[-1].isalpha():
            joined[-1] += part
        else:
            joined.append(part)
    return joined
