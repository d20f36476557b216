"""Answers as a reward model reads them: the whole conversation in the chat template, scored at its last token.

These are the tokens that the engines of ``reward_model.*`` are given: the template without a generation prompt, and no
padding at the end.  The score is the value of the state after the last of them; a value belongs to the token that is
chosen in its state (``types.py``), so an ``END`` follows, whose value it is, and which is trained alone.  No token of
the answer attends to it.

Invariant: every sequence here has one trained token, its last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mcore_rl.data.chat_template import rendered
from mcore_rl.data.conversations import Conversation
from mcore_rl.data.preferences import Encode, PreferenceSet, PreferredAnswers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = 0  # a token of any vocabulary


class ScoredSet(PreferenceSet):
    """Rows by number, from 0, whose conversations have an ``END``."""

    def __getitem__(self, index: int) -> PreferredAnswers:
        row = super().__getitem__(index)
        return replace(row, answers=tuple(with_end(answer) for answer in row.answers))

    @property
    def units(self) -> list[list[int]]:
        """Of each row, the tokens of its sequences."""
        return [[length + 1 for length in unit] for unit in super().units]


def with_end(conversation: Conversation) -> Conversation:
    """``conversation`` and an ``END``, which alone is trained."""
    length = len(conversation.tokens)
    return Conversation(conversation.id, (*conversation.tokens, END), (*(False,) * length, True))


def encoder(tokenizer: PreTrainedTokenizerBase, pad_token_id: int | None, kwargs: dict[str, Any]) -> Encode:
    """Encodes messages by ``conversation_tokens``, and says of all tokens that they count."""

    def encode(messages: list[dict[str, Any]], begin: int) -> tuple[list[int], list[bool]]:
        tokens = conversation_tokens(tokenizer, messages, pad_token_id, kwargs)
        return tokens, [True] * len(tokens)

    return encode


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    pad_token_id: int | None,
    kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens of ``messages`` that a classifier reads; transformers reads the score before any padding.

    pad_token_id: of the model's config.json; None if it has none.
    kwargs: given to the chat template.  Raises ValueError if there is no token, and whatever the template raises.
    """
    text = rendered(tokenizer, messages, kwargs=kwargs)
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    while len(tokens) > 1 and tokens[-1] == pad_token_id:
        tokens.pop()
    if not tokens:
        raise ValueError("the reward model's chat template makes no token of the conversation")
    return tokens
