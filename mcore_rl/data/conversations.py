"""Conversations for supervised fine-tuning, read from files: tokens, and which of them are trained (``turns.py``).

Invariant: every conversation here has a trained token and at most ``max_length`` tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mcore_rl.config.data import SftDataConfig, TrainedTurns, Truncation
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.prompts import PicturedRows, PlacedReading, described_pictures, kept_media, truncated
from mcore_rl.data.rows import (
    MESSAGES,
    NO_UTF8,
    Ragged,
    SourceFile,
    clean_messages,
    column_problems,
    field_value,
    is_messages,
    is_text,
    read_files,
    too_long,
    unread_pictures,
    usable_batches,
    wants_more_than_text,
)
from mcore_rl.data.turns import ASSISTANT, Turns
from mcore_rl.ground.errors import DataError
from mcore_rl.ground.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mcore_rl.data.media.prompts import PictureReader  # and with it PIL, which few runs need


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    id: ``<file>:<row>``.  tokens: all of it.  mask: of the same length, True if trained.  media: the pictures among the
    tokens, in order.
    """

    id: str
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    media: tuple[Placed, ...] = ()


@dataclass(kw_only=True)
class _Reading(PlacedReading):
    """The state of reading files: usable rows, and problems."""

    mask: Ragged = field(default_factory=Ragged)
    untrained: list[str] = field(default_factory=list)


class ConversationSet(PicturedRows):
    """Conversations by number, from 0.

    num_truncated: conversations cut to ``max_length``.  num_left_out: cut ones without a trained token left.
    pictures: what read their pictures; None: they have none.
    """

    def __init__(
        self,
        files: list[SourceFile],
        reading: _Reading,
        config: SftDataConfig,
        title: str,
        pictures: PictureReader | None,
    ) -> None:
        super().__init__([] if pictures is None else files, reading, title, pictures)
        reading.tokens.close()
        reading.mask.close()
        self.num_truncated = len(reading.too_long)
        self.num_left_out = len(reading.untrained)
        self._reading = reading
        self._config = config
        self._ids = [files[number].row_id(row) for number, row in reading.places]

    @classmethod
    def load(
        cls,
        files: Sequence[str | Path],
        config: SftDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int | None,
        title: str,
        ends: Collection[int] = (),
        pictures: PictureReader | None = None,
    ) -> ConversationSet:
        """The conversations of ``files``, in file order.

        tokenizer: a fast one, for the offsets of tokens in the text.  max_samples: take only so many rows, the first of
        a shuffle by ``config.seed``.  title: the key that names the files, as ``data.train_files``.  ends: tokens at
        which engines stop, besides the tokenizer's eos token.  pictures: reads those of rows, for a model that takes
        some; None: rows that have pictures are refused.

        Raises DataError with every violation: a file that is missing or not parquet, a column that is missing or of the
        wrong type, a row that is null, empty, not UTF-8, without an assistant's turn, refused by the chat template or
        meant for agents, images or videos that are not read, a picture that cannot be read, has no place in the
        messages or is in a trained turn, a template whose prefixes disagree, conversations that are too long if
        ``truncation`` is error, a cut through a picture, none left.
        """
        reading = _Reading()
        turns = Turns.of(tokenizer, config.chat_template_kwargs, ends=ends, end_of_turn=config.end_of_turn)
        sources = read_files(files, reading.problems, max_samples=max_samples, seed=config.seed)
        type_problems = partial(_type_problems, config=config, parts=pictures is not None)
        for number, file, start, records in usable_batches(sources, title, reading.problems, type_problems):
            for row, record in enumerate(records, start):
                read = "" if pictures is None else pictures.key
                asked = wants_more_than_text({**(record or {}), "tools": None}, read=read)
                reading.note_more_than_text(file.row_id(row), asked)
                try:
                    _take(reading, (number, row), file, record, config, turns, pictures)
                except ValueError as error:
                    reading.problems.append(f"{file.row_id(row)}: {error}")
        key = None if pictures is None else pictures.key
        reading.problems += unread_pictures(sources, reading.more_than_text, key)
        if reading.too_long and config.truncation is Truncation.error:
            reading.problems.append(too_long(reading.too_long, reading.longest, config.max_length))
        if not reading.problems and not reading.places:
            left = (
                f" All {len(reading.untrained)} have no trained token within data.max_length"
                if reading.untrained
                else ""
            )
            reading.problems.append(f"no conversation is left.{left or ' The files have no rows'}. Name others")
        if reading.problems:
            raise DataError(title, reading.problems)
        return cls(sources, reading, config, title, pictures)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Conversation:
        mask = tuple(self._reading.mask[index].astype(bool).tolist())
        media = self._media[index] if self._media else ()
        return Conversation(self._ids[index], tuple(self._reading.tokens[index].tolist()), mask, media)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return self._reading.tokens.lengths

    @property
    def units(self) -> list[list[int]]:
        """Of each row, the tokens of its one conversation."""
        return [[length] for length in self.lengths]

    def describe(self) -> str:
        """One line for the user: how many conversations, how long, and how many were cut or left out."""
        lengths = f"{min(self.lengths)} to {max(self.lengths)} tokens, mean {sum(self.lengths) / len(self):.0f}"
        line = f"{self.title}: {len(self):,} conversations of {lengths}"
        if self.num_truncated:
            cut = f"{self.num_truncated:,} cut to {self._config.max_length} tokens ({self._config.truncation.value})"
            line += f"; {cut}, of which {self.num_left_out:,} left out without a trained token"
        return line + described_pictures(self._media)


def _take(
    reading: _Reading,
    place: tuple[int, int],
    file: SourceFile,
    record: dict[str, Any] | None,
    config: SftDataConfig,
    turns: Turns,
    pictures: PictureReader | None,
) -> None:
    """Add one row to ``reading``.  place: number of ``file``, and the row in its table.

    ValueError: what is wrong with the row, in words.
    """
    row_id = file.row_id(place[1])
    messages = _messages(record, config)
    assert record is not None, "a row with messages"
    tools = tools_of(record)
    last_only = config.trained_turns is TrainedTurns.last
    images = None
    try:
        if pictures is not None:
            images = pictures.read(record, file.folder, row_id)
            messages = pictures.messages(messages, len(images))
        encoded = turns.encode_seen(messages, tools=tools, last_only=last_only, images=images)
    except ValueError:
        raise
    except Exception as error:  # a template is a program of the user's and may raise anything
        raise ValueError(f"the chat template refuses it: {error}. Mend the messages or the template") from error
    tokens: Sequence[int] = encoded.tokens
    mask: Sequence[bool] = encoded.mask
    media: Sequence[Placed] = encoded.media
    if not any(mask):
        said = "nothing of it is trained: the chat template marks none of it as the assistant's, or no message that is"
        raise ValueError(f"{said}. Mend its tags, or weight, or leave the row out")
    if len(tokens) > config.max_length:
        reading.note_too_long(row_id, len(tokens))
        if config.truncation is Truncation.error:
            return
        kept = kept_media(media, len(tokens), config.max_length, config.truncation)
        if isinstance(kept, Placed):
            where = f"the tokens {kept.first} to {kept.end} of {len(tokens)}, for data.max_length={config.max_length}"
            problem = f"data.truncation={config.truncation.value} would cut the picture at {where}"
            remedy = f"Write data.max_length={len(tokens)}, allow smaller pictures, or leave the row out"
            raise ValueError(f"{problem}. {remedy}")
        media = kept
        mask = [bool(trained) for trained in truncated(mask, config.max_length, config.truncation)]
        tokens = truncated(tokens, config.max_length, config.truncation)
        if not any(mask):
            reading.untrained.append(row_id)
            return
    reading.tokens.append(tokens)
    reading.mask.append(mask)
    reading.places.append(place)
    if pictures is not None:
        reading.media.append(tuple(media))


def _messages(record: dict[str, Any] | None, config: SftDataConfig) -> list[dict[str, Any]]:
    """The messages of a row.  ValueError: its problem, in words."""
    if record is None:
        raise ValueError(NO_UTF8)
    if config.messages_key is not None:
        messages = clean_messages(field_value(record, config.messages_key))
        if isinstance(messages, str):
            raise ValueError(f"{config.messages_key} {messages}. Write {MESSAGES}, or leave the row out")
        if all(message["role"] != ASSISTANT for message in messages):
            said = "has no message of the assistant. Write one, or leave the row out"
            raise ValueError(f"{config.messages_key} {said}")
        return messages
    prompt = field_value(record, config.prompt_key)
    response = field_value(record, config.response_key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else clean_messages(prompt)
    if isinstance(messages, str):
        raise ValueError(f"{config.prompt_key} {messages}. Write {MESSAGES} or a text, or leave the row out")
    if not response:
        raise ValueError(f"{config.response_key} is null or empty. Write the response, or leave the row out")
    return [*messages, {"role": ASSISTANT, "content": response}]


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas in a row's column ``tools``.  ValueError: what is wrong with them, in words.

    They are {type, function: {name, description, parameters}} each, or their JSON: parquet gives every tool the
    arguments of all, and JSON keeps them apart.
    """
    form = "Write [{type: function, function: {name, description, parameters}}, ...], or its JSON"
    given = record.get("tools")
    if isinstance(given, str):
        try:
            given = read_json(given) if given.strip() else None
        except ValueError as error:
            raise ValueError(f"tools is no JSON: {error}. {form}") from error
    if not given:
        return []
    if not isinstance(given, list):
        raise ValueError(f"tools is no list. {form}")
    try:
        tools = [read_json(each) if isinstance(each, str) else each for each in given]
    except ValueError as error:
        raise ValueError(f"tools has an entry that is no JSON: {error}. {form}") from error
    if not all(isinstance(each, dict) and isinstance(each.get("function"), dict) for each in tools):
        raise ValueError(f"tools has an entry without function. {form}")
    return tools


def _type_problems(file: SourceFile, config: SftDataConfig, parts: bool) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable.  parts: see ``is_messages``."""
    of_messages = partial(is_messages, parts=parts)
    if config.messages_key is not None:
        yield from column_problems(file, "data.messages_key", config.messages_key, MESSAGES, of_messages, fields=True)
        return
    form = f"{MESSAGES} or text"

    def fits(kind: pa.DataType) -> bool:
        return of_messages(kind) or is_text(kind)

    yield from column_problems(file, "data.prompt_key", config.prompt_key, form, fits, fields=True)
    yield from column_problems(file, "data.response_key", config.response_key, "text", is_text, fields=True)
