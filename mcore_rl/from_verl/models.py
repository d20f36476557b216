"""What is known of the model that a run of verl's trains, by its config.json or by its name."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.families.checkpoints import known_checkpoints, published_config
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.unsupported import NEAREST
from mcore_rl.from_verl.answer import ModelFacts
from mcore_rl.from_verl.written import Verl

COLUMNS = ("data.image_key", "data.video_key", "data.audio_key")
SEES = re.compile(r"(?<![a-z])(vl|vlm|vision|omni|llava|pixtral|internvl|minicpm-?[ov]|glm-?4\.[15]v)(?![a-z])", re.I)


def refuse_images(verl: Verl) -> None:
    """Raises ConfigError if a run trains on images, videos or sounds."""
    key = next((each for each in COLUMNS if verl.written.get(each)), "")
    value = verl.written.get(key, verl.model_path)
    if not key and not SEES.search(Path(verl.model_path).name.replace("_", "-")):
        return
    problem = "asks for images, videos or sounds, which are not translated: of this script there is no recipe"
    remedy = "Write a run with pictures by hand (docs/vision.md), or leave that column out and name a model of text"
    raise ConfigError([Violation(key or "model.path", value, problem, remedy)])


def model_facts(path: str) -> ModelFacts:
    """What is known of the model at ``path``: of its config.json if it is there, else of its name."""
    known = known_checkpoints(MODEL_CONFIGS).values()
    name = Path(path).name.lower()
    checkpoint = next((each for each in known if name in (each.name, each.hf_id.rpartition("/")[2].lower())), None)
    alike = checkpoint or next((each for each in known if plain(each.name) == plain(name)), None)
    try:
        if (Path(path) / CONFIG).is_file():
            config = read_config(Path(path))
        elif alike is not None:
            config = published_config(alike, MODEL_CONFIGS)
        else:
            return ModelFacts(refused=refused(name))
        model = model_of(config)[1]
    except ConfigError as error:
        return ModelFacts(refused=error.violations[0].problem)
    return ModelFacts(model.num_layers, model.moe is not None, checkpoint.name if checkpoint else "")


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
