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
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # seconds
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    said = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of token ids beyond a reduced vocabulary
    values = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        made = CONFIG_MAPPING[model_type](**copy.deepcopy(values))  # it fills in what it is given
        model = AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
    logging.set_verbosity(said)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
