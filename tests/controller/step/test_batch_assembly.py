"""Graded responses to a batch: every token where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.controller.step.batch_assembly import Trajectory, assemble, sample_rows
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.score import Score
from tests.support import prompt_files
from tests.support.scripted_rollout import row, sample


def trajectory(
    group: int, prompt: tuple[int, ...], response: tuple[int, ...], value: float, cut: bool = False, index: int = 0
) -> Trajectory:
    answer = sample(f"p{group}", index, response, cut=cut, text="said")
    return Trajectory(row=row(group, prompt), group=group, sample=answer, score=Score(value, correct=value))


GROUPS = [
    trajectory(0, (1, 2, 3), (10, 11), 1.0),
    trajectory(0, (1, 2, 3), (12,), 0.0, cut=True, index=1),
    trajectory(1, (4,), (13, 14, 15), 0.5),
]


def test_tokens_masks_and_logprobs_stand_side_by_side() -> None:
    found = assemble(GROUPS)
    batch = found.batch
    assert batch.lengths_S == (5, 4, 4)
    assert batch.tokens_T.tolist() == [1, 2, 3, 10, 11, 1, 2, 3, 12, 4, 13, 14, 15]
    assert batch.mask_T.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1]
    assert batch.rollout_logprobs_T is not None and batch.rollout_logprobs_T.dtype == torch.float32
    expected = torch.tensor([0, 0, 0, -1.0, -1.1, 0, 0, 0, -1.2, 0, -1.3, -1.4, -1.5])
    assert torch.equal(batch.rollout_logprobs_T, expected)
    assert found.group_S.tolist() == [0, 0, 1]
    assert found.outcomes.scores_S.tolist() == [1.0, 0.0, 0.5]
    assert found.outcomes.truncated_S.tolist() == [False, True, False]
    assert found.outcomes.greedy_S is None and found.num_trained == 6


def test_a_greedy_score_goes_to_all_of_its_group() -> None:
    found = assemble(GROUPS, greedy=[0.25, 0.75])
    assert found.outcomes.greedy_S is not None and found.outcomes.greedy_S.tolist() == [0.25, 0.25, 0.75]


def graded(value: float, parts: dict[str, float], correct: float | None = None, error: str | None = None) -> Trajectory:
    return replace(GROUPS[0], score=Score(value, parts, correct, error))


def test_named_parts_of_the_reward_come_in_the_order_of_the_keys() -> None:
    found = assemble(
        [
            graded(1.5, {"format": 1.0, "overlong": -0.5}, correct=1.0),
            graded(0.25, {"format": 0.5, "acc": 0.75}, correct=0.0),  # a part of its own goes before the general name
            graded(-1.0, {}, error="timeout: 9 s"),
        ],
        reward_keys=["score", "format", "acc"],
    )
    parts_SK = found.outcomes.parts_SK
    assert parts_SK is not None and parts_SK.dtype == torch.float32
    assert parts_SK.tolist() == [[2.0, 1.0, 1.0], [0.25, 0.5, 0.75], [-1.0, -1.0, -1.0]]
    of_two = found.outcomes.of([2, 0]).parts_SK
    assert of_two is not None and of_two.tolist() == [[-1.0, -1.0, -1.0], [2.0, 1.0, 1.0]]
    assert assemble(GROUPS).outcomes.parts_SK is None


def test_a_part_that_no_grader_names_is_the_user_s_to_mend() -> None:
    with pytest.raises(ConfigError) as error:
        assemble([graded(1.0, {"boxed": 1.0})], reward_keys=["format", "acc", "boxed"])
    assert [str(each) for each in error.value.violations] == [
        f"algorithm.gdpo_reward_keys={name}: the grader of sums names no such part; it names ['boxed']. "
        "Write names of its own, acc or score, or let it answer with this one"
        for name in ("format", "acc")
    ]


def test_rows_to_read_hold_text() -> None:
    tokenizer = prompt_files.tokenizer()
    words = tuple(tokenizer.encode("2 + 3", add_special_tokens=False))
    rows = sample_rows(9, [trajectory(4, (tokenizer.bos_token_id, *words), (7, 8), 1.0, cut=True, index=3)], tokenizer)
    assert rows == [
        {
            "step": 9, "data_source": "sums", "prompt_id": "file:4", "sample": 3, "response": "said", "score": 1.0,
            "prompt": tokenizer.decode(list(words)), "correct": 1.0, "ground_truth": "4", "num_tokens": 2,
            "finish": "length", "version": 3, "error": None,
        }
    ]  # fmt: skip
