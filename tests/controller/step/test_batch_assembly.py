"""Graded responses to a batch: every token where it belongs."""

from __future__ import annotations

import torch

from mcore_rl.controller.step.batch_assembly import Trajectory, assemble, sample_rows
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
