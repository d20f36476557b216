"""Conversations for supervised fine-tuning: tokens, and which of them are trained.

Trained is what the assistant says, from the first token after its header to the token that ends its turn, included;
the newline that some templates put after that is not, because no one ever samples it.  Where the chat template marks
the assistant's part with ``{% generation %}``, that decides; else the template is asked twice, with and without the
turn, and the difference is the turn.  A template that writes the past differently from the present (one that drops
earlier reasoning) has no such difference, and is refused rather than trained on the wrong tokens.

Invariant: every conversation here has a trained token and at most ``max_length`` tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mcore_rl.config.data import SftDataConfig, Truncation
from mcore_rl.data.prompts import truncated
from mcore_rl.data.rows import (
    MESSAGES,
    Ragged,
    SourceFile,
    clean_messages,
    is_messages,
    is_text,
    named,
    progress_bar,
    read_files,
)
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
TAGS = "Use a chat template with {% generation %} around the assistant's part"


@dataclass(frozen=True)
class Conversation:
    """id: ``<file>:<row>``.  tokens: all of it.  mask: as long, True where trained."""

    id: str
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass
class _Found:
    """What becomes of the rows while they are read."""

    tokens: Ragged = field(default_factory=Ragged)
    mask: Ragged = field(default_factory=Ragged)
    ids: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    longest: int = 0


class ConversationSet:
    """Conversations by number, from 0.

    num_truncated: were cut to ``max_length``.  num_left_out: of those, had no trained token left.
    """

    def __init__(self, found: _Found, config: SftDataConfig, title: str) -> None:
        found.tokens.close()
        found.mask.close()
        self.title = title
        self.num_truncated = len(found.too_long)
        self.num_left_out = len(found.untrained)
        self._found = found
        self._config = config

    @classmethod
    def load(
        cls,
        files: Sequence[str | Path],
        config: SftDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int | None,
        title: str,
    ) -> ConversationSet:
        """The conversations of ``files``, in file order.

        tokenizer: a fast one; token places in the text are asked of it.  max_samples: only so many rows, the first of a
        shuffle by ``config.seed``.  title: the key that names the files, as ``data.train_files``.

        DataError, with every problem found: a file that is missing or no parquet, a column that is missing or of the
        wrong type, a row that is null, empty, no UTF-8, without an assistant's turn or refused by the chat template, a
        template whose prefixes do not agree, conversations that are too long where ``truncation`` is error, none left.
        """
        found = _Found()
        specials = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        turns = _Turns(tokenizer, config.chat_template_kwargs, frozenset({*specials, *tokenizer.all_special_ids}))
        read = read_files(files, found.problems, max_samples=max_samples, seed=config.seed)
        with progress_bar(sum(len(file.numbers) for file in read)) as bar:
            task = bar.add_task(f"{title}: tokenising", total=sum(len(file.numbers) for file in read))
            for file in read:
                wrong = list(_type_problems(file, config))
                found.problems += wrong
                for start, records in () if wrong else file.batches():
                    for row, record in enumerate(records, start):
                        _take(found, file.row_id(row), record, config, turns)
                    bar.advance(task, len(records))
        if found.too_long and config.truncation is Truncation.error:
            limit = f"data.max_length={config.max_length} tokens, the longest {found.longest}"
            remedy = f"Write data.truncation=right or left, or {found.longest} tokens"
            found.problems.append(f"{len(found.too_long)} have more than {limit}: {named(found.too_long)}. {remedy}")
        if not found.problems and not found.ids:
            left = (
                f" All {len(found.untrained)} have no trained token within data.max_length" if found.untrained else ""
            )
            found.problems.append(f"no conversation is left.{left or ' The files have no rows'}. Name others")
        if found.problems:
            raise DataError(title, found.problems)
        return cls(found, config, title)

    def __len__(self) -> int:
        return len(self._found.ids)

    def __getitem__(self, index: int) -> Conversation:
        mask = tuple(self._found.mask[index].astype(bool).tolist())
        return Conversation(self._found.ids[index], tuple(self._found.tokens[index].tolist()), mask)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return self._found.tokens.lengths

    def describe(self) -> str:
        """One line for the user: how many, how long, and what became of those that were too long."""
        lengths = f"{min(self.lengths)} to {max(self.lengths)} tokens, mean {sum(self.lengths) / len(self):.0f}"
        said = f"{self.title}: {len(self):,} conversations of {lengths}"
        if self.num_truncated:
            cut = f"{self.num_truncated:,} cut to {self._config.max_length} tokens ({self._config.truncation.value})"
            said += f"; {cut}, of which {self.num_left_out:,} left out without a trained token"
        return said


@dataclass(frozen=True)
class _Turns:
    """Messages to tokens and mask.  specials: token ids that end turns, among others."""

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]
    specials: frozenset[int]

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """ValueError: the template does not show where the assistant's part is; says what to do."""
        template = self.tokenizer.get_chat_template()
        tagged = GENERATION.search(template) is not None
        text, spans = self._tagged(messages, template) if tagged else self._differences(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
        mask = [False] * len(tokens)
        for begin, end in spans:
            inside = [n for n, (left, right) in enumerate(offsets) if begin <= left and begin < right <= end]
            ends = [place for place in inside if tokens[place] in self.specials]
            if not tagged and ends and not text[offsets[ends[-1]][1] : end].strip():
                inside = [place for place in inside if place <= ends[-1]]  # without the white space behind the turn
            for place in inside:
                mask[place] = True
        return tokens, mask

    def _tagged(self, messages: list[dict[str, Any]], template: str) -> tuple[str, list[tuple[int, int]]]:
        """The text, and (begin, end) of its tagged parts.

        Not by ``return_assistant_tokens_mask``: where the last character of a part has no token of its own,
        transformers 5.19 takes everything to the end of the text for the assistant's.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self.tokenizer.special_tokens_map, **self.kwargs}
        asked: dict[str, Any] = {"chat_template": template, "return_assistant_tokens_mask": True}
        found: Any = render_jinja_template(conversations=[messages], **asked, **given)
        (text,), (parts,) = found
        return text, parts

    def _differences(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and (begin, end) of every turn of the assistant."""
        text = self._render(messages)
        return text, list(self._spans(messages, text))

    def _spans(self, messages: list[dict[str, Any]], text: str) -> Iterator[tuple[int, int]]:
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if place == 0:
                raise ValueError(f"begins with the assistant, so that nothing shows where its header ends. {TAGS}")
            before = self._render(messages[:place], add_generation_prompt=True)
            through = text if place == len(messages) - 1 else self._render(messages[: place + 1])
            if not text.startswith(before) or not text.startswith(through) or len(through) < len(before):
                which = f"message {place} is written differently with and without what follows it"
                raise ValueError(f"the chat template's prefixes do not agree: {which}. {TAGS}, or train single turns")
            yield len(before), len(through)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(messages, **asked, **self.kwargs))


def _take(found: _Found, row_id: str, record: dict[str, Any] | None, config: SftDataConfig, turns: _Turns) -> None:
    """One row into ``found``."""
    messages = _messages(record, config)
    if isinstance(messages, str):
        found.problems.append(f"{row_id}: {messages}")
        return
    try:
        tokens, mask = turns.encode(messages)
    except ValueError as error:
        found.problems.append(f"{row_id}: {error}")
        return
    except Exception as error:  # noqa: BLE001 - a template is a program of the user's and may raise anything
        found.problems.append(f"{row_id}: the chat template refuses it: {error}. Mend the messages or the template")
        return
    if not any(mask):
        found.problems.append(f"{row_id}: the chat template marks nothing of it as the assistant's. Mend its tags")
        return
    if len(tokens) > config.max_length:
        found.too_long.append(row_id)
        found.longest = max(found.longest, len(tokens))
        if config.truncation is Truncation.error:
            return
        mask = [bool(trained) for trained in truncated(mask, config.max_length, config.truncation)]
        tokens = list(truncated(tokens, config.max_length, config.truncation))
        if not any(mask):
            found.untrained.append(row_id)
            return
    found.tokens.append(tokens)
    found.mask.append(mask)
    found.ids.append(row_id)


def _messages(record: dict[str, Any] | None, config: SftDataConfig) -> list[dict[str, Any]] | str:
    """The conversation of a row, or what is wrong with it."""
    if record is None:
        return "has text that is no UTF-8. Write the file again from text decoded as what it is"
    if config.messages_key is not None:
        messages = clean_messages(_value(record, config.messages_key))
        if isinstance(messages, str):
            return f"{config.messages_key} {messages}. Write {MESSAGES}, or leave the row out"
        if all(message["role"] != ASSISTANT for message in messages):
            return f"{config.messages_key} has no message of the assistant. Write one, or leave the row out"
        return messages
    prompt, response = _value(record, config.prompt_key), _value(record, config.response_key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else clean_messages(prompt)
    if isinstance(messages, str):
        return f"{config.prompt_key} {messages}. Write {MESSAGES} or a text, or leave the row out"
    if not response:
        return f"{config.response_key} is null or empty. Write the response, or leave the row out"
    return [*messages, {"role": ASSISTANT, "content": response}]


def _value(record: dict[str, Any], key: str) -> Any:
    """``extra_info.answer`` is the field answer of column extra_info; a column of that whole name goes first."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = None if value is None else value[part]
    return value


def _type(schema: pa.Schema, key: str) -> pa.DataType | None:
    """Of what ``_value`` finds; None where there is no such thing."""
    if key in schema.names:
        return schema.field(key).type
    kind = pa.struct(list(schema))
    for part in key.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _type_problems(file: SourceFile, config: SftDataConfig) -> Iterator[str]:
    """What makes every row of ``file`` unusable."""
    wanted = [("data.messages_key", config.messages_key, MESSAGES)]
    if config.messages_key is None:
        wanted = [("data.prompt_key", config.prompt_key, f"{MESSAGES} or text")]
        wanted.append(("data.response_key", config.response_key, "text"))
    for option, key, form in wanted:
        assert key is not None
        kind = _type(file.table.schema, key)
        if kind is None:
            has = f"it has {', '.join(file.table.schema.names) or 'none'}"
            yield f"{file.name}: no column {key}; {has}. Write {form} there, or name it as {option}"
        elif not ((is_messages(kind) and "{" in form) or (is_text(kind) and form.endswith("text"))):
            yield f"{file.name}: column {key} is {kind}, not {form}. Write it so (docs/data.md)"
