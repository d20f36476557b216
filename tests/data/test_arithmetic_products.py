"""Products: equal arguments give equal questions, none twice, none in both splits, and the answers are right."""

from __future__ import annotations

import json

import pytest

from mcore_rl.data.arithmetic import Product, Split, products, split_of
from mcore_rl.ground.errors import ConfigError


@pytest.mark.parametrize("split", list(Split))
def test_questions_are_of_their_split_and_differ(split: Split) -> None:
    made = products(300, 5, split)
    assert made == products(300, 5, split) != products(300, 6, split)
    assert len({each.question for each in made}) == 300
    assert {split_of(each.pair) for each in made} == {split}
    assert all(100 <= number <= 999 for each in made for number in (each.left, each.right))


def test_no_product_is_in_both_splits_whichever_number_comes_first() -> None:
    trained = {frozenset((each.left, each.right)) for each in products(20_000, 1, Split.train)}
    assert not trained & {frozenset((each.left, each.right)) for each in products(5_000, 1, Split.validation)}
    assert Product(3, 7).pair == Product(7, 3).pair


def test_the_conversation_calls_for_what_is_asked() -> None:
    for each in products(50, 1, Split.train):
        question, call, result, answer = each.conversation
        assert eval(question["content"].removeprefix("What is ").removesuffix("?")) == int(each.answer)
        said = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert said["name"] == "calculator" and eval(said["arguments"]["expression"]) == int(result["content"])
        assert answer["content"] == f"#### {each.answer}"
        assert [message["role"] for message in each.conversation] == ["user", "assistant", "tool", "assistant"]


def test_no_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="train=0: must be positive"):
        products(0, 1, Split.train)
