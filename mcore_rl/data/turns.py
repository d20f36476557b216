"""Turns of the assistant as tokens, and which tokens of a conversation are trained.

The assistant's turns are trained, from the first token after the header to the first at which an engine stops,
included.  What some templates add after it (a newline) is not trained, because no model ever samples it; a turn that no
such token ends is refused.  If the chat template marks the assistant's part with ``{% generation %}``, the mark decides
where it is; else we render the template with and without the turn, and the difference is the turn.  A template that
writes past turns differently (one that drops earlier reasoning) has no such difference; it is refused, so that no wrong
token is trained.  What stands before a turn is encoded as the prompt of a rollout is (``borders``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from mcore_rl.data.borders import Borders
from mcore_rl.data.chat_template import readable
from mcore_rl.data.media.placed import Placed, SizedImage
from mcore_rl.ground.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
# Of a message: whether it is trained, 0 or 1.  Other tools spell it otherwise, and it is not read.
WEIGHTS = ("weight", "loss_mask")
UNREAD_WEIGHTS = (
    *("train", "trainable", "training", "train_on_turn", "train_detail"),
    *("loss", "loss_weight", "loss_scale", "masked"),
)
TAGS = "Use a chat template with {% generation %} around the assistant's part"


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
class EncodedTurns:
    """A conversation as ``tokens``, with ``mask``, true for those that are trained, and its pictures among them."""

    tokens: list[int]
    mask: list[bool]
    media: Sequence[Placed] = ()


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
        """(tokens, mask) of ``messages``, which are text alone; see ``encode_seen``."""
        encoded = self.encode_seen(messages, begin, tools=tools, last_only=last_only, images=None)
        return encoded.tokens, encoded.mask

    def encode_seen(
        self,
        messages: list[dict[str, Any]],
        begin: int = 0,
        *,
        tools: list[dict[str, Any]] | None = None,
        last_only: bool = False,
        images: Sequence[SizedImage] | None,
    ) -> EncodedTurns:
        """The tokens of ``messages``, which of them are trained, and where pictures are among them.

        begin: the first message of which anything is trained.  tools: what the template is told that the assistant may
        call.  last_only: train its last turn alone.  images: of the parts of type image; None: text alone is read.
        ValueError, with the remedy: the template does not show where the assistant's part is, or a turn that is trained
        ends with no token at which an engine stops; or see ``trained_places`` and ``chat_template.readable``.
        """
        if tools:
            with_tools = replace(self, kwargs={**self.kwargs, "tools": tools})
            return with_tools.encode_seen(messages, begin, last_only=last_only, images=images)
        places = [place for place in trained_places(messages) if place >= begin]
        if last_only:
            places = places[-1:] if places and places[-1] == _assistants(messages)[-1] else []
        said = [{key: each for key, each in message.items() if key not in WEIGHTS} for message in messages]
        said = readable(self.tokenizer, said, self.kwargs.get("tools"), pictures=images is not None)
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
        if not images:
            return EncodedTurns(tokens, mask)
        from mcore_rl.data.media.prompts import expanded  # and with it PIL, which few runs need

        sources, media = expanded(text, offsets, images)
        if any(mask[sources[each.first]] for each in media):
            raise ValueError("has a picture in a turn that is trained, and no model draws one. Leave the row out")
        sources += range(len(offsets), len(tokens))  # an end of turn that the template does not write
        return EncodedTurns([tokens[each] for each in sources], [mask[each] for each in sources], media)

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
            remedy += "; if turns go on behind it (gpt-oss), leave this one out: weight 0, or data.trained_turns=last"
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
        if len(parts) != len(assistants):  # an end that only goes on behind a part is never drawn
            parts = [
                (begin, end)
                for (_, before), (begin, end) in pairwise([(0, -1), *parts])
                if begin != before or self.borders.without_added(text[begin:end]).strip()
            ]
        if len(parts) != len(assistants):
            if list(places) != assistants:
                said = f"marks {len(parts)} parts in {len(assistants)} turns of the assistant"
                said += ", and not all are trained: nothing shows whose they are"
                raise ValueError(f"the chat template {said}. Train all turns, or use a template with a part for each")
            return text, [_Turn(-1, begin, end, begin) for begin, end in parts]
        turns = []
        for place, (begin, end) in zip(assistants, parts, strict=True):
            if place in places:
                border = self._border(messages, place, text, (begin, end))
                turns.append(_Turn(place, max(begin, border), end, border))
        return text, turns

    def _border(self, messages: list[dict[str, Any]], place: int, text: str, part: tuple[int, int]) -> int:
        """Where in ``text`` the prompt of turn ``place`` ends; where its tagged ``part`` begins if it has none.

        A template that writes earlier turns differently (gpt-oss drops their reasoning) has that prompt nowhere in
        ``text``; its end, the opening of the turn, is looked for at the beginning of the part.
        """
        try:
            before = self._render(messages[:place], opens=True)
            if text.startswith(before) and len(before) < part[1]:
                return len(before)
            closed = self._render(messages[:place])
        except Exception:  # noqa: BLE001 - a template is a program of the user's and may refuse what is no conversation
            return part[0]
        opening = before[len(closed) :] if before.startswith(closed) else ""
        both = zip(opening, text[part[0] : part[1]], strict=False)
        shared = "".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        if shared != opening:  # it opens a thought that the row does not have
            shared = shared[: max(self.borders.end_of_added(shared), shared.rfind("\n") + 1)]
        return part[0] + len(shared)

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
