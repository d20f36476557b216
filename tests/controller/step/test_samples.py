"""Episodes as rows to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from mcore_rl.controller.step.samples import sample_rows
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import AgentCounts, Author, VersionSpan
from mcore_rl.tracking.samples import write_samples
from tests.support import prompt_files
from tests.support.scripted_rollout import answered, conversation, turn

TURNS = [
    turn(Author.model, (10, 11), reward=0.5, text="add(2, 3)"),
    turn(Author.tool, (20,), text="5"),
    turn(Author.model, (12, 13, 14), text="It is 5."),
]


def test_rows_to_read_hold_text() -> None:
    tokenizer = prompt_files.tokenizer()
    words = tuple(tokenizer.encode("2 + 3", add_special_tokens=False))
    score, prompt = Score(1.0, correct=1.0), (tokenizer.bos_token_id, *words)
    rows = sample_rows(9, [answered(4, score, prompt, cut=True, index=3, text="said")], tokenizer)
    assert rows == [
        {
            "step": 9, "data_source": "sums", "prompt_id": "file:4", "sample": 3, "response": "said", "score": 1.0,
            "prompt": tokenizer.decode(list(words)), "correct": 1.0, "ground_truth": "4", "num_tokens": 2,
            "finish": "length", "version": 3, "versions": [{"version": 3, "num_tokens": 2}], "error": None,
        }
    ]  # fmt: skip


def test_a_conversation_s_row_holds_its_segments_too(tmp_path: Path) -> None:
    tokenizer = prompt_files.tokenizer()
    episodes = [answered(1, Score(1.0), text="5"), conversation(2, TURNS, Score(1.0))]
    rows = sample_rows(9, episodes, tokenizer)
    assert "segments" not in rows[0]
    assert rows[1]["response"] == "assistant: add(2, 3)\n\ntool: 5\n\nassistant: It is 5."
    assert (rows[1]["num_tokens"], rows[1]["score"], rows[1]["version"]) == (6, 1.0, 3)
    (tmp_path / "rollouts").mkdir()
    read = pq.read_table(write_samples(tmp_path, 9, "rollouts", rows)).to_pylist()
    assert read[0].pop("segments") is None and json.loads(read[0].pop("versions")) == rows[0].pop("versions")
    assert read[0] == rows[0]
    assert [
        (each["author"], each["num_tokens"], each["trained"], each["reward"], each["text"])
        for each in rows[1]["segments"]
    ] == [
        ("prompt", 2, False, None, ""),
        ("model", 2, True, 0.5, "add(2, 3)"),
        ("tool", 1, False, None, "5"),
        ("model", 3, True, None, "It is 5."),
    ]
    assert [(each["versions"], each["tool_s"]) for each in rows[1]["segments"]] == [
        ([], 0),
        ([3], 0),
        ([], 0),
        ([3], 0),
    ]


def test_a_row_says_which_weights_drew_its_tokens_over_all_turns() -> None:
    first, tool, last = TURNS[0], TURNS[1], TURNS[2]
    spans = [[(0, 0, 0), (2, 0, 1), (4, 1, 2)], [(4, 0, 2), (5, 2, 2), (6, 2, 3)]]
    first, last = (
        replace(part, versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in of_one))
        for part, of_one in zip((first, last), spans, strict=True)
    )
    (row,) = sample_rows(9, [conversation(2, [first, tool, last], Score(1.0))], prompt_files.tokenizer())
    assert row["versions"] == [
        {"version": 2, "num_tokens": 1}, {"version": 4, "num_tokens": 3}, {"version": 6, "num_tokens": 1},
    ]  # fmt: skip
    assert row["version"] == 6


def test_an_agent_s_row_says_why_it_ended() -> None:
    tokenizer = prompt_files.tokenizer()
    episode = replace(conversation(2, TURNS, Score(1.0)), agent=AgentCounts(reason="max_turns", turns=2, calls=1))
    (row,) = sample_rows(9, [episode], tokenizer)
    assert (row["reason"], row["turns"], row["calls"]) == ("max_turns", 2, 1) and row["segments"]
