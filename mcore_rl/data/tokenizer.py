"""Loads the tokenizer of a checkpoint and checks, before anything starts, that it has what training needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")  # any of them makes a tokenizer
TITLE = "tokenizer"


def load_tokenizer(path: str | Path, *, trained: bool = True) -> PreTrainedTokenizerBase:
    """transformers' fast tokenizer of a Hugging Face directory.

    trained: its model is trained; a model that only scores needs no eos and no pad token.

    Raises DataError with every violation: no such directory, no tokenizer in it, files that cannot be read, no fast
    tokenizer, no chat template, no eos token, no pad token.  Each names the file and the remedy.
    """
    directory = Path(path).expanduser()
    title = f"{TITLE} {directory}"
    if not directory.is_dir():
        raise DataError(title, ["is no directory. Name one of a Hugging Face checkpoint (model.tokenizer_path)"])
    if not any((directory / name).exists() for name in FILES):
        problem = f"has no tokenizer: none of {', '.join(FILES)}"
        raise DataError(title, [f"{problem}. Copy them from the model, or name their directory as tokenizer_path"])
    from transformers import AutoTokenizer  # seconds; the checks above need none of it

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # the tokenizers library raises plain Exceptions for broken files
        problem = f"the files cannot be read: {type(error).__name__}: {error}"
        raise DataError(title, [f"{problem}. Copy the tokenizer's files from the model again"]) from error
    problems = _problems(tokenizer, trained)
    if problems:
        raise DataError(title, problems)
    return tokenizer


def _problems(tokenizer: PreTrainedTokenizerBase, trained: bool) -> list[str]:
    """The problems of ``tokenizer`` for training, or for scoring."""
    problems = []
    if not tokenizer.is_fast:
        remedy = "Save it as tokenizer.json with transformers (AutoTokenizer...save_pretrained)"
        problems.append(f"{type(tokenizer).__name__} is no fast tokenizer: it cannot say where tokens stand. {remedy}")
    if not tokenizer.chat_template:
        remedy = "Put the chat template of the model's instruct version there (chat_template.jinja)"
        problems.append(f"chat_template.jinja: there is none, and none in tokenizer_config.json. {remedy}")
    for name, example in (("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")):
        if trained and tokenizer.special_tokens_map.get(name) is None:
            remedy = f'Write "{name}": "{example}", or another token of its vocabulary, into it'
            problems.append(f"tokenizer_config.json: no {name}. {remedy}")
    return problems
