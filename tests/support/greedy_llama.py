"""A random llama whose greedy answers transformers knows, in ASCII, since bytes that are no text have many forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import prompt_files
from tests.support.rollouts import SIZES

TOKENIZER = prompt_files.tokenizer()


def write_llama(directory: Path) -> Path:
    """Writes it with its tokenizer."""
    torch.manual_seed(0)
    size = dict(SIZES) | dict(vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    llama = LlamaForCausalLM(LlamaConfig(**size))  # type: ignore[arg-type]
    with torch.no_grad():
        for token in range(len(TOKENIZER)):
            text = TOKENIZER.decode([token], skip_special_tokens=True)
            if not (text.isascii() and text.isprintable()):
                llama.lm_head.weight[token] = 0
    llama.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def asked_tokens(question: str) -> list[int]:
    """The tokens of a user's message, by transformers."""
    text = TOKENIZER.apply_chat_template(prompt_files.user(question), tokenize=False, add_generation_prompt=True)
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


def greedy(model: Path, tokens: Sequence[int], length: int) -> list[int]:
    """What transformers answers with at most ``length`` tokens."""
    llama = LlamaForCausalLM.from_pretrained(model)
    continued = llama.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=length, pad_token_id=TOKENIZER.pad_token_id
    )
    return [int(token) for token in continued[0, len(tokens) :]]
