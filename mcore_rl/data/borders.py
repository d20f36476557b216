"""Text to tokens, with the borders at which an engine begins to draw.

A rollout encodes the prompt by itself, and what the model draws comes after it.  Where a tokenizer would join the two
(an answer that begins with the line end that the prompt ends with), the tokens of the whole text are a context that no
rollout has.  There the text is encoded up to the border as a prompt is, and from it on as text that follows.

Invariant: away from such borders, the tokens are those that the tokenizer makes of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Offsets = list[tuple[int, int]]


class Borders:
    """Encodes with ``tokenizer``, a fast one.  added: its added tokens, none of which is part of a longer one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self.added = frozenset(tokenizer.added_tokens_decoder)

    def encode(self, text: str, borders: Sequence[int]) -> tuple[list[int], Offsets]:
        """(tokens of ``text``, where each stands in it).  borders: places in it, ascending."""
        tokens, offsets = self._whole(text)
        for border in borders:
            begin, start, end, stop = self._section(tokens, offsets, border, len(text))
            prompt, places = self._whole(text[start:border])
            if tokens[begin : begin + len(prompt)] == prompt:
                continue
            rest = self._following.encode(text[border:stop], add_special_tokens=False)
            tokens = [*tokens[:begin], *prompt, *rest.ids, *tokens[end:]]
            moved = [(left + start, right + start) for left, right in places]
            moved += [(left + border, right + border) for left, right in rest.offsets]
            offsets = [*offsets[:begin], *moved, *offsets[end:]]
        return tokens, offsets

    def without_added(self, text: str) -> str:
        """``text`` without the added tokens that it spells."""
        return self._spelled.sub("", text)

    def ends_with_added(self, text: str) -> bool:
        """Whether the last of ``text``, but for white space, is an added token."""
        spelled = list(self._spelled.finditer(text))
        return bool(spelled) and not text[spelled[-1].end() :].strip()

    def end_of_added(self, text: str) -> int:
        """Where the last added token ends that ``text`` spells; 0: it spells none."""
        return max((each.end() for each in self._spelled.finditer(text)), default=0)

    def _whole(self, text: str) -> tuple[list[int], Offsets]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [(left, right) for left, right in encoded["offset_mapping"]]

    def _section(self, tokens: list[int], offsets: Offsets, border: int, length: int) -> tuple[int, int, int, int]:
        """(the added token before ``border``, its place in the text, the one behind it, its place).

        What stands between the two is encoded by itself.  Without such tokens: begin and end of all.
        """
        begin = 0
        start = 0
        end = len(tokens)
        stop = length
        for index, token in enumerate(tokens):
            if token not in self.added:
                continue
            left = offsets[index][0]
            if left < border:
                begin = index
                start = left
            else:
                end = index
                stop = left
                break
        return begin, start, end, stop

    @cached_property
    def _following(self) -> Any:
        """The tokenizer for text that is not the first of a sequence."""
        from tokenizers import Tokenizer

        settings = json.loads(self._tokenizer.backend_tokenizer.to_str())
        settings |= {"post_processor": None, "truncation": None, "padding": None}
        without_first_space(settings)
        return Tokenizer.from_str(json.dumps(settings))

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        names = sorted((str(each.content) for each in self._tokenizer.added_tokens_decoder.values()), key=len)
        return re.compile("|".join(map(re.escape, reversed(names))) or r"(?!)")


def without_first_space(settings: dict[str, Any]) -> None:
    """Changes a tokenizer's settings so that no space is written before a text."""
    if settings.get("normalizer"):
        settings["normalizer"] = _without_prepend(settings["normalizer"])
    never_prepend(settings.get("pre_tokenizer"))


def _without_prepend(normalizer: dict[str, Any]) -> dict[str, Any] | None:
    if normalizer.get("type") == "Prepend":
        return None
    parts = [_without_prepend(part) for part in normalizer.get("normalizers", ())]
    return {**normalizer, "normalizers": [part for part in parts if part]} if parts else normalizer


def never_prepend(pre_tokenizer: Any, only: str | None = None) -> None:
    """Changes a pre-tokenizer so that it writes no space before a text.  only: where it has this scheme."""
    if isinstance(pre_tokenizer, dict):
        if "prepend_scheme" in pre_tokenizer and only in (None, pre_tokenizer["prepend_scheme"]):
            pre_tokenizer["prepend_scheme"] = "never"
        for part in pre_tokenizer.get("pretokenizers", ()):
            never_prepend(part, only)
