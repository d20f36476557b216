"""Text to tokens, where only the chat template may write control tokens: text from a tool stays text.

A tokenizer turns ``<|im_end|>`` in any text into the token that ends a turn.  Here a control token is made only of what
the template wrote; all other text is encoded by the same tokenizer without its added tokens.

Invariant: where the untrusted text spells no control token, the ids are those that the tokenizer itself gives.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mcore_rl.data.borders import never_prepend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextRun = tuple[str, bool]  # a text, and whether the template wrote it
PIECE = 1 << 14  # characters that are tokenized at a time, where it is told whether a text is too long


class TextEncoder:
    """Encodes text of which the chat template wrote parts.  tokenizer: a fast one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        backend: Any = tokenizer
        settings = json.loads(backend.backend_tokenizer.to_str())
        settings |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        never_prepend(settings.get("pre_tokenizer"), only="first")  # no text here is the first of a sequence
        self._plain = Tokenizer.from_str(json.dumps(settings))
        self._added = {str(token.content): (number, token) for number, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        special = [each for each in longest_first if self._added[each][1].special]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.control_ids = frozenset(number for number, _ in self._added.values())
        self._strips_after = {number for number, token in self._added.values() if token.rstrip}

    def id_of(self, name: str) -> int:
        """The id of the control token ``name``."""
        number, _ = self._added[name]
        return number

    def control(self, text: str) -> list[re.Match[str]]:
        """The control tokens that ``text`` spells, in order."""
        return list(self._control.finditer(text))

    def replaced(self, text: str, word: Callable[[str], str], *, special_only: bool = False) -> str:
        """``text`` with ``word(spelled)`` for each control token that it spells.  special_only: of special ones."""
        return (self._special if special_only else self._control).sub(lambda each: word(each.group()), text)

    def encode(self, runs: Sequence[TextRun], after: int | None = None) -> list[int]:
        """The ids of the joined texts of ``runs``.

        after: the control token that stands before them; None: there is none, or it is no control token.
        """
        text = encodable("".join(part for part, _ in runs))
        ids = list[int]()
        start = 0
        strips = after in self._strips_after
        for begin, end in [*self._template_tokens(runs), (len(text), len(text))]:
            piece = text[start:begin].lstrip() if strips else text[start:begin]
            number, token = self._added.get(text[begin:end], (None, None))
            if token is not None and token.lstrip:
                piece = piece.rstrip()
            ids += self._plain.encode(piece, add_special_tokens=False).ids if piece else []
            if number is not None and token is not None:
                ids.append(number)
                strips = token.rstrip
            start = end
        return ids

    @cached_property
    def longest(self) -> int:
        """The characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def is_longer(self, text: str, limit: int) -> bool:
        """Whether ``text`` surely has more than ``limit`` tokens; one near the limit is left to the tokenizer.

        A tokenizer takes seconds for a text of megabytes, in which the controller does nothing else: such a text is
        refused after as much of it as the limit has tokens.
        """
        if len(text) <= limit:
            return False
        if len(text) > limit * self.longest:
            return True
        # A cut between two pieces makes at most as many tokens too many as the token there has characters.
        surely = -self.longest
        for start in range(0, len(text), PIECE):
            piece = encodable(text[start : start + PIECE])
            surely += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) - self.longest
            if surely > limit:
                return True
        return False

    def _template_tokens(self, runs: Sequence[TextRun]) -> list[tuple[int, int]]:
        """(begin, end) of each control token that the template wrote."""
        places = list[tuple[int, int]]()
        start = 0
        for text, by_template in runs:
            if by_template:
                places += [(start + each.start(), start + each.end()) for each in self.control(text)]
            start += len(text)
        return places


def encodable(text: str) -> str:
    """``text`` with "?" for lone surrogates, of which no tokenizer can make tokens."""
    return text.encode(errors="replace").decode()


class Marks:
    """Plain words that stand for what spells a control token, while a template writes what is around it.

    spelled: the text that each word stands for.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder, self._nonce = encoder, secrets.token_hex(8)  # which no message can know
        self.spelled: dict[str, str] = {}

    def of(self, value: Any, *, special_only: bool = False) -> Any:
        """``value`` with words in every text of its lists and dicts.  special_only: for special tokens alone."""
        if isinstance(value, str):
            return self._encoder.replaced(encodable(value), self._word, special_only=special_only)
        if isinstance(value, Mapping):
            return {self.of(key): self.of(each, special_only=special_only) for key, each in value.items()}
        if isinstance(value, list):
            return [self.of(each, special_only=special_only) for each in value]
        return value

    def runs(self, text: str) -> list[TextRun]:
        """``text`` with what the words stand for, which the template did not write."""
        parts = re.split(f"(mcorerl{self._nonce}x[0-9]+x)", text)
        return [(self.spelled[part], False) if part in self.spelled else (part, True) for part in parts]

    def _word(self, spelled: str) -> str:
        word = f"mcorerl{self._nonce}x{len(self.spelled)}x"
        self.spelled[word] = spelled
        return word
