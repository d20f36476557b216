"""Conversations for supervised fine-tuning: tokens, and which of them are trained.

The assistant's turns are trained, from the first token after the header to the first at which an engine stops,
included.  What some templates add after it (a newline) is not trained, because no model ever samples it; a turn that no
such token ends is refused.  If the chat template marks the assistant's part with ``{% generation %}``, the mark decides
where it is; else we render the template with and without the turn, and the difference is the turn.  A template that
writes past turns differently (one that drops earlier reasoning) has no such difference; it is refused, so that no wrong
token is trained.  What stands before a turn is encoded as the prompt of a rollout is (``borders``).

Invariant: every conversation here has a trained token and at most ``max_length`` tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config.data import SftDataConfig, TrainedTurns, Truncation
from mcore_rl.data.borders import Borders
from mcore_rl.data.chat_template import readable
from mcore_rl.data.prompts import truncated
from mcore_rl.data.rows import (
    MESSAGES,
    Ragged,
    SourceFile,
    clean_messages,
    field_type,
    field_value,
    is_messages,
    is_text,
    more_than_text,
    named,
    progress_bar,
    read_files,
    wants_more_than_text,
)
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
# Of a message: whether it is trained, 0 or 1.  Other tools spell it otherwise, and it is not read.
WEIGHTS = ("weight", "loss_mask")
UNREAD_WEIGHTS = ("train", "trainable", "training", "train_on_turn", "train_detail", "loss", "loss_weight", "masked")
TAGS = "Use a chat template with {% generation %} around the assistant's part"


@dataclass(frozen=True)
class Conversation:
    """One conversation.  id: ``<file>:<row>``.  tokens: all of it.  mask: of the same length, True if trained."""

    id: str
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass
class _Reading:
    """The state of reading files: usable rows, and problems."""

    tokens: Ragged = field(default_factory=Ragged)
    mask: Ragged = field(default_factory=Ragged)
    ids: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    more_than_text: dict[str, list[str]] = field(default_factory=dict)  # ids by column
    longest: int = 0


class ConversationSet:
    """Conversations by number, from 0.

    num_truncated: conversations cut to ``max_length``.  num_left_out: cut ones without a trained token left.
    """

    def __init__(self, reading: _Reading, config: SftDataConfig, title: str) -> None:
        reading.tokens.close()
        reading.mask.close()
        self.title = title
        self.num_truncated = len(reading.too_long)
        self.num_left_out = len(reading.untrained)
        self._reading = reading
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
        ends: Collection[int] = (),
    ) -> ConversationSet:
        """The conversations of ``files``, in file order.

        tokenizer: a fast one, for the offsets of tokens in the text.  max_samples: take only so many rows, the first of
        a shuffle by ``config.seed``.  title: the key that names the files, as ``data.train_files``.  ends: tokens at
        which engines stop, besides the tokenizer's eos token.

        Raises DataError with every violation: a file that is missing or not parquet, a column that is missing or of the
        wrong type, a row that is null, empty, not UTF-8, without an assistant's turn, refused by the chat template or
        meant for agents, images or videos, a template whose prefixes disagree, conversations that are too long
        if ``truncation`` is error, none left.
        """
        reading = _Reading()
        turns = Turns.of(tokenizer, config.chat_template_kwargs, ends=ends, end_of_turn=config.end_of_turn)
        sources = read_files(files, reading.problems, max_samples=max_samples, seed=config.seed)
        with progress_bar(sum(len(file.numbers) for file in sources)) as bar:
            task = bar.add_task(f"{title}: tokenising", total=sum(len(file.numbers) for file in sources))
            for file in sources:
                type_problems = list(_type_problems(file, config))
                reading.problems += type_problems
                for start, records in () if type_problems else file.batches():
                    for row, record in enumerate(records, start):
                        for column in wants_more_than_text({**(record or {}), "tools": None}):
                            reading.more_than_text.setdefault(column, []).append(file.row_id(row))
                        _take(reading, file.row_id(row), record, config, turns)
                    bar.advance(task, len(records))
        reading.problems += [more_than_text(column, ids) for column, ids in reading.more_than_text.items()]
        if reading.too_long and config.truncation is Truncation.error:
            limit = f"data.max_length={config.max_length} tokens, the longest {reading.longest}"
            remedy = f"Write data.truncation=right or left, or {reading.longest} tokens"
            reading.problems.append(
                f"{len(reading.too_long)} have more than {limit}: {named(reading.too_long)}. {remedy}"
            )
        if not reading.problems and not reading.ids:
            left = (
                f" All {len(reading.untrained)} have no trained token within data.max_length"
                if reading.untrained
                else ""
            )
            reading.problems.append(f"no conversation is left.{left or ' The files have no rows'}. Name others")
        if reading.problems:
            raise DataError(title, reading.problems)
        return cls(reading, config, title)

    def __len__(self) -> int:
        return len(self._reading.ids)

    def __getitem__(self, index: int) -> Conversation:
        mask = tuple(self._reading.mask[index].astype(bool).tolist())
        return Conversation(self._reading.ids[index], tuple(self._reading.tokens[index].tolist()), mask)

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
        return line


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant in the text of a conversation.

    place: of its message; -1 where a template marks parts that are no whole turns.
    begin, end: of its text.  border: where the prompt ends that a rollout would draw it after.
    """

    place: int
    begin: int
    end: int
    border: int


@dataclass(frozen=True)
class Turns:
    """Encodes messages as tokens and mask.

    kwargs: given to the chat template.  borders: encodes.
    ends: the tokens at which an engine stops.  end_of_turn: the one that a turn ends with where the template writes
    none; None: such a turn is refused.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]
    borders: Borders
    ends: frozenset[int]
    end_of_turn: int | None = None

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: dict[str, Any],
        *,
        ends: Collection[int] = (),
        end_of_turn: str | None = None,
    ) -> Turns:
        """With the chat template of ``tokenizer``, a fast one.

        ends: besides the eos token of ``tokenizer``.  end_of_turn: its text.  DataError: it is no token.
        """
        last = None
        if end_of_turn is not None:
            last = tokenizer.get_vocab().get(end_of_turn)
            if last is None:
                problem = f"{end_of_turn!r} is no token of the tokenizer. Write one of its special tokens"
                raise DataError("data.end_of_turn", [problem])
        known = {*ends, tokenizer.eos_token_id, last} - {None}
        return cls(tokenizer, kwargs, Borders(tokenizer), frozenset(known), last)

    def encode(
        self,
        messages: list[dict[str, Any]],
        begin: int = 0,
        *,
        tools: list[dict[str, Any]] | None = None,
        last_only: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """(tokens, mask).

        begin: the first message of which anything is trained.  tools: what the template is told that the assistant may
        call.  last_only: train its last turn alone.
        ValueError, with the remedy: the template does not show where the assistant's part is, or a turn that is trained
        ends with no token at which an engine stops; or see ``trained_places`` and ``chat_template.readable``.
        """
        if tools:
            return replace(self, kwargs={**self.kwargs, "tools": tools}).encode(messages, begin, last_only=last_only)
        places = [place for place in trained_places(messages) if place >= begin]
        if last_only:
            places = places[-1:] if places and places[-1] == _assistants(messages)[-1] else []
        said = [{key: each for key, each in message.items() if key not in WEIGHTS} for message in messages]
        said = readable(self.tokenizer, said, self.kwargs.get("tools"))
        template = self.tokenizer.get_chat_template(tools=self.kwargs.get("tools"))
        if GENERATION.search(template) is not None:
            text, turns = self._tagged(said, template, places)
        else:
            text = self._render(said)
            turns = list(self._untagged(said, text, places))
        tokens, offsets = self.borders.encode(text, [turn.border for turn in turns])
        mask = [False] * len(tokens)
        for turn in turns:
            for index in self._trained(turn, text, tokens, offsets):
                if index == len(tokens):
                    assert self.end_of_turn is not None
                    tokens.append(self.end_of_turn)
                    mask.append(True)
                mask[index] = True
        return tokens, mask

    def _trained(self, turn: _Turn, text: str, tokens: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """The tokens of ``turn`` that are trained: up to the first at which an engine stops; behind all: one to add."""
        inside = [
            index
            for index, (left, right) in enumerate(offsets)
            if turn.begin <= left and turn.begin < right <= turn.end
        ]
        stops = [index for index in inside if tokens[index] in self.ends]
        if stops:
            rest = text[offsets[stops[0]][1] : turn.end]
            if self.borders.without_added(rest).strip():
                said = f"has text behind {text[slice(*offsets[stops[0]])]}, at which engines stop"
                raise ValueError(f"{_named(turn)} {said}: nobody draws it. Write other words, or leave the row out")
            return [index for index in inside if index <= stops[0]]
        following = (
            inside[-1] + 1
            if inside
            else next((index for index, (left, _) in enumerate(offsets) if left >= turn.end), len(tokens))
        )
        if following < len(tokens) and tokens[following] in self.ends:
            return [*inside, following]
        if turn.begin == turn.end:
            return []
        if not text[turn.end :].strip() and self.end_of_turn is not None:
            return [*inside, len(tokens)]
        raise ValueError(self._unended(turn, text, inside, tokens))

    def _unended(self, turn: _Turn, text: str, inside: list[int], tokens: list[int]) -> str:
        names = ", ".join(sorted(self.tokenizer.convert_ids_to_tokens(sorted(self.ends))))
        problem = f"{_named(turn)} ends with no token at which engines stop ({names or 'there is none'})"
        others = [tokens[index] for index in inside if tokens[index] in self.borders.added]
        if others and self.borders.ends_with_added(text[: turn.end]):
            name = self.tokenizer.convert_ids_to_tokens(others[-1])
            remedy = f"If it is to end with {name}, write {others[-1]} into eos_token_id of generation_config.json"
        else:
            remedy = "Use a chat template that writes one; sft and prefer may have data.end_of_turn=TOKEN, one of these"
        return f"{problem}, so that a model that learns it would not stop. {remedy}"

    def _tagged(self, messages: list[dict[str, Any]], template: str, places: Sequence[int]) -> tuple[str, list[_Turn]]:
        """(text, its tagged parts that are of the turns ``places``).

        Not by ``return_assistant_tokens_mask``: if the last character of a part has no token of its own, transformers
        5.19 counts everything to the end of the text as the assistant's.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self.tokenizer.special_tokens_map, **self.kwargs}
        asked: dict[str, Any] = {"chat_template": template, "return_assistant_tokens_mask": True}
        rendered: Any = render_jinja_template(conversations=[messages], **asked, **given)
        (text,), (parts,) = rendered
        assistants = _assistants(messages)
        if len(parts) != len(assistants):
            if list(places) != assistants:
                said = f"marks {len(parts)} parts in {len(assistants)} turns of the assistant"
                raise ValueError(f"the chat template {said}, and not all are trained: nothing shows whose they are")
            apart = [part for number, part in enumerate(parts) if number == 0 or text[parts[number - 1][1] : part[0]]]
            return text, [_Turn(-1, begin, end, begin) for begin, end in apart]  # what only goes on is never drawn
        turns = []
        for place, (begin, end) in zip(assistants, parts, strict=True):
            if place in places:
                border = self._border(messages, place, text, (begin, end))
                turns.append(_Turn(place, max(begin, border), end, border))
        return text, turns

    def _border(self, messages: list[dict[str, Any]], place: int, text: str, part: tuple[int, int]) -> int:
        """Where in ``text`` the prompt of turn ``place`` ends; where its tagged ``part`` begins if it has none."""
        try:
            before = self._render(messages[:place], opens=True)
        except Exception:  # noqa: BLE001 - a template is a program of the user's and may refuse what is no conversation
            return part[0]
        return len(before) if text.startswith(before) and len(before) < part[1] else part[0]

    def _untagged(self, messages: list[dict[str, Any]], text: str, places: Sequence[int]) -> Iterator[_Turn]:
        """The turns ``places`` of the assistant in ``text``."""
        for place in places:
            if place == 0:
                raise ValueError(f"begins with the assistant, so that nothing shows where its header ends. {TAGS}")
            before = self._render(messages[:place], opens=True)
            through = text if place == len(messages) - 1 else self._render(messages[: place + 1])
            if not text.startswith(through):  # Phi-3 writes a token behind the last turn alone
                through = through[: self._stop(through, len(before))]
            if not text.startswith(before) or not text.startswith(through) or len(through) < len(before):
                which = f"message {place} is written differently with and without what follows it"
                raise ValueError(f"the chat template's prefixes do not agree: {which}. {TAGS}, or train single turns")
            yield _Turn(place, len(before), len(through), len(before))

    def _stop(self, text: str, start: int) -> int:
        """Where in ``text`` the first token behind ``start`` ends at which engines stop; else the end of it."""
        names = [name for token in self.ends for name in self.tokenizer.convert_ids_to_tokens([token])]
        return min((text.find(name, start) + len(name) for name in names if name in text[start:]), default=len(text))

    def _render(self, messages: list[dict[str, Any]], *, opens: bool = False) -> str:
        asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opens}
        return str(self.tokenizer.apply_chat_template(messages, **asked, **self.kwargs))


def _assistants(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]


def _named(turn: _Turn) -> str:
    return f"message {turn.place}" if turn.place >= 0 else "a turn of the assistant"


def trained_places(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The messages of the assistant whose ``weight`` or ``loss_mask`` is not 0.

    ValueError, with the remedy: one is neither 0 nor 1 or is of somebody else, or another key says what is trained.
    """
    places = []
    for place, message in enumerate(messages):
        unread = [key for key in UNREAD_WEIGHTS if message.get(key) is not None]
        if unread:
            raise ValueError(
                f"message {place} has {unread[0]}, which is not read. Write weight, 0 or 1, or leave it out"
            )
        weights = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
        for key, weight in weights.items():
            if weight not in (0, 1):
                raise ValueError(f"message {place} has {key} {weight!r}. Write 0 or 1")
        if len(set(weights.values())) > 1:
            raise ValueError(f"message {place} has a weight and a loss_mask that differ. Write one of them")
        if message["role"] == ASSISTANT and 0 not in weights.values():
            places.append(place)
        elif message["role"] != ASSISTANT and 1 in weights.values():
            said = f"is of the {message['role']} and has {next(iter(weights))} 1"
            raise ValueError(
                f"message {place} {said}: only the assistant's turns are trained. Write 0, or leave it out"
            )
    return places


def _take(reading: _Reading, row_id: str, record: dict[str, Any] | None, config: SftDataConfig, turns: Turns) -> None:
    """Add one row to ``reading``."""
    messages = _messages(record, config)
    if isinstance(messages, str):
        reading.problems.append(f"{row_id}: {messages}")
        return
    tools = tools_of(record or {})
    if isinstance(tools, str):
        reading.problems.append(f"{row_id}: tools {tools}")
        return
    try:
        last_only = config.trained_turns is TrainedTurns.last
        tokens, mask = turns.encode(messages, tools=tools, last_only=last_only)
    except ValueError as error:
        reading.problems.append(f"{row_id}: {error}")
        return
    except Exception as error:  # noqa: BLE001 - a template is a program of the user's and may raise anything
        reading.problems.append(f"{row_id}: the chat template refuses it: {error}. Mend the messages or the template")
        return
    if not any(mask):
        said = "nothing of it is trained: the chat template marks none of it as the assistant's, or no message that is"
        reading.problems.append(f"{row_id}: {said}. Mend its tags, or weight, or leave the row out")
        return
    if len(tokens) > config.max_length:
        reading.too_long.append(row_id)
        reading.longest = max(reading.longest, len(tokens))
        if config.truncation is Truncation.error:
            return
        mask = [bool(trained) for trained in truncated(mask, config.max_length, config.truncation)]
        tokens = list(truncated(tokens, config.max_length, config.truncation))
        if not any(mask):
            reading.untrained.append(row_id)
            return
    reading.tokens.append(tokens)
    reading.mask.append(mask)
    reading.ids.append(row_id)


def _messages(record: dict[str, Any] | None, config: SftDataConfig) -> list[dict[str, Any]] | str:
    """The messages of a row, or its problem in words."""
    if record is None:
        return "has text that is no UTF-8. Write the file again from text decoded as what it is"
    if config.messages_key is not None:
        messages = clean_messages(field_value(record, config.messages_key))
        if isinstance(messages, str):
            return f"{config.messages_key} {messages}. Write {MESSAGES}, or leave the row out"
        if all(message["role"] != ASSISTANT for message in messages):
            return f"{config.messages_key} has no message of the assistant. Write one, or leave the row out"
        return messages
    prompt, response = field_value(record, config.prompt_key), field_value(record, config.response_key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else clean_messages(prompt)
    if isinstance(messages, str):
        return f"{config.prompt_key} {messages}. Write {MESSAGES} or a text, or leave the row out"
    if not response:
        return f"{config.response_key} is null or empty. Write the response, or leave the row out"
    return [*messages, {"role": ASSISTANT, "content": response}]


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | str:
    """The schemas in a row's column ``tools``, or what is wrong with them.

    They are {type, function: {name, description, parameters}} each, or their JSON: parquet gives every tool the
    arguments of all, and JSON keeps them apart.
    """
    form = "Write [{type: function, function: {name, description, parameters}}, ...], or its JSON"
    given = record.get("tools")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            return f"is no JSON: {error}. {form}"
    if not given:
        return []
    if not isinstance(given, list):
        return f"is no list. {form}"
    try:
        tools = [json.loads(each) if isinstance(each, str) else each for each in given]
    except (ValueError, RecursionError) as error:
        return f"has an entry that is no JSON: {error}. {form}"
    if not all(isinstance(each, dict) and isinstance(each.get("function"), dict) for each in tools):
        return f"has an entry without function. {form}"
    return tools


def _type_problems(file: SourceFile, config: SftDataConfig) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable."""
    wanted = [("data.messages_key", config.messages_key, MESSAGES)]
    if config.messages_key is None:
        wanted = [("data.prompt_key", config.prompt_key, f"{MESSAGES} or text")]
        wanted.append(("data.response_key", config.response_key, "text"))
    for option, key, form in wanted:
        assert key is not None
        kind = field_type(file.table.schema, key)
        if kind is None:
            has = f"it has {', '.join(file.table.schema.names) or 'none'}"
            yield f"{file.name}: no column {key}; {has}. Write {form} there, or name it as {option}"
        elif not ((is_messages(kind) and "{" in form) or (is_text(kind) and form.endswith("text"))):
            yield f"{file.name}: column {key} is {kind}, not {form}. Write it so (docs/data.md)"
