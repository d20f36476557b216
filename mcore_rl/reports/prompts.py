"""Reads the prompts of a log-probability report: a parquet file in the usual schema, and the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.rows import without_nulls
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.rollout.protocol import Prompt
from mcore_rl.rollout.vllm.engine.environment import has_tokenizer

TOKENS = "prompt_token_ids"
MESSAGES = "prompt"
KEY = "data"  # the user's option


def load_tokenizer(directory: Path) -> Any | None:
    """transformers' tokenizer of a Hugging Face ``directory``; None if it has none.

    ConfigError: its files cannot be read.
    """
    if not has_tokenizer(directory):
        return None
    from transformers import AutoTokenizer  # seconds, and only for text

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"the tokenizer cannot be read: {error}"
        raise ConfigError([Violation("hf", str(directory), problem, "Copy its files from the model again")]) from error


def read_prompts(data: Path, tokenizer: Any | None, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a parquet file, as tokens; a prompt's id is its row.

    Reads column ``prompt_token_ids`` if there is one, else ``prompt``: a list of {role, content}, which goes through
    the tokenizer's chat template (without one: the contents, line by line), or a string, encoded directly.

    ConfigError: no such file, not parquet, neither column, no rows, text without a tokenizer, a prompt of another kind.
    """
    try:
        present = pq.read_schema(data).names
        column = next((name for name in (TOKENS, MESSAGES) if name in present), None)
        if column is None:
            problem = f"has the columns {', '.join(present)} and none of prompts"
            raise _wrong(data, problem, f"Write a column {MESSAGES} of messages, or {TOKENS}")
        rows = pq.read_table(data, columns=[column])[column].slice(0, count).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise _wrong(data, f"cannot be read: {error}", "Name a parquet file with a column prompt") from error
    if not rows:
        raise _wrong(data, "has no rows", "Name a parquet file with prompts")
    if column == MESSAGES and tokenizer is None:
        problem = "has prompts as text, and the model's directory has no tokenizer"
        raise _wrong(data, problem, f"Copy the tokenizer's files there, or write a column {TOKENS}")
    return [Prompt(id=str(row), tokens=_tokens(value, row, data, tokenizer)) for row, value in enumerate(rows)]


def _tokens(value: Any, row: int, data: Path, tokenizer: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(tokenizer.encode(value))
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return tuple(value)
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        if tokenizer.chat_template is None:
            return tuple(tokenizer.encode("\n".join(str(each["content"]) for each in value)))
        messages = [without_nulls(each) for each in value]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    problem = f"row {row} is neither messages, text nor token ids: {str(value)[:80]}"
    raise _wrong(data, problem, "Write a list of {role, content}, a string, or token ids")


def _wrong(data: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(KEY, str(data), problem, remedy)])
