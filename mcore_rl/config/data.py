"""Prompts as a user writes them: which files, how many at a time, and what becomes of those that are too long."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.errors import Violation


class Truncation(Enum):
    """What becomes of a prompt of more than ``max_prompt_length`` tokens; ``left`` cuts at its beginning."""

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


@dataclass(kw_only=True)
class DataConfig:
    """Parquet files in the field's schema (docs/data.md), and how prompts are drawn from them.

    train_files, val_files: parquet files, read in this order.
    train_batch_size: prompts of a step.
    gen_batch_size: prompts drawn at a time where groups are filtered; None is train_batch_size.
    val_batch_size: prompts validated at a time; None is all.
    max_prompt_length: tokens of a prompt.
    max_response_length: tokens of all that follows the prompt, whoever wrote it; with tools, of all turns and results.
    prompt_key: column of the messages.
    filter_overlong_prompts: leave out prompts that are too long, before ``truncation`` is asked.
    truncation: what becomes of the other prompts that are too long.
    shuffle, seed: of the training prompts, anew each epoch.
    train_max_samples, val_max_samples: only so many rows, the first of a seeded shuffle; None is all.
    chat_template_kwargs: given to the tokenizer's chat template.
    """

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 1024
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    max_prompt_length: int = 512
    max_response_length: int = 512
    prompt_key: str = "prompt"
    filter_overlong_prompts: bool = False
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: int = 1
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SftDataConfig:
    """Parquet files of conversations or of prompts with their responses.

    messages_key: column of whole conversations, of which the assistant's turns are trained; None takes ``prompt_key``
    (messages, or one text) and ``response_key`` (a text).  max_length: tokens of a conversation.  truncation: as of
    prompts; ``middle`` is refused.
    """

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 256
    messages_key: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "response"
    max_length: int = 1024
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: int = 1
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def data_violations(data: DataConfig | SftDataConfig) -> list[Violation]:
    """Everything wrong in ``data`` by itself."""
    sizes = ["train_batch_size", "train_max_samples", "val_max_samples"]
    if isinstance(data, DataConfig):
        sizes += ["gen_batch_size", "val_batch_size", "max_prompt_length", "max_response_length"]
    else:
        sizes.append("max_length")
    found = []
    for name in sizes:
        value = getattr(data, name)
        if value is not None and value < 1:
            found.append(Violation(f"data.{name}", value, "must be positive", "Write 1 or more"))
    if isinstance(data, SftDataConfig) and data.truncation is Truncation.middle:
        problem = "a conversation without its middle is another one"
        found.append(Violation("data.truncation", data.truncation.value, problem, "Write right, left or error"))
    return found
