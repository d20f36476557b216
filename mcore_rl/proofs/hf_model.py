"""The tensors of a Hugging Face checkpoint by transformers' own model class, on the meta device: names and shapes.

No table of ours takes part, so a tensor that no rule speaks of is noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

HfShapes = dict[str, tuple[int, ...]]


def hf_shapes(config: Mapping[str, Any], model_type: str) -> HfShapes:
    """Names and shapes that ``save_pretrained`` would write for a ``config.json``, in the model's order.

    Experts are named one by one or stacked, as the class saves them; a tied output projection is left out, and weights
    are never quantised.  model_type: transformers' name of the configuration class, that of the family.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText  # seconds
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    said = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of token ids beyond a reduced vocabulary
    values = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        made = CONFIG_MAPPING[model_type](**copy.deepcopy(values))  # it fills in what it is given
        auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        model = auto.from_config(made)  # type: ignore[no-untyped-call]
    logging.set_verbosity(said)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if "vision_config" in config:
        return _of_whole({name: tuple(tensor.shape) for name, tensor in state.items()})
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def _of_whole(modules: HfShapes) -> HfShapes:
    """The tensors of a model with a vision tower, by the names that its text part has alone and experts one by one.

    Files of Qwen3-VL-MoE have an expert's matrices stacked, either way round, or one by one; its module takes the first
    half of the rows of ``gate_up_proj`` for the gate.
    """
    shapes: HfShapes = {}
    for name, shape in modules.items():
        tables = name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)
        folder, _, last = tables.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None:
            shapes[tables] = shape
            continue
        experts, rows, columns = shape
        for number in range(experts):
            shapes |= {f"{folder}.{number}.{part}.weight": (rows // len(parts), columns) for part in parts}
    return shapes
