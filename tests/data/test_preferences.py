"""Rows of preferred answers: what they become, however an answer is written, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import PreferenceDataConfig, Truncation
from mcore_rl.data.preferences import PreferenceSet, RowForm
from mcore_rl.data.turns import Turns
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files
from tests.support.chat_styles import style

ASKED = {"role": "user", "content": "2 + 3?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def load(tmp_path: Path, rows: list[dict[str, Any]], *, labels: bool = False, **changes: Any) -> PreferenceSet:
    path = tmp_path / "pairs.parquet"
    prompt_files.write(path, rows)
    config = PreferenceDataConfig(**changes)
    tokenizer = prompt_files.tokenizer()
    encode, form = Turns.of(tokenizer, config.chat_template_kwargs).encode, RowForm(labels=labels)
    return PreferenceSet.load([path], config, encode, max_samples=None, title="data.train_files", form=form)


def texts(rows: PreferenceSet, index: int = 0) -> list[tuple[str, str]]:
    """(the prompt, what is trained) of each answer of a row."""
    tokenizer, read = prompt_files.tokenizer(), []
    for answer in rows[index].answers:
        trained = [token for token, mask in zip(answer.tokens, answer.mask, strict=True) if mask]
        read.append((tokenizer.decode(answer.tokens[: answer.mask.index(True)]), tokenizer.decode(trained)))
    return read


def test_an_answer_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    """A text, messages behind the prompt, and whole conversations, with the prompt or in its place."""
    plain = load(tmp_path, [{"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}])
    forms = [
        {"prompt": [ASKED], "chosen": "5", "rejected": "6"},
        {"prompt": [ASKED], "chosen": [said("5")], "rejected": [said("6")]},
        {"prompt": "2 + 3?", "chosen": [ASKED, said("5")], "rejected": [ASKED, said("6")]},
        {"chosen": [ASKED, said("5")], "rejected": [ASKED, said("6")]},
    ]
    for row in forms:
        assert load(tmp_path, [row])[0] == plain[0]
    (asked, right), (_, wrong) = texts(plain)
    assert "2 + 3?" in asked and right.startswith("5") and wrong.startswith("6")
    assert plain[0].is_pair and plain[0].labels == (1, 0) and (plain[0].margin, plain[0].weight) == (0, 1)
    assert plain.units == [[len(answer.tokens) for answer in plain[0].answers]]


def test_turns_of_the_prompt_are_not_trained_and_all_of_the_answer_are(tmp_path: Path) -> None:
    prompt = [ASKED, said("4"), {"role": "user", "content": "sure?"}]
    more = [said("5"), {"role": "user", "content": "why?"}, said("sum")]
    rows = load(tmp_path, [{"prompt": prompt, "chosen": more, "rejected": [said("4")]}])
    (asked, right), (_, wrong) = texts(rows)
    assert "4" in asked and "sure?" in asked
    assert "5" in right and "sum" in right and "why?" not in right and "4" in wrong


def test_an_empty_text_is_an_answer_that_ends_at_once(tmp_path: Path) -> None:
    rows = load(tmp_path, [{"prompt": "2 + 3?", "chosen": "5", "rejected": ""}])
    assert sum(rows[0].answers[1].mask) == 1  # the token that ends the turn


def test_margins_weights_and_labels(tmp_path: Path) -> None:
    row = {"prompt": "2 + 3?", "chosen": "5", "rejected": "6", "margin": -0.5, "weight": 2}
    assert load(tmp_path, [row], margin_key="margin", weight_key="weight")[0].margin == -0.5
    assert load(tmp_path, [row], weight_key="weight")[0].weight == 2.0
    single = [
        {"prompt": "2 + 3?", "completion": "6", "label": False},
        {"prompt": "1?", "completion": "1", "label": True},
    ]
    rows = load(tmp_path, single, labels=True)
    assert [rows[index].labels for index in range(2)] == [(False,), (True,)] and not rows[0].is_pair
    assert len(load(tmp_path, [row], labels=True)[0].answers) == 2
    with pytest.raises(DataError, match="no column chosen; it has prompt, completion, label"):
        load(tmp_path, single)


def test_what_is_too_long_is_refused_cut_or_left_out(tmp_path: Path) -> None:
    long = {"prompt": "2 + 3?", "chosen": "5", "rejected": "6" * 300}
    rows = [long, {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}]
    with pytest.raises(DataError, match=r"1 have an answer of more than data.max_length=64 .*pairs.parquet:0"):
        load(tmp_path, rows, max_length=64)
    cut = load(tmp_path, rows, max_length=64, truncation=Truncation.right)
    assert (len(cut), cut.num_truncated, cut.num_left_out) == (2, 1, 0) and cut.units[0][1] == 64
    asked = {"prompt": "2" * 300, "chosen": "5", "rejected": "6"}
    left = load(tmp_path, [asked, rows[1]], max_length=64, truncation=Truncation.right)
    assert (len(left), left.num_left_out) == (1, 1)


def test_pairs_of_the_same_tokens_are_left_out(tmp_path: Path) -> None:
    """At once, and where the answers differ only behind the limit."""
    sound = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    same = {"prompt": "1 + 1?", "chosen": "2", "rejected": "2"}
    long = {"prompt": "1 + 1?", "chosen": "6" * 100, "rejected": "6" * 90 + "7"}
    rows = load(tmp_path, [same, sound, long], max_length=64, truncation=Truncation.right)
    told = list[str]()
    rows.warn_of_equal(told.append)
    kept = load(tmp_path, [sound])[0]
    assert (len(rows), rows.num_equal) == (1, 2)
    assert [each.tokens for each in rows[0].answers] == [each.tokens for each in kept.answers]
    (line,) = told
    assert "2 of 3 pairs are left out" in line and "pairs.parquet:0, pairs.parquet:2" in line
    with pytest.raises(DataError, match=r"no row is left\. 1 have two answers that are the same tokens"):
        load(tmp_path, [same])
    completions = [{"prompt": "1?", "completion": "2", "label": label} for label in (True, False)]
    assert len(load(tmp_path, completions, labels=True)) == 2, "answers of rows of their own may be equal"


def test_answers_that_differ_in_their_calls_are_no_prompt(tmp_path: Path) -> None:
    def calling(city: str) -> list[dict[str, Any]]:
        called = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        turn = {"role": "assistant", "content": "so", "tool_calls": [called]}
        return [ASKED, turn, {"role": "tool", "content": "7"}, said("7")]

    tokenizer = style("qwen2.5")
    path = prompt_files.write(tmp_path / "p.parquet", [{"chosen": calling("Oslo"), "rejected": calling("Rome")}])
    encode = Turns.of(tokenizer, {}).encode
    rows = PreferenceSet.load([path], PreferenceDataConfig(), encode, max_samples=None, title="x", form=RowForm())
    for answer, city in zip(rows[0].answers, ("Oslo", "Rome"), strict=True):
        assert city in tokenizer.decode([token for token, own in zip(answer.tokens, answer.mask, strict=True) if own])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2?", "chosen": "5", "rejected": None}, "rejected is null or has no text"),
        ({"prompt": None, "chosen": "5", "rejected": "6"}, "prompt is null"),
        ({"prompt": "", "chosen": "5", "rejected": "6"}, "prompt is empty"),
        ({"chosen": "5", "rejected": "6"}, "has no prompt, and its answers begin with no message that both have"),
        ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [said("6")]}, "chosen has no message of the assistant"),
        ({"prompt": "2?", "chosen": 5, "rejected": 6}, "column chosen is int64, not a list"),
        ({"prompt": "2?", "chosen": "5", "rejected": "6", "margin": float("nan")}, "margin is nan: no number"),
        ({"prompt": "2?", "chosen": "5", "rejected": "6", "weight": -1.0}, "weight is -1.0: no number, or is negative"),
        ({"prompt": "2?", "chosen": "5", "rejected": "6", "margin": "x"}, "column margin is string, not numbers"),
    ],
)  # fmt: skip
def test_refusals_name_the_row_and_the_remedy(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    keys = {f"{name}_key": name for name in ("margin", "weight") if name in row}
    sound = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", "margin": 0.5, "weight": 1.0}
    alone = "prompt" not in row or "column" in message or not isinstance(row["chosen"], str)
    with pytest.raises(DataError, match=message):
        load(tmp_path, [row] if alone else [sound, sound | row], **keys)
