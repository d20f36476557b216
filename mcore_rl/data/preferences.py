"""Prompts with answers of which some are preferred: tokens of both conversations, and which of them are the answer.

A row has a prompt and two answers.  An answer is a text, messages that follow the prompt, or a whole conversation that
begins with it; without a prompt, what both conversations begin with is the prompt.  Who reads a file says how messages
are encoded: for a policy as ``conversations.py`` does, the assistant's turns of an answer trained, and of the prompt
nothing.  Rows of one answer have a label; ``RowForm`` says which of the two forms are read.

Invariant: every answer here has a trained token, and no conversation has more than ``max_length`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite, isinf
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from mcore_rl.config.data import PreferenceDataConfig, Truncation
from mcore_rl.data.conversations import Conversation
from mcore_rl.data.pairs import MEMBERS
from mcore_rl.data.prompts import truncated
from mcore_rl.data.rows import (
    MESSAGES,
    NO_UTF8,
    Ragged,
    Reading,
    SourceFile,
    clean_messages,
    column_problems,
    is_messages,
    is_text,
    more_than_text,
    named,
    no_column,
    read_files,
    too_long,
    usable_batches,
    wants_more_than_text,
)
from mcore_rl.data.turns import ASSISTANT
from mcore_rl.ground.errors import DataError

MessageList = list[dict[str, Any]]
Answer = tuple[str, MessageList, MessageList, float]  # its column, the prompt, the answer, its label
# (messages, the first of the answer) -> (tokens, which are trained); ValueError with the remedy
Encode = Callable[[MessageList, int], tuple[list[int], list[bool]]]


@dataclass(frozen=True)
class RowForm:
    """Which rows are read.  pairs: of two answers.  labels: of one answer and its label; with pairs, in files without.

    least, most: of a label.
    """

    pairs: bool = True
    labels: bool = False
    least: float = -inf
    most: float = inf


@dataclass(frozen=True)
class PreferredAnswers:
    """A row.  answers: its conversations, the preferred one first.  labels: of each; those of a pair are 1 and 0.

    margin, weight: of the row, 0 and 1 where the data says nothing.
    """

    answers: tuple[Conversation, ...]
    labels: tuple[float, ...]
    margin: float
    weight: float

    @property
    def is_pair(self) -> bool:
        """Whether there are two answers."""
        return len(self.answers) == MEMBERS


@dataclass(kw_only=True)
class _Reading(Reading):
    """The state of reading files: usable rows, and problems.  sides: tokens and mask of answers; first: of each row."""

    mask: Ragged = field(default_factory=Ragged)
    labels: list[float] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)  # pairs whose two answers are the same tokens


class PreferenceSet:
    """Rows by number, from 0.

    num_truncated: rows of which an answer was cut to ``max_length``.  num_left_out: those without a trained token left.
    num_equal: pairs that are left out because their two answers are the same tokens, at once or when cut.
    """

    def __init__(self, reading: _Reading, config: PreferenceDataConfig, title: str) -> None:
        reading.tokens.close()
        reading.mask.close()
        reading.first.append(len(reading.tokens))
        self.title = title
        self._reading = reading
        self._config = config
        self.num_truncated = len(reading.too_long)
        self.num_left_out = len(reading.untrained)
        self.num_equal = len(reading.equal)

    @classmethod
    def load(
        cls,
        files: Sequence[str | Path],
        config: PreferenceDataConfig,
        encode: Encode,
        *,
        max_samples: int | None,
        title: str,
        form: RowForm,
    ) -> Self:
        """The rows of ``files``, in file order; the other arguments are those of ``ConversationSet.load``.

        Raises DataError with every violation: those of ``ConversationSet.load``, of either answer; a margin, a weight
        or a label that is no number, a weight below 0, or a label that is not between those of ``form``.
        """
        reading = _Reading()
        sources = read_files(files, reading.problems, max_samples=max_samples, seed=config.seed)

        def is_single(file: SourceFile) -> bool:
            return form.labels and not (form.pairs and _has_pairs(file, config))

        def type_problems(file: SourceFile) -> Iterator[str]:
            return _type_problems(file, config, single=is_single(file))

        for _, file, start, records in usable_batches(sources, title, reading.problems, type_problems):
            single = is_single(file)
            for row, record in enumerate(records, start):
                reading.note_more_than_text(file.row_id(row), wants_more_than_text(record or {}))
                try:
                    _take(reading, file.row_id(row), record, config, form, encode, single=single)
                except ValueError as error:
                    reading.problems.append(f"{file.row_id(row)}: {error}")
        reading.problems += [more_than_text(column, ids) for column, ids in reading.more_than_text.items()]
        if reading.too_long and config.truncation is Truncation.error:
            what = "an answer of "
            reading.problems.append(too_long(reading.too_long, reading.longest, config.max_length, what))
        if not reading.problems and not reading.ids:
            left = f"All {len(reading.untrained)} have an answer without a trained token within data.max_length"
            said = left if reading.untrained else "The files have no rows"
            if reading.equal:
                said = f"{len(reading.equal)} have two answers that are the same tokens, which prefer nothing"
            reading.problems.append(f"no row is left. {said}. Name others")
        if reading.problems:
            raise DataError(title, reading.problems)
        return cls(reading, config, title)

    def __len__(self) -> int:
        return len(self._reading.ids)

    def __getitem__(self, index: int) -> PreferredAnswers:
        read = self._reading
        row_id = self._reading.ids[index]
        sides = range(read.first[index], read.first[index + 1])
        answers = (
            Conversation(row_id, tuple(read.tokens[side].tolist()), tuple(read.mask[side].astype(bool).tolist()))
            for side in sides
        )
        labels = tuple(read.labels[side] for side in sides)
        return PreferredAnswers(tuple(answers), labels, read.margins[index], read.weights[index])

    def warn_of_equal(self, warn: Callable[[str], None]) -> None:
        """Tells ``warn`` of the pairs that are left out, since nothing is learnt from them."""
        if self.num_equal:
            said = f"{self.num_equal:,} of {self.num_equal + len(self):,} pairs are left out: their two answers are"
            warn(f"{self.title}: {said} the same tokens, at once or when cut: {named(self._reading.equal)}")

    @property
    def media(self) -> tuple[()]:
        """No pictures: models are given the text alone."""
        return ()

    @property
    def units(self) -> list[list[int]]:
        """Of each row, the tokens of its conversations."""
        lengths = self._reading.tokens.lengths
        first = self._reading.first
        return [lengths[start:end] for start, end in pairwise(first)]


def _take(
    reading: _Reading,
    row_id: str,
    record: dict[str, Any] | None,
    config: PreferenceDataConfig,
    form: RowForm,
    encode: Encode,
    *,
    single: bool,
) -> None:
    """Add one row to ``reading``.  ValueError: what is wrong with it, in words."""
    if record is None:
        raise ValueError(NO_UTF8)
    read = _conversations(record, config, form, single=single)
    margin, weight = row_numbers(record, config)
    sides = list[tuple[list[int], list[bool]]]()
    for name, prompt, answer, _ in read:
        try:
            tokens, mask = encode([*prompt, *answer], len(prompt))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        except Exception as error:  # a template is a program of the user's and may raise anything
            said = f"the chat template refuses it: {error}. Mend the messages or the template"
            raise ValueError(f"{name}: {said}") from error
        if not any(mask):
            said = "the chat template marks nothing of it as the assistant's. Mend its tags"
            raise ValueError(f"{name}: {said}")
        sides.append((tokens, mask))
    longest = max(len(tokens) for tokens, _ in sides)
    if longest > config.max_length:
        reading.note_too_long(row_id, longest)
        if config.truncation is Truncation.error:
            return
        sides = [_cut(tokens, mask, config) for tokens, mask in sides]
        if not all(any(mask[1:]) for _, mask in sides):
            reading.untrained.append(row_id)
            return
    if len(sides) == MEMBERS and sides[0][0] == sides[1][0]:
        reading.equal.append(row_id)
        return
    reading.first.append(len(reading.labels))
    for (tokens, mask), (_, _, _, label) in zip(sides, read, strict=True):
        reading.tokens.append(tokens)
        reading.mask.append(mask)
        reading.labels.append(label)
    reading.ids.append(row_id)
    reading.margins.append(margin)
    reading.weights.append(weight)


def _cut(tokens: list[int], mask: list[bool], config: PreferenceDataConfig) -> tuple[list[int], list[bool]]:
    kept = truncated(tokens, config.max_length, config.truncation)
    return list(kept), [bool(each) for each in truncated(mask, config.max_length, config.truncation)]


def row_numbers(record: dict[str, Any], config: PreferenceDataConfig) -> tuple[float, float]:
    """(margin, weight) of a row.  ValueError: its problem, in words."""
    read = []
    for key, otherwise, least in ((config.margin_key, 0.0, -inf), (config.weight_key, 1.0, 0.0)):
        value = otherwise if key is None else record[key]
        if value is None or not isfinite(value) or value < least:
            below = ", or is negative" if least == 0 else ""
            raise ValueError(f"{key} is {value}: no number{below}. Write one, or leave the row out")
        read.append(float(value))
    return read[0], read[1]


def _conversations(
    record: dict[str, Any], config: PreferenceDataConfig, form: RowForm, *, single: bool
) -> list[Answer]:
    """Each answer of a row, the preferred first.  single: there is one, with a label.

    ValueError: the row's problem, in words.
    """
    columns = [(config.chosen_key, 1.0), (config.rejected_key, 0.0)]
    if single:
        label = record[config.label_key]
        if label is None or not isfinite(label) or not form.least <= label <= form.most:
            said = "null" if label is None else str(label)
            bounds = "" if isinf(form.most) else f" from {form.least:g} to {form.most:g}"
            remedy = f"Write a number{bounds}, true or false, or leave the row out"
            raise ValueError(f"{config.label_key} is {said}. {remedy}")
        columns = [(config.completion_key, float(label))]
    answers = [as_messages(record, key, ASSISTANT) for key, _ in columns]
    prompt = as_messages(record, config.prompt_key, "user") if config.prompt_key in record else []
    if not prompt:
        prompt = _shared(answers)
        if not prompt:
            said = "and its answers begin with no message that both have. Write the prompt"
            raise ValueError(f"has no {config.prompt_key}, {said}")
    read = []
    for (key, label), answer in zip(columns, answers, strict=True):
        if answer[: len(prompt)] == prompt:
            answer = answer[len(prompt) :]
        if all(message["role"] != ASSISTANT for message in answer):
            said = "has no message of the assistant after the prompt. Write one, or leave the row out"
            raise ValueError(f"{key} {said}")
        read.append((key, prompt, answer, label))
    return read


def _shared(answers: Sequence[MessageList]) -> MessageList:
    """The messages with which all ``answers`` begin, up to the last of the user among them; of one, its prompt."""
    first = answers[0]
    shared = 0
    for place, message in enumerate(first):
        if any(len(answer) <= place or answer[place] != message for answer in answers):
            break
        shared = place + 1 if message["role"] != ASSISTANT else shared
    return first[:shared]


def as_messages(record: dict[str, Any], key: str, role: str) -> MessageList:
    """The messages in column ``key``; one text is a message of ``role``.  ValueError: its problem, in words."""
    value = record[key]
    if isinstance(value, str):
        if not value and role != ASSISTANT:
            raise ValueError(f"{key} is empty. Write a text")
        return [{"role": role, "content": value}]
    if value is None and role == ASSISTANT:
        raise ValueError(f"{key} is null or has no text. Write the answer, or leave the row out")
    messages = clean_messages(value)
    if isinstance(messages, str):
        raise ValueError(f"{key} {messages}. Write {MESSAGES} or a text, or leave the row out")
    return messages


def _has_pairs(file: SourceFile, config: PreferenceDataConfig) -> bool:
    return any(key in file.table.schema.names for key in (config.chosen_key, config.rejected_key))


def _type_problems(file: SourceFile, config: PreferenceDataConfig, *, single: bool) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable.  single: its rows have one answer."""
    schema = file.table.schema
    form = f"{MESSAGES} or text"
    pair = [("data.chosen_key", config.chosen_key), ("data.rejected_key", config.rejected_key)]
    wanted = [("data.completion_key", config.completion_key)] if single else pair
    prompt = [("data.prompt_key", config.prompt_key)]
    for option, key in [*(prompt if config.prompt_key in schema.names or single else []), *wanted]:
        yield from column_problems(file, option, key, form, lambda kind: is_messages(kind) or is_text(kind))
    label = [("data.label_key", config.label_key)] if single else []
    numbers = [("data.margin_key", config.margin_key), ("data.weight_key", config.weight_key), *label]
    for option, key in ((option, key) for option, key in numbers if key is not None):
        if key not in schema.names:
            yield no_column(file, key, f"Write it, or name another as {option}")
        elif not _is_number(kind := schema.field(key).type) and not (
            option == "data.label_key" and pa.types.is_boolean(kind)
        ):
            yield f"{file.name}: column {key} is {kind}, not numbers. Write it so (docs/data.md)"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
