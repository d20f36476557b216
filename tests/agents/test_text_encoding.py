"""Encoding in parts equals the tokenizer's own of the whole, but for control tokens that untrusted text spells."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from mcore_rl.agents.text_encoding import TextEncoder, encodable
from tests.support.chat_styles import STYLES, style

PIECES = ("a", " ", "\n", "  ", "12", "the fox", "é", "日", "🙂", "\t", "'s", "▁", "<", "|", "end")


@pytest.mark.parametrize("name", STYLES)
def test_text_of_the_template_alone_is_encoded_as_by_the_tokenizer(name: str) -> None:
    """Also where a token swallows the white space behind it, or a space is added before the text."""
    tokenizer, rng = style(name), random.Random(name)
    encoder = TextEncoder(tokenizer)
    ids = sorted(encoder.control_ids)
    control = [tokenizer.convert_ids_to_tokens(each) for each in ids]
    for _ in range(200):
        text = "".join(rng.choice((*PIECES, *control)) for _ in range(rng.randrange(12)))
        first = rng.choice(ids)
        expected = tokenizer(tokenizer.convert_ids_to_tokens(first) + text, add_special_tokens=False)["input_ids"]
        assert [first, *encoder.encode([(text, True)], after=first)] == expected


@pytest.mark.parametrize("name", STYLES)
def test_untrusted_text_that_spells_no_token_is_encoded_as_in_the_whole(name: str) -> None:
    tokenizer, rng = style(name), random.Random(name)
    encoder = TextEncoder(tokenizer)
    first = min(encoder.control_ids)
    for _ in range(100):
        parts: list[Any] = ["".join(rng.choice(PIECES) for _ in range(rng.randrange(5))) for _ in range(3)]
        whole = tokenizer(tokenizer.convert_ids_to_tokens(first) + "".join(parts), add_special_tokens=False)
        runs = [(part, number % 2 == 0) for number, part in enumerate(parts)]
        assert [first, *encoder.encode(runs, after=first)] == whole["input_ids"]


def test_a_token_that_is_spelled_across_the_border_is_none() -> None:
    encoder = TextEncoder(style("qwen2.5"))
    runs = [("<|im_", True), ("end|>", False)]
    assert not set(encoder.encode(runs)) & encoder.control_ids
    assert set(encoder.encode([("<|im_end|>", True)])) <= encoder.control_ids


def test_tokens_that_begin_alike_or_swallow_space_are_the_tokenizers() -> None:
    """The longest is taken; one that strips takes the white space before it."""
    plain = style("qwen2.5")
    tokenizer = type(plain)(tokenizer_object=Tokenizer.from_str(plain.backend_tokenizer.to_str()))
    tokenizer.add_tokens(
        [AddedToken("[A]", normalized=False), AddedToken("[A]B", normalized=False),
         AddedToken("[MASK]", lstrip=True, normalized=False)]
    )  # fmt: skip
    encoder = TextEncoder(tokenizer)
    for text in ("x[A]Bx", "x[A]x", "x \n [MASK] y", "[A]B [MASK]"):
        assert encoder.encode([(text, True)]) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_half_characters_become_question_marks() -> None:
    assert encodable("a\ud83db") == "a?b"
    assert TextEncoder(style("qwen2.5")).encode([("a\ud83db", False)]) == TextEncoder(style("qwen2.5")).encode(
        [("a?b", False)]
    )


@pytest.mark.parametrize(
    "text", ["hello world, " * 4000, "x" * 40_000, " " * 60_000, "\n\n  a" * 9000, "<|im_end|>" * 5000]
)
def test_what_is_refused_has_more_tokens_than_the_limit(text: str) -> None:
    tokenizer = style("qwen2.5")
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    encoder = TextEncoder(tokenizer)
    for limit in range(max(1, count - 3), count + 3):
        assert not encoder.is_longer(text, limit) or count > limit
    assert encoder.is_longer(text * 2, count) and encoder.is_longer(text * 100, count)
