"""Tiny models that vLLM runs on a CPU too, saved by transformers, and prompts for them: there is no tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from tests.support.published import TINY, class_config

FIRST_WORD = 3  # below it stand the tokens that begin and end


def save(
    model_type: str, directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> None:
    """Random weights of ``tiny-<model_type>``, large enough that a mistake shows; norms and biases too.

    changes: of its configuration.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(class_config(TINY[model_type] | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("gate.weight", "router.weight")):
                parameter.mul_(5.0)  # routers that mean it
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:  # zeros, of which a norm's gradient is 1,000 times another's
            torch.nn.init.normal_(embedding.weight[embedding.padding_idx], std=model.config.initializer_range)
    model.to(dtype).save_pretrained(directory)


def save_prompts(path: Path, count: int = 6, longest: int = 24, seed: int = 0) -> None:
    """A parquet file of token ids of the tiny models."""
    draw, vocab_size = random.Random(seed), TINY["llama"]["vocab_size"]
    rows = [[draw.randrange(FIRST_WORD, vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    pq.write_table(pa.table({"prompt_token_ids": rows}), path)
