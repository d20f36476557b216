"""The files of a Hugging Face checkpoint beside its weights: configuration, generation settings, tokenizer, code.

They are copied unchanged, except for ``config.json``, which must describe the weights that are written: their dtype,
no quantisation, their head, and no layers of multi-token prediction, which are neither trained nor written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.role import Head
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.decoder import PREDICTION_LAYERS
from mcore_rl.families.text_part import text_config, with_text
from mcore_rl.ground.errors import CheckpointError

PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken", "*.bpe", "additional_chat_templates/*.jinja")
INDEX_SUFFIX = ".index.json"  # of weights, under whatever name
# What says that a directory holds adapters: beside whole weights, transformers would load another base than these.
OF_ADAPTERS = "adapter_config.json"


def copy_sidecar_files(
    source: Path, target: Path, dtype: torch.dtype, *, head: Head = Head.lm, pictures: bool = False
) -> None:
    """Copy the files of the checkpoint in ``source`` that are not weights into ``target``.

    dtype: of the weights in ``target``.  head: what the model ends in; transformers calls a value head a classifier
    with one label.  pictures: whether the weights have the vision tower.

    CheckpointError: ``source`` has no config.json, or one that is not JSON; a file cannot be copied.
    """
    config = read_config(source)
    try:
        for path in sorted({path for pattern in PATTERNS for path in source.glob(pattern)}):
            if path.is_file() and path.name not in (CONFIG, OF_ADAPTERS) and not path.name.endswith(INDEX_SUFFIX):
                place = target / path.relative_to(source)
                if place.parent != target:
                    place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)
        text = json.dumps(_config_of_weights(config, dtype, head, pictures), indent=2, ensure_ascii=False)
        (target / CONFIG).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        problem = f"{error.filename}: cannot be copied: {error.strerror}. Mend that and try again"
        raise CheckpointError(str(source), [problem]) from error


def _config_of_weights(config: dict[str, Any], dtype: torch.dtype, head: Head, pictures: bool) -> dict[str, Any]:
    """``config`` corrected to describe the written weights: dtype, quantisation, prediction layers, head."""
    if head is Head.value and not pictures:  # transformers has none for most multimodal models
        config = text_config(config)
    # transformers 5 writes dtype; before 4.56 it read torch_dtype alone, and reads either since.
    written = str(dtype).removeprefix("torch.")
    spellings = {"dtype", "torch_dtype"}
    text = text_config(config)
    of_text = dict.fromkeys(text.keys() & set(PREDICTION_LAYERS), 0) | dict.fromkeys(text.keys() & spellings, written)
    changed = with_text(config, of_text, removed=("quantization_config",))
    changed |= dict.fromkeys(spellings & config.keys() or {"torch_dtype"}, written)
    if head is Head.value:
        named = config.get("architectures") or []
        changed["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification") for name in named]
        changed["num_labels"] = 1
    return changed
