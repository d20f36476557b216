"""Responses behind other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.step.contexts import Told, told
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rollout.episodes import Author, Episode
from tests.support import prompt_files
from tests.support.composed import recipe
from tests.support.scripted_rollout import conversation, turn

TURNS = [turn(Author.model, (10, 11), text="add"), turn(Author.tool, (20,), text="5"), turn(Author.model, (12,))]
EPISODES = [conversation(1, TURNS, group=0), conversation(1, TURNS, group=0), conversation(2, TURNS[:1], group=1)]
SAID = [{"role": "user", "content": "2 + 3"}]


def in_context(function: Any, positions: int = 1000) -> Told:
    """``EPISODES`` behind what ``function`` says."""
    run = recipe("arithmetic_grpo")
    assert isinstance(run, RunConfig)
    return told(EPISODES, function, prompt_files.tokenizer(), run, run.actor, positions)


def test_only_the_prompt_differs() -> None:
    tokenizer = prompt_files.tokenizer()
    made = in_context(lambda episode, group, run: SAID)
    assert made.share == 1
    expected = tokenizer.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False)
    for before, after in zip(EPISODES, made.episodes, strict=True):
        assert after.segments[0].tokens.tolist() == expected and after.segments[0].author is Author.prompt
        assert after.segments[1:] == before.segments[1:] and after.row is before.row and after.group == before.group


def test_a_function_sees_all_samples_of_the_prompt_and_may_keep_it() -> None:
    sizes = list[int]()

    def says(episode: Episode, group: Sequence[Episode], run: Any) -> Any:
        sizes.append(len(group))
        assert episode in group
        return None if len(group) == 1 else SAID

    made = in_context(says)
    assert sizes == [2, 2, 1] and made.share == pytest.approx(2 / 3)
    assert np.array_equal(made.episodes[2].segments[0].tokens, EPISODES[2].segments[0].tokens)


def test_a_context_that_leaves_no_room_for_the_response_is_not_told() -> None:
    prompt = len(prompt_files.tokenizer().apply_chat_template(SAID, add_generation_prompt=True, return_dict=False))
    assert in_context(lambda *_: SAID, prompt + 4).share == 1
    made = in_context(lambda *_: SAID, prompt + 3)
    assert made.share == pytest.approx(1 / 3), "the last has a response of two tokens, the others of four"
    assert np.array_equal(made.episodes[0].segments[0].tokens, EPISODES[0].segments[0].tokens)


@pytest.mark.parametrize("said", [[{"role": "nobody", "content": "2"}], [{"content": "2"}], 5])
def test_what_cannot_be_told_is_refused_with_the_prompt(said: Any) -> None:
    def the_teacher(episode: Episode, group: Sequence[Episode], run: Any) -> Any:
        return said

    with pytest.raises(ConfigError, match=r"the_teacher=.*cannot say what the model is told of p1: \w+: .*Mend"):
        in_context(the_teacher)
