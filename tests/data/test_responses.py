"""Responses in parquet: what is written is read, with every column in its place; every broken row is named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.data import DataConfig
from mcore_rl.config.reward import Style
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.responses import Generated, ResponseSet, taken_columns, write_responses
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import style
from tests.support.prompt_files import not_utf8, row, write, write_as


def answered(*responses: str, **columns: Any) -> dict[str, Any]:
    return row(responses=list(responses)) | columns


def refusal(path: Path, response_key: str = "responses") -> list[str]:
    with pytest.raises(DataError) as caught:
        ResponseSet.load(path, "prompt", response_key)
    assert str(caught.value).startswith("path: ")
    return list(caught.value.problems)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    prompts = pa.Table.from_pylist([row(answer=str(n), level=n) for n in range(3)])
    groups = [[Generated(f"{n}{i}", 10 * n + i, ("stop", "length")[i]) for i in range(2)] for n in range(3)]
    path = tmp_path / "new" / "made.parquet"
    write_responses(path, prompts, groups)

    assert [file.name for file in path.parent.iterdir()] == ["made.parquet"]
    table = pq.read_table(path)
    assert table.select(prompts.column_names).equals(prompts)  # all columns, values, types and their order
    assert table.column_names[-3:] == ["responses", "response_num_tokens", "finish_reasons"]
    assert taken_columns(table.column_names) == table.column_names[-3:]

    responses = ResponseSet.load(path, "prompt", "responses")
    assert (len(responses), responses.counts, responses.data_sources, responses.has_lengths) == (
        3,
        [2, 2, 2],
        ["sums"] * 3,
        True,
    )
    assert responses.has_finish
    for n, each in enumerate(responses):
        assert each.id == f"made.parquet:{n}"
        assert (each.data_source, each.ground_truth, each.extra_info) == ("sums", str(n), {"index": 0})
        assert each.columns == {
            "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(n)}, "level": n
        }  # fmt: skip
        assert (each.responses, each.num_tokens) == ((f"{n}0", f"{n}1"), (10 * n, 10 * n + 1))
        assert each.truncated == (False, True)


def test_objects_without_fields_are_written(tmp_path: Path) -> None:
    """Calls without arguments in every line of jsonl, which pyarrow has as a type that parquet does not."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    path = write_as(tmp_path / "p.jsonl", [row(prompt=prompt, extra_info={"index": 0, "tags": [{}]})] * 2)
    prompts = PromptSet.load([path], DataConfig(), style("qwen2.5"), max_samples=None, title="data.train_files")
    write_responses(tmp_path / "made.parquet", prompts.table(), [[Generated("5", 1, "stop")]] * 2)
    again = PromptSet.load([tmp_path / "made.parquet"], DataConfig(), style("qwen2.5"), max_samples=None, title="x")
    text = style("qwen2.5").apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    for read in (prompts[1], again[1]):
        assert style("qwen2.5").decode(list(read.tokens)) == text
    assert again[0].extra_info == {"index": 0, "tags": [None]}


def test_conversations_are_kept_beside_what_was_said_last(tmp_path: Path) -> None:
    turns = (("assistant", "add(2, 3)", 4), ("tool", "5", 1), ("assistant", "It is 5.", 3))
    keys = ("role", "content", "num_tokens", "trained", "reward")
    said = tuple(dict(zip(keys, (*turn, turn[0] == "assistant", None), strict=True)) for turn in turns)
    group = [Generated("at once: 5", 3, "stop"), Generated("It is 5.", 8, "stop", said)]
    write_responses(tmp_path / "r.parquet", pa.Table.from_pylist([row()]), [group])
    table = pq.read_table(tmp_path / "r.parquet")
    assert table.column_names[-1] == "response_turns" and table["response_turns"].to_pylist() == [[[], list(said)]]
    assert taken_columns(table.column_names)[-1] == "response_turns"
    (first_row,) = ResponseSet.load(tmp_path / "r.parquet", "prompt", "responses")
    assert (first_row.responses, first_row.num_tokens) == (("at once: 5", "It is 5."), (3, 8))
    assert first_row.turns == (
        [{"role": "assistant", "content": "at once: 5"}],
        [{"role": role, "content": content} for role, content, _ in turns],
    )
    assert "response_turns" not in first_row.columns


def test_files_of_others_need_the_responses_alone(tmp_path: Path) -> None:
    """One text instead of a list, another column, numbers that differ from row to row, no lengths."""
    path = write(tmp_path / "gold.parquet", [row(solution="so 5", extra_info=None), row(solution="")])
    one = ResponseSet.load(path, "prompt", "solution")
    assert [each.responses for each in one] == [("so 5",), ("",)] and not one.has_lengths and not one.has_finish
    assert [each.num_tokens for each in one] == [(0,), (0,)] and [each.truncated for each in one] == [(False,)] * 2
    assert next(iter(one)).extra_info == {}
    both = write(tmp_path / "both.parquet", [answered("a", solution="so 5")])
    assert next(iter(ResponseSet.load(both, "prompt", "solution"))).columns.keys() == {"ability", "reward_model"}
    ragged = ResponseSet.load(write(tmp_path / "r.parquet", [answered("a"), answered("a", "b")]), "prompt", "responses")
    assert ragged.counts == [1, 2]


def test_rows_for_a_reward_model_keep_their_messages_and_need_no_ground_truth(tmp_path: Path) -> None:
    rows = [answered("a", reward_model={"style": style, "ground_truth": truth})
            for style, truth in (("model", None), ("rule", "5"))]  # fmt: skip
    responses = ResponseSet.load(write(tmp_path / "r.parquet", rows), "prompt", "responses")
    assert responses.styles == [Style.model, Style.rule] and responses.ids_of(Style.model) == ["r.parquet:0"]
    assert [(each.style is Style.model, each.ground_truth, each.messages) for each in responses] == [
        (True, None, rows[0]["prompt"]), (False, "5", rows[1]["prompt"])
    ]  # fmt: skip
    rows[0]["prompt"] = None
    (problem,) = refusal(write(tmp_path / "null.parquet", rows))
    assert problem.startswith("null.parquet:0: prompt is null, and the reward model reads it. Write a list of {role")
    (problem,) = refusal(write(tmp_path / "text.parquet", [each | {"prompt": "why?"} for each in rows]))
    assert problem.startswith("text.parquet:0: prompt is not a list of {role, content}, and the reward model reads it")


def test_every_broken_row_is_named(tmp_path: Path) -> None:
    rows = [
        answered("a"),
        answered(),
        answered("a") | {"responses": None},
        answered("a") | {"responses": ["a", None]},
        answered("a", data_source=""),
        answered("a", reward_model={"style": "rule", "ground_truth": None}),
        answered("a", response_num_tokens=[1, 2]),
        answered("a", response_turns=[[], []]),
    ]
    for each in rows:
        each.setdefault("response_num_tokens", [1] * len(each["responses"] or []))
        each.setdefault("response_turns", [[{"role": "assistant", "content": "a"}]] * len(each["responses"] or []))
    problems = refusal(write(tmp_path / "r.parquet", rows))
    assert [problem.split(" ", 2)[:2] for problem in problems] == [
        ["r.parquet:1:", "responses"],
        ["r.parquet:2:", "responses"],
        ["r.parquet:3:", "responses"],
        ["r.parquet:4:", "data_source"],
        ["r.parquet:5:", "reward_model"],
        ["r.parquet:6:", "response_num_tokens"],
        ["r.parquet:7:", "response_turns"],
    ]
    assert all("2 entries for 1 responses" in problem for problem in problems[-2:])


def test_files_that_are_not_it_are_refused(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "none.parquet")[0]
    plain = write(tmp_path / "plain.parquet", [row()])
    assert refusal(plain)[0].startswith("plain.parquet: no column responses; it has data_source, prompt")
    assert all("not a list of texts" in refusal(plain, key)[0] for key in ("prompt", "extra_info"))
    bare = refusal(
        write(tmp_path / "bare.parquet", [{"responses": ["a"], "finish_reasons": "stop", "response_turns": ["a"]}])
    )
    assert [problem.split(".parquet: ")[1].split(". ")[0] for problem in bare] == [
        "no column data_source of text", "no column reward_model", "column finish_reasons is string, not a list",
        "column response_turns is list<element: string>, not a list of lists of {role, content}, one list "
        "a response",
    ]  # fmt: skip
    other = write(tmp_path / "other.parquet", [answered("a", reward_model="5")])
    assert "column reward_model is string, without a ground_truth" in refusal(other)[0]
    empty = write(tmp_path / "empty.parquet", [], pa.Table.from_pylist([answered("a")]).schema)
    assert refusal(empty) == ["the file has no rows. Name one with responses"]


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([answered("a"), answered("b")])
    table = table.append_column("note", not_utf8([b"fine", b"\xff"]))
    pq.write_table(table, tmp_path / "r.parquet")
    assert refusal(tmp_path / "r.parquet")[0].startswith("r.parquet:1: has text that is no UTF-8")
