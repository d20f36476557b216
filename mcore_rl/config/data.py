"""The configuration group ``data``: which files, how many prompts at a time, and how overlong prompts are treated."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.config.bounds import PositiveInt, Seed, TrainData, ValidationData, check
from mcore_rl.errors import Violation


class Truncation(Enum):
    """How a prompt of more than ``max_prompt_length`` tokens is treated: refused, or cut.

    ``left`` removes tokens from its beginning, ``right`` from its end, ``middle`` from between.
    """

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


@dataclass(kw_only=True)
class DataConfig:
    """Rows in the field's schema (docs/data.md), and how prompts are taken from them.

    train_files, val_files: files (parquet, jsonl, jsonl.gz), folders of them or of ``datasets`` save_to_disk, and Hub
    ids, read in this order.
    train_batch_size: prompts per step.
    gen_batch_size: prompts sampled at a time if groups are filtered; None is train_batch_size.
    val_batch_size: prompts validated at a time; None is all.
    max_prompt_length: the most tokens of a prompt.
    max_response_length: the most tokens after the prompt, whoever wrote them; with tools, all turns and results.
    prompt_key: the column of the messages.
    filter_overlong_prompts: leave out prompts that are too long; ``truncation`` then never applies.
    truncation: how prompts that are too long are treated otherwise.
    shuffle, seed: whether the training prompts are shuffled anew each epoch, and the seed.
    train_max_samples, val_max_samples: take only so many rows, the first of a seeded shuffle; None is all.
    chat_template_kwargs: given to the tokenizer's chat template.
    """

    train_files: list[TrainData] = field(default_factory=list)
    val_files: list[ValidationData] = field(default_factory=list)
    train_batch_size: PositiveInt = 1024
    gen_batch_size: PositiveInt | None = None
    val_batch_size: PositiveInt | None = None
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    prompt_key: str = "prompt"
    filter_overlong_prompts: bool = False
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: Seed = 1
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SftDataConfig:
    """Rows of conversations or of prompts with their responses.

    train_files, val_files: as for prompts.
    train_batch_size: conversations per optimizer step.
    messages_key: the column of whole conversations, whose assistant turns are trained; None: each row is ``prompt_key``
    (messages, or one text) and ``response_key`` (a text).
    prompt_key, response_key: the columns of prompts and of their responses, without ``messages_key``.
    max_length: the most tokens of a conversation.
    truncation: as for prompts, but ``middle`` is refused.
    shuffle, seed: whether the conversations are shuffled anew each epoch, and the seed.
    train_max_samples, val_max_samples: take only so many rows, the first of a seeded shuffle; None is all.
    chat_template_kwargs: given to the tokenizer's chat template.
    """

    train_files: list[TrainData] = field(default_factory=list)
    val_files: list[ValidationData] = field(default_factory=list)
    train_batch_size: PositiveInt = 256
    messages_key: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "response"
    max_length: PositiveInt = 1024
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: Seed = 1
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def data_violations(data: DataConfig | SftDataConfig) -> list[Violation]:
    """Every violation within ``data``, not looking at other groups."""
    return check(data, [_truncation_violations], "data.")


def _truncation_violations(data: DataConfig | SftDataConfig) -> list[Violation]:
    if not isinstance(data, SftDataConfig) or data.truncation is not Truncation.middle:
        return []
    problem = "a conversation without its middle is another one"
    return [Violation("data.truncation", data.truncation.value, problem, "Write right, left or error")]
