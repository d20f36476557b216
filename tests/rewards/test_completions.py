"""TRL's signature: what a function is given, and what of its answers is taken.

The oracle is trl/trainer/grpo_trainer.py, ``_calculate_rewards``: what it hands over for one conversational row.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from mcore_rl.config.reward import Completions
from mcore_rl.rewards.completions import CompletionsFunction, arguments
from mcore_rl.rewards.score import NotANumberError, RewardRequest

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
REQUEST = RewardRequest(
    ("p", 0), "mine", "five", "5", {"answer": "5", "level": 3},
    messages=[*PROMPT, {"role": "assistant", "content": "five"}],
)  # fmt: skip


def called(function: Any, request: RewardRequest = REQUEST, form: Completions = Completions.messages) -> float | None:
    made = CompletionsFunction("f", function, inspect.signature(function), form)
    return made.reward_of(made(request))


def test_a_conversation_is_given_as_trl_gives_it() -> None:
    assert arguments(REQUEST, Completions.messages) == {
        "prompts": [PROMPT],
        "completions": [[{"role": "assistant", "content": "five"}]],
        "data_source": ["mine"],
        "ground_truth": ["5"],
        "answer": ["5"],
        "level": [3],
    }


def test_text_is_given_where_it_is_asked_for() -> None:
    given = arguments(REQUEST, Completions.text)
    assert (given["prompts"], given["completions"]) == (["Be brief.\n2 + 3?"], ["five"])


def test_a_completion_of_several_turns_begins_with_the_first_that_is_trained() -> None:
    shown = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two"}, *PROMPT]
    said = [("assistant", "call"), ("tool", "5"), ("assistant", "five")]
    turns = [{"role": role, "content": content} for role, content in said]
    given = arguments(replace(REQUEST, messages=[*shown, *turns], num_turns=2), Completions.messages)
    assert (given["prompts"], given["completions"]) == ([shown], [turns])


def test_a_response_without_its_conversation_is_a_completion() -> None:
    given = arguments(replace(REQUEST, messages=()), Completions.messages)
    assert (given["prompts"], given["completions"]) == ([[]], [[{"role": "assistant", "content": "five"}]])


def test_a_function_gets_the_columns_that_it_takes() -> None:
    def some(completions: Any, level: Any) -> list[float]:
        return [level[0] + len(completions)]

    def every(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert sorted(columns) == ["answer", "data_source", "ground_truth", "level"]
        return [len(prompts[0])]

    def later(completions: Any, trainer_state: Any = None, **columns: Any) -> list[float]:
        return [float(trainer_state is None)]

    assert (called(some), called(every), called(later)) == (4.0, 2.0, 1.0)


def test_a_column_that_the_row_lacks_is_named() -> None:
    def wants(completions: Any, solution: Any, **columns: Any) -> list[float]:
        return [0.0]

    with pytest.raises(NotANumberError, match=r"f requires solution, and the row's columns are answer, data_source, "):
        called(wants)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ([1], 1.0),
        ((0.5,), 0.5),
        ([True], 1.0),
        (numpy.array([0.25]), 0.25),
        (torch.tensor([0.25]), 0.25),
        ([None], None),
    ],
)  # fmt: skip
def test_a_list_of_one_is_its_reward(answer: object, reward: float | None) -> None:
    assert called(lambda completions: answer) == reward


@pytest.mark.parametrize(
    "answer", [1.0, None, [], [1.0, 2.0], "1", {"score": 1}, [float("nan")], ["1"], [[1.0]], iter([1.0])]
)
def test_any_other_answer_is_no_number(answer: object) -> None:
    with pytest.raises(NotANumberError, match=r"^(f answered .*, not a list with one number|the reward of f is )"):
        called(lambda completions: answer)
