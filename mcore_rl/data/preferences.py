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
    Ragged,
    SourceFile,
    clean_messages,
    is_messages,
    is_text,
    more_than_text,
    named,
    progress_bar,
    read_files,
    wants_more_than_text,
)
from mcore_rl.data.turns import ASSISTANT
from mcore_rl.errors import DataError

MessageList = list[dict[str, Any]]
Answer = tuple[str, MessageList, MessageList, float]  # its column, the prompt, the answer, its label
# (messages, the first of the answer) -> (tokens, which are trained); ValueError with the remedy
Encode = Callable[[MessageList, int], tuple[list[int], list[bool]]]
NOTHING = "is null or has no text. Write the answer, or leave the row out"


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


@dataclass
class _Reading:
    """The state of reading files: usable rows, and problems.  sides: tokens and mask of answers; first: of each row."""

    tokens: Ragged = field(default_factory=Ragged)
    mask: Ragged = field(default_factory=Ragged)
    labels: list[float] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)  # pairs whose two answers are the same tokens
    more_than_text: dict[str, list[str]] = field(default_factory=dict)  # ids by column
    longest: int = 0


class PreferenceSet:
    """Rows by number, from 0.

    num_truncated: rows of which an answer was cut to ``max_length``.  num_left_out: those without a trained token left.
    num_equal: pairs that are left out because their two answers are the same tokens, at once or when cut.
    """

    def __init__(self, reading: _Reading, config: PreferenceDataConfig, title: str) -> None:
        reading.tokens.close()
        reading.mask.close()
        reading.first.append(len(reading.tokens))
        self.title, self._reading, self._config = title, reading, config
        self.num_truncated, self.num_left_out = len(reading.too_long), len(reading.untrained)
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
        with progress_bar(sum(len(file.numbers) for file in sources)) as bar:
            task = bar.add_task(f"{title}: tokenising", total=sum(len(file.numbers) for file in sources))
            for file in sources:
                single = form.labels and not (form.pairs and _has_pairs(file, config))
                type_problems = list(_type_problems(file, config, single=single))
                reading.problems += type_problems
                for start, records in () if type_problems else file.batches():
                    for row, record in enumerate(records, start):
                        for column in wants_more_than_text(record or {}):
                            reading.more_than_text.setdefault(column, []).append(file.row_id(row))
                        read = _conversations(record, config, form, single=single)
                        _take(reading, file.row_id(row), record or {}, read, config, encode)
                    bar.advance(task, len(records))
        reading.problems += [more_than_text(column, ids) for column, ids in reading.more_than_text.items()]
        if reading.too_long and config.truncation is Truncation.error:
            limit = f"data.max_length={config.max_length} tokens, the longest {reading.longest}"
            remedy = f"Write data.truncation=right or left, or {reading.longest} tokens"
            problem = (
                f"{len(reading.too_long)} have an answer of more than {limit}: {named(reading.too_long)}. {remedy}"
            )
            reading.problems.append(problem)
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
        read, row_id = self._reading, self._reading.ids[index]
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
        lengths, first = self._reading.tokens.lengths, self._reading.first
        return [lengths[start:end] for start, end in pairwise(first)]


def _take(
    reading: _Reading,
    row_id: str,
    record: dict[str, Any],
    read: list[Answer] | str,
    config: PreferenceDataConfig,
    encode: Encode,
) -> None:
    """Add one row to ``reading``.  read: as ``_conversations`` has it."""
    numbers = row_numbers(record, config)
    for said in (read, numbers):
        if isinstance(said, str):
            reading.problems.append(f"{row_id}: {said}")
            return
    assert not isinstance(read, str) and not isinstance(numbers, str)
    sides = list[tuple[list[int], list[bool]]]()
    for name, prompt, answer, _ in read:
        try:
            tokens, mask = encode([*prompt, *answer], len(prompt))
        except ValueError as error:
            reading.problems.append(f"{row_id}: {name}: {error}")
            return
        except Exception as error:  # noqa: BLE001 - a template is a program of the user's and may raise anything
            said = f"the chat template refuses it: {error}. Mend the messages or the template"
            reading.problems.append(f"{row_id}: {name}: {said}")
            return
        if not any(mask):
            said = "the chat template marks nothing of it as the assistant's. Mend its tags"
            reading.problems.append(f"{row_id}: {name}: {said}")
            return
        sides.append((tokens, mask))
    longest = max(len(tokens) for tokens, _ in sides)
    if longest > config.max_length:
        reading.too_long.append(row_id)
        reading.longest = max(reading.longest, longest)
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
    reading.margins.append(numbers[0])
    reading.weights.append(numbers[1])


def _cut(tokens: list[int], mask: list[bool], config: PreferenceDataConfig) -> tuple[list[int], list[bool]]:
    kept = truncated(tokens, config.max_length, config.truncation)
    return list(kept), [bool(each) for each in truncated(mask, config.max_length, config.truncation)]


def row_numbers(record: dict[str, Any], config: PreferenceDataConfig) -> tuple[float, float] | str:
    """(margin, weight) of a row, or its problem in words."""
    read = []
    for key, otherwise, least in ((config.margin_key, 0.0, -float("inf")), (config.weight_key, 1.0, 0.0)):
        value = otherwise if key is None else record[key]
        if value is None or not isfinite(value) or value < least:
            below = ", or is negative" if least == 0 else ""
            return f"{key} is {value}: no number{below}. Write one, or leave the row out"
        read.append(float(value))
    return read[0], read[1]


def _conversations(
    record: dict[str, Any] | None, config: PreferenceDataConfig, form: RowForm, *, single: bool
) -> list[Answer] | str:
    """Each answer of a row, the preferred first; or the row's problem in words.  single: there is one, with a label."""
    if record is None:
        return "has text that is no UTF-8. Write the file again from text decoded as what it is"
    columns = [(config.chosen_key, 1.0), (config.rejected_key, 0.0)]
    if single:
        label = record[config.label_key]
        if label is None or not isfinite(label) or not form.least <= label <= form.most:
            said = "null" if label is None else str(label)
            bounds = "" if isinf(form.most) else f" from {form.least:g} to {form.most:g}"
            return f"{config.label_key} is {said}. Write a number{bounds}, true or false, or leave the row out"
        columns = [(config.completion_key, float(label))]
    answers = []
    for key, _ in columns:
        answer = as_messages(record[key], ASSISTANT)
        if isinstance(answer, str):
            return f"{key} {answer}"
        answers.append(answer)
    prompt: MessageList | str = (
        as_messages(record.get(config.prompt_key), "user") if config.prompt_key in record else []
    )
    if isinstance(prompt, str):
        return f"{config.prompt_key} {prompt}"
    if not prompt:
        prompt = _shared(answers)
        if not prompt:
            return f"has no {config.prompt_key}, and its answers begin with no message that both have. Write the prompt"
    read = []
    for (key, label), answer in zip(columns, answers, strict=True):
        if answer[: len(prompt)] == prompt:
            answer = answer[len(prompt) :]
        if all(message["role"] != ASSISTANT for message in answer):
            return f"{key} has no message of the assistant after the prompt. Write one, or leave the row out"
        read.append((key, prompt, answer, label))
    return read


def _shared(answers: Sequence[MessageList]) -> MessageList:
    """The messages with which all ``answers`` begin, up to the last of the user among them; of one, its prompt."""
    first, shared = answers[0], 0
    for place, message in enumerate(first):
        if any(len(answer) <= place or answer[place] != message for answer in answers):
            break
        shared = place + 1 if message["role"] != ASSISTANT else shared
    return first[:shared]


def as_messages(value: Any, role: str) -> MessageList | str:
    """Messages, or one text as a message of ``role``; or what is wrong, in words."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value or role == ASSISTANT else "is empty. Write a text"
    if value is None:
        return NOTHING if role == ASSISTANT else f"is null. Write {MESSAGES} or a text, or leave the row out"
    messages = clean_messages(value)
    return f"{messages}. Write {MESSAGES} or a text, or leave the row out" if isinstance(messages, str) else messages


def _has_pairs(file: SourceFile, config: PreferenceDataConfig) -> bool:
    return any(key in file.table.schema.names for key in (config.chosen_key, config.rejected_key))


def _type_problems(file: SourceFile, config: PreferenceDataConfig, *, single: bool) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable.  single: its rows have one answer."""
    schema, form = file.table.schema, f"{MESSAGES} or text"
    has = f"it has {', '.join(schema.names) or 'none'}"
    pair = [("data.chosen_key", config.chosen_key), ("data.rejected_key", config.rejected_key)]
    wanted = [("data.completion_key", config.completion_key)] if single else pair
    prompt = [("data.prompt_key", config.prompt_key)]
    for option, key in [*(prompt if config.prompt_key in schema.names or single else []), *wanted]:
        if key not in schema.names:
            yield f"{file.name}: no column {key}; {has}. Write {form} there, or name it as {option}"
        elif not (is_messages(schema.field(key).type) or is_text(schema.field(key).type)):
            yield f"{file.name}: column {key} is {schema.field(key).type}, not {form}. Write it so (docs/data.md)"
    label = [("data.label_key", config.label_key)] if single else []
    numbers = [("data.margin_key", config.margin_key), ("data.weight_key", config.weight_key), *label]
    for option, key in ((option, key) for option, key in numbers if key is not None):
        if key not in schema.names:
            yield f"{file.name}: no column {key}; {has}. Write it, or name another as {option}"
        elif not _is_number(kind := schema.field(key).type) and not (
            option == "data.label_key" and pa.types.is_boolean(kind)
        ):
            yield f"{file.name}: column {key} is {kind}, not numbers. Write it so (docs/data.md)"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
