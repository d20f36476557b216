"""Whether a text has too many tokens, told without making tokens of all of it.

A tokenizer takes seconds for a text of megabytes, in which the controller does nothing else.  Here such a text is
refused after as much of it as the limit has tokens.

Invariant: what is refused has more tokens than the limit; a text near the limit is left to the tokenizer.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 14  # characters that are tokenized at a time


class TextLengths:
    """Judges texts by what ``tokenizer`` makes of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def longest(self) -> int:
        """The characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def is_longer(self, text: str, limit: int) -> bool:
        """Whether ``text`` surely has more than ``limit`` tokens."""
        if len(text) <= limit:
            return False
        if len(text) > limit * self.longest:
            return True
        # A cut between two pieces makes at most as many tokens too many as the token there has characters.
        surely = -self.longest
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE].encode(errors="replace").decode()
            surely += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) - self.longest
            if surely > limit:
                return True
        return False
