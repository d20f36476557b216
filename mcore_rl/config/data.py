"""The configuration group ``data``: which files, how many prompts at a time, and how overlong prompts are treated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from mcore_rl.config.bounds import PositiveInt, Seed, TrainData, ValidationData, check
from mcore_rl.ground.errors import Violation


class Truncation(Enum):
    """How a prompt of more than ``max_prompt_length`` tokens is treated: refused, or cut.

    ``left`` removes tokens from its beginning, ``right`` from its end, ``middle`` from between.
    """

    error = "error"
    left = "left"
    right = "right"
    middle = "middle"


class TrainedTurns(Enum):
    """Which turns of the assistant are trained: all of a conversation, or the last."""

    all = "all"
    last = "last"


MIN_PIXELS = 56 * 56  # as the models' own processors have it
MAX_PIXELS = 1_003_520  # 1,280 tokens of 28 x 28; the checkpoints' own 12,845,056 are 16,384 tokens a picture


@dataclass(kw_only=True)
class ImagesConfig:
    """Pictures in rows (docs/vision.md).

    image_key: the column of the pictures that the model sees; None: it reads text, and rows with pictures are refused.
    image_min_pixels, image_max_pixels: a picture is made as large, or as small, in pixels; a token of Qwen2.5-VL is
    28 x 28, of Qwen3-VL 32 x 32.
    max_images: the most pictures of a row; None: any number.
    """

    image_key: str | None = None
    image_min_pixels: PositiveInt = MIN_PIXELS
    image_max_pixels: PositiveInt = MAX_PIXELS
    max_images: PositiveInt | None = None

    @property
    def sees_pictures(self) -> bool:
        """Whether models are given the pictures of rows."""
        return self.image_key is not None


@dataclass(kw_only=True)
class PlannedImagesConfig(ImagesConfig):
    """Pictures in rows that are trained.

    mean_image_tokens: how many tokens of a row stand for pictures on average, for the times of a plan; None is half of
    a mean prompt.
    """

    mean_image_tokens: PositiveInt | None = None


@dataclass(kw_only=True)
class DataConfig(PlannedImagesConfig):
    """Rows in the field's schema (docs/data.md), and how prompts are taken from them.

    train_files, val_files: files (parquet, jsonl, jsonl.gz), folders of them or of ``datasets`` save_to_disk, and Hub
    ids, read in this order.
    train_batch_size: prompts per step.
    gen_batch_size: prompts sampled at a time if groups are filtered; None is train_batch_size.
    val_batch_size: prompts validated at a time; None is all.
    max_prompt_length: the most tokens of a prompt.
    max_response_length: the most tokens after the prompt, whoever wrote them; with tools, all turns and results.
    mean_response_length: how many tokens responses have on average, for the times of a plan; None is half of
    ``max_response_length``.
    prompt_key: the column of the messages.
    answer_key: the column, or field of a column, of the row's own answer, a text, for algorithms that train it
    (``spin``): ``extra_info.answer``, say.
    filter_overlong_prompts: leave out prompts that are too long, and rows whose own answer is; ``truncation`` then
    never applies.
    truncation: how prompts that are too long are treated otherwise; an answer is then cut at its end, as a response is.
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
    mean_response_length: PositiveInt | None = None
    prompt_key: str = "prompt"
    answer_key: str | None = None
    filter_overlong_prompts: bool = False
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: Seed = 1
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class AnswersConfig:
    """Rows of prompts with answers.

    train_files, val_files: as for prompts.
    train_batch_size: rows per optimizer step.
    prompt_key: the column of the prompts: messages, or one text.
    max_length: the most tokens of a prompt with its answer.
    truncation: as for prompts, but ``middle`` is refused.
    shuffle, seed: whether the rows are shuffled anew each epoch, and the seed.
    train_max_samples, val_max_samples: take only so many rows, the first of a seeded shuffle; None is all.
    chat_template_kwargs: given to the tokenizer's chat template.
    end_of_turn: the token that ends a conversation's last turn where the chat template writes none, as GLM's
    ``<|user|>``; None: such rows are refused.
    """

    train_files: list[TrainData] = field(default_factory=list)
    val_files: list[ValidationData] = field(default_factory=list)
    train_batch_size: PositiveInt = 256
    prompt_key: str = "prompt"
    max_length: PositiveInt = 1024
    truncation: Truncation = Truncation.error
    shuffle: bool = True
    seed: Seed = 1
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    end_of_turn: str | None = None


@dataclass(kw_only=True)
class SftDataConfig(AnswersConfig, PlannedImagesConfig):
    """Rows of conversations or of prompts with their responses.

    messages_key: the column of whole conversations, whose assistant turns are trained; None: each row is ``prompt_key``
    and ``response_key``.
    response_key: the column of the responses, texts, without ``messages_key``.
    trained_turns: whether all turns of the assistant are trained, or the last of each conversation alone.
    """

    messages_key: str | None = None
    response_key: str = "response"
    trained_turns: TrainedTurns = TrainedTurns.all


@dataclass(kw_only=True)
class PreferenceDataConfig(AnswersConfig):
    """Rows of a prompt with an answer that is preferred and one that is not, or of single answers and their labels.

    chosen_key, rejected_key: the columns of the two answers: texts, messages that follow the prompt, or whole
    conversations that begin with it.
    completion_key, label_key: of a single answer: its column, and that of its label.  Of prefer with kto, in a file
    without the two columns above, the label is whether it is desirable; of reward with regression a number, with bce
    the probability that it is right.
    step_labels_key: with bce, the column of a list of labels, one for each step of the answer, which is then a list of
    texts; None: an answer has one label.
    margin_key: the column of the margin by which the preferred answer's reward must be the higher; None: there is none.
    weight_key: the column of what a row's loss is multiplied by; None: there is none.
    """

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    completion_key: str = "completion"
    label_key: str = "label"
    step_labels_key: str | None = None
    margin_key: str | None = None
    weight_key: str | None = None


def data_violations(data: DataConfig | AnswersConfig) -> list[Violation]:
    """Every violation within ``data``, not looking at other groups."""
    return check(data, [_truncation_violations, image_violations], "data.")


def image_violations(data: object) -> Iterator[Violation]:
    """Contradictions among the keys of pictures, and keys that nothing reads without ``image_key``."""
    if not isinstance(data, ImagesConfig):
        return
    planned = isinstance(data, PlannedImagesConfig)
    usual = PlannedImagesConfig() if planned else ImagesConfig()
    for name in (each.name for each in fields(usual) if each.name != "image_key" and not data.sees_pictures):
        value = getattr(data, name)
        if value != getattr(usual, name):
            remedy = "Leave it out, or write data.image_key=images, say"
            yield Violation(f"data.{name}", value, "is not read: the model is given no pictures", remedy)
    if data.image_min_pixels > data.image_max_pixels:
        problem = f"exceeds data.image_max_pixels={data.image_max_pixels}"
        yield Violation("data.image_min_pixels", data.image_min_pixels, problem, "Write less")
    if isinstance(data, PlannedImagesConfig) and data.mean_image_tokens is not None:
        key = "max_prompt_length" if isinstance(data, DataConfig) else "max_length"
        longest = getattr(data, key)
        if data.mean_image_tokens > longest:
            problem = f"is more than data.{key}={longest}"
            remedy = "Write a mean within it, or leave it out"
            yield Violation("data.mean_image_tokens", data.mean_image_tokens, problem, remedy)


def _truncation_violations(data: DataConfig | AnswersConfig) -> list[Violation]:
    if not isinstance(data, AnswersConfig) or data.truncation is not Truncation.middle:
        return []
    problem = "a conversation without its middle is another one"
    return [Violation("data.truncation", data.truncation.value, problem, "Write right, left or error")]
