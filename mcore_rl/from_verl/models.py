"""What is known of the model that a run of verl's trains, by its config.json or by its name."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.errors import ConfigError
from mcore_rl.families.checkpoints import known_checkpoints, published_config
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.text_part import text_part_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.families.unsupported import NEAREST
from mcore_rl.from_verl.answer import ModelFacts

SEES = re.compile(r"(?<![a-z])(vl|vlm|vision|omni|llava|pixtral|internvl|minicpm-?[ov]|glm-?4\.[15]v)(?![a-z])", re.I)

TOWERS = {  # of names -> the kind of their tower; "": none that is read
    r"qwen2[._]5[-_]?vl": "qwen2_5_vl",
    r"qwen3[-_]?vl": "qwen3_vl",
    r"qwen3[._]5|gemma-?3|kimi-k2|mistral-small": "",
}


def model_facts(path: str) -> ModelFacts:
    """What is known of the model at ``path``: of its config.json if it is there, else of its name."""
    known = known_checkpoints(MODEL_CONFIGS).values()
    name = Path(path).name.lower()
    sees = bool(SEES.search(name.replace("_", "-")))
    named = next((kind for pattern, kind in TOWERS.items() if re.search(pattern, name)), "" if sees else None)
    checkpoint = next((each for each in known if name in (each.name, each.hf_id.rpartition("/")[2].lower())), None)
    alike = checkpoint or next((each for each in known if plain(each.name) in (plain(name), text_of(name))), None)
    try:
        if (Path(path) / CONFIG).is_file():
            config = read_config(Path(path))
        elif alike is not None:
            config = published_config(alike, MODEL_CONFIGS)
        else:
            return ModelFacts(refused=refused(name), sees=sees, tower=named)
        part = text_part_of(config)
        tower = part.model_type if part is not None and part.model_type in PICTURES else ""
        if part is None and alike is not checkpoint and named:
            tower = named  # the relative is its language model
        model = model_of(config)[1]
    except ConfigError as error:
        return ModelFacts(refused=error.violations[0].problem, sees=sees, tower=named)
    known_as = checkpoint.name if checkpoint else ""
    return ModelFacts(model.num_layers, model.moe is not None, known_as, sees=sees or bool(tower), tower=tower)


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
