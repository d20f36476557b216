"""Answers of which each step has a label, for process reward models (arXiv:2312.08935): tokens, and where steps end.

A row's answer is a list of texts, its steps, which a line break joins unless a step ends in white space.  It is read as
``scored_answers`` reads an answer.  The score of a step is the value at its last token, so it is of the state in which
the next token was chosen.  The last step ends with the conversation, where engines and transformers read the score.

Invariant: every row here has a trained token for each of its labels, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from mcore_rl.config.data import PreferenceDataConfig, Truncation
from mcore_rl.data.chat_template import rendered
from mcore_rl.data.conversations import Conversation
from mcore_rl.data.preferences import PreferredAnswers, as_messages, row_numbers
from mcore_rl.data.rows import (
    MESSAGES,
    NO_UTF8,
    Ragged,
    Reading,
    SourceFile,
    column_problems,
    is_list,
    is_messages,
    is_text,
    read_files,
    too_long,
    usable_batches,
)
from mcore_rl.data.scored_answers import END, conversation_tokens, with_end
from mcore_rl.data.turns import ASSISTANT
from mcore_rl.ground.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.step_labels_key"


@dataclass(frozen=True)
class LabelledSteps:
    """A row.  answer: its tokens and an ``END``, trained where a step has ended.

    labels: of each step.  weight: of the row.
    """

    answer: Conversation
    labels: tuple[float, ...]
    weight: float

    @property
    def by_step(self) -> list[PreferredAnswers]:
        """The answer up to the end of each step, as an answer by itself with the step's label."""
        tokens = self.answer.tokens
        ends = [t for t, is_end in enumerate(self.answer.mask) if is_end]
        begun = [with_end(Conversation(self.answer.id, tokens[:end], ())) for end in ends]
        pairs = zip(begun, self.labels, strict=True)
        return [PreferredAnswers((answer,), (label,), 0.0, self.weight) for answer, label in pairs]


@dataclass(kw_only=True)
class _Reading(Reading):
    """The state of reading files: usable rows, and problems."""

    ends: Ragged = field(default_factory=Ragged)  # of each row, the tokens up to the end of each step
    labels: list[tuple[float, ...]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_left_out: int = 0


class StepSet:
    """Rows by number, from 0.  num_left_out: those without an end of a step within ``max_length``."""

    def __init__(self, reading: _Reading) -> None:
        reading.tokens.close()
        reading.ends.close()
        self._reading = reading
        self.num_left_out = reading.num_left_out

    @classmethod
    def load(
        cls,
        files: Sequence[str | Path],
        config: PreferenceDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pad_token_id: int | None,
        max_samples: int | None,
        title: str,
    ) -> Self:
        """The rows of ``files``, in file order.  Other arguments: as of ``PreferenceSet.load``.

        pad_token_id: of the model's config.json; None if it has none.

        Raises DataError with every violation: a column that is missing or of another type, a row whose steps and
        labels are not as many, an empty step, a label that is no number from 0 to 1, an answer that the chat template
        does not write as it is, rows that are too long if ``truncation`` is error, no row left.
        """
        reading = _Reading()
        sources = read_files(files, reading.problems, max_samples=max_samples, seed=config.seed)
        type_problems = partial(_type_problems, config=config)
        for _, file, start, records in usable_batches(sources, title, reading.problems, type_problems):
            for number, record in enumerate(records, start):
                try:
                    _take(reading, file.row_id(number), record, config, tokenizer, pad_token_id)
                except ValueError as error:
                    reading.problems.append(f"{file.row_id(number)}: {error}")
        if reading.too_long and config.truncation is Truncation.error:
            what = "an answer of "
            reading.problems.append(too_long(reading.too_long, reading.longest, config.max_length, what))
        if not reading.problems and not reading.ids:
            reading.problems.append("no row is left with a step that ends within data.max_length. Name others")
        if reading.problems:
            raise DataError(title, reading.problems)
        return cls(reading)

    def __len__(self) -> int:
        return len(self._reading.ids)

    def __getitem__(self, index: int) -> LabelledSteps:
        read = self._reading
        tokens = read.tokens[index].tolist()
        ended = set(read.ends[index].tolist())
        mask = tuple(place in ended for place in range(len(tokens) + 1))
        answer = Conversation(read.ids[index], (*tokens, END), mask)
        return LabelledSteps(answer, read.labels[index], read.weights[index])

    @property
    def media(self) -> tuple[()]:
        """No pictures: models are given the text alone."""
        return ()

    @property
    def units(self) -> list[list[int]]:
        """Of each row, the tokens of its sequence."""
        return [[length + 1] for length in self._reading.tokens.lengths]


def _take(
    reading: _Reading,
    row_id: str,
    record: dict[str, Any] | None,
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    pad_token_id: int | None,
) -> None:
    """Adds one row to ``reading``.  ValueError: what is wrong with it, in words."""
    if record is None:
        raise ValueError(NO_UTF8)
    steps, labels = _steps(record, config)
    prompt = as_messages(record, config.prompt_key, "user")
    _, weight = row_numbers(record, config)
    joined, ends = joined_steps(steps)
    tokens, marks = marked(tokenizer, prompt, joined, ends, pad_token_id, config.chat_template_kwargs)
    if len(tokens) > config.max_length:
        reading.note_too_long(row_id, len(tokens))
        if config.truncation is Truncation.error:
            return
        cut = len(tokens) - config.max_length
        begin = cut if config.truncation is Truncation.left else 0
        tokens = tokens[begin : begin + config.max_length]
        marks = {step: place - begin for step, place in marks.items() if 0 < place - begin <= config.max_length}
    if not marks:
        reading.num_left_out += 1
        return
    reading.tokens.append(tokens)
    reading.ends.append(list(marks.values()))
    reading.labels.append(tuple(labels[step] for step in marks))
    reading.weights.append(weight)
    reading.ids.append(row_id)


def _steps(record: dict[str, Any], config: PreferenceDataConfig) -> tuple[list[str], list[float]]:
    key = config.completion_key
    labels_key = config.step_labels_key
    assert labels_key is not None
    steps = record[key]
    labels = record[labels_key]
    if not steps or any(not step or not step.strip() for step in steps):
        raise ValueError(f"{key} has no step, or an empty one. Write a text for each, or leave the row out")
    if labels is None or len(labels) != len(steps):
        have = 0 if labels is None else len(labels)
        raise ValueError(f"{labels_key} has {have} labels for {len(steps)} steps. Write one for each")
    for label in labels:
        if label is None or not isfinite(label) or not 0 <= label <= 1:
            said = "null" if label is None else str(label)
            raise ValueError(f"{labels_key} holds {said}. Write numbers from 0 to 1, true or false")
    return list(steps), [float(label) for label in labels]


def joined_steps(steps: Sequence[str]) -> tuple[str, list[int]]:
    """The answer of these steps, and where in it each ends: behind its last character that is no white space."""
    text = ""
    ends = list[int]()
    for step in steps:
        text += "\n" if text and not text[-1].isspace() else ""
        ends.append(len(text) + len(step.rstrip()))
        text += step
    return text, ends


def marked(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[dict[str, Any]],
    answer: str,
    ends: Sequence[int],
    pad_token_id: int | None,
    kwargs: dict[str, Any],
) -> tuple[list[int], dict[int, int]]:
    """The tokens of the conversation, and for each step the number of tokens up to its end.

    ends: characters of ``answer`` up to the end of each step, rising.  A step whose end and the next one's are in one
    token is not told apart from it; it has no entry.

    ValueError: the chat template refuses the answer or writes it in other words, or the tokenizer is a slow one.
    """
    conversation = [*prompt, {"role": ASSISTANT, "content": answer}]
    try:
        tokens = conversation_tokens(tokenizer, conversation, pad_token_id, kwargs)
        text = rendered(tokenizer, conversation, kwargs=kwargs)
        asked = rendered(tokenizer, prompt, opens=True, kwargs=kwargs)
    except Exception as error:  # a template is a program of the user's and may raise anything
        raise ValueError(f"the chat template refuses it: {error}. Mend the messages or the template") from error
    shared = next((at for at, (one, other) in enumerate(zip(text, asked, strict=False)) if one != other), len(asked))
    begin = text.find(answer.strip(), shared)
    if begin < 0:
        raise ValueError("the chat template changes the answer. Use one that writes it as it is")
    begin -= len(answer) - len(answer.lstrip())
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer does not say where its tokens are. Use a fast one (tokenizer.json)")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    marks = dict[int, int]()
    place = 0
    for step, end in enumerate(ends[:-1]):
        while place < len(tokens) and offsets[place][1] < begin + end:
            place += 1
        marks[step] = place + 1
    marks[len(ends) - 1] = len(tokens)  # the last one ends where the conversation ends
    by_place = {place: step for step, place in marks.items()}  # of several in one token the last
    return tokens, {step: place for place, step in by_place.items()}


def _type_problems(file: SourceFile, config: PreferenceDataConfig) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable."""
    assert config.step_labels_key is not None
    wanted: tuple[tuple[str, str, str, Callable[[pa.DataType], bool]], ...] = (
        ("data.prompt_key", config.prompt_key, f"{MESSAGES} or text", lambda kind: is_messages(kind) or is_text(kind)),
        (
            "data.completion_key",
            config.completion_key,
            "a list of texts, its steps",
            lambda kind: _lists(kind, is_text),
        ),
        (KEY, config.step_labels_key, "a list of numbers, true or false", lambda kind: _lists(kind, _is_label)),
        *([] if config.weight_key is None else [("data.weight_key", config.weight_key, "a number", _is_label)]),
    )
    for option, key, form, fits in wanted:
        yield from column_problems(file, option, key, form, fits, page="docs/reward_training.md")


def _lists(kind: pa.DataType, of: Any) -> bool:
    return is_list(kind) and bool(of(kind.value_type))


def _is_label(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))
