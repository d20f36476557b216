"""Words that stand for control tokens which a message spells, while a chat template writes what is around them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from mcore_rl.agents.text_encoding import TextEncoder, TextRun, encodable


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
