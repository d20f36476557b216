"""Prompts: the tokens of the chat template, over-long ones by each rule, and every broken row named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.data import DataConfig, Truncation
from mcore_rl.config.reward import Style
from mcore_rl.data.prompts import PromptSet, truncated
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files
from tests.support.prompt_files import not_utf8, row, user, write

TOKENIZER = prompt_files.tokenizer()
TITLE = "data.train_files"


def load(*paths: Path, tokenizer: Any = TOKENIZER, max_samples: int | None = None, **options: Any) -> PromptSet:
    graded = options.pop("graded", True)
    config = DataConfig(**options)
    return PromptSet.load(paths, config, tokenizer, max_samples=max_samples, title=TITLE, graded=graded)


def refusal(*paths: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    assert str(caught.value).startswith(f"{TITLE}: ")
    return caught.value


def by_hand(question: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(f"<|begin|><|user|>{question}<|end|><|assistant|>", add_special_tokens=False))


def test_a_row_is_what_the_file_says(tmp_path: Path) -> None:
    rows = [row(f"Tom has {n}.", str(n), source={"a": n}, note=None if n else "x") for n in range(5)]
    prompts = load(write(tmp_path / "train.parquet", rows))
    assert len(prompts) == 5
    for number, prompt in enumerate(prompts[index] for index in range(5)):
        assert prompt.id == f"train.parquet:{number}"
        assert prompt.tokens == by_hand(f"Tom has {number}.")
        assert prompt.messages == user(f"Tom has {number}.")
        assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("sums", str(number), {"index": 0})
        assert prompt.columns == {
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "source": {"a": number},
            "note": None if number else "x",
        }
    assert prompts.describe() == f"{TITLE}: 5 prompts of 9 to 9 tokens, mean 9"


def test_other_forms_of_the_schema(tmp_path: Path) -> None:
    """Lists as ground truth, no extra_info or a null one, another column of messages, dictionaries, several turns."""
    turns = [
        {"role": "system", "content": "Add."},
        *user("1 + 1?"),
        {"role": "assistant", "content": "2"},
        *user("Sure?"),
    ]
    listed = [row(answer=["5", "five"], chat=turns)]
    for each in listed:
        del each["prompt"], each["extra_info"]
    first = load(write(tmp_path / "a.parquet", listed), prompt_key="chat")[0]
    assert (first.ground_truth, first.extra_info, first.messages) == (["5", "five"], {}, turns)
    text = "<|begin|><|system|>Add.<|end|><|user|>1 + 1?<|end|><|assistant|>2<|end|><|user|>Sure?<|end|><|assistant|>"
    assert TOKENIZER.decode(first.tokens) == text

    table = pa.Table.from_pylist([row(extra_info=None), row(extra_info=None)])
    coded = table.set_column(0, "data_source", table["data_source"].dictionary_encode())
    pq.write_table(coded, tmp_path / "b.parquet")
    second = load(tmp_path / "b.parquet")[1]
    assert (second.data_source, second.extra_info) == ("sums", {})


def test_rows_for_a_reward_model_need_no_ground_truth(tmp_path: Path) -> None:
    rows = [
        row(reward_model={"style": style, "ground_truth": truth}) for style, truth in (("model", None), ("rule", "5"))
    ]
    prompts = load(write(tmp_path / "a.parquet", rows))
    assert [prompts[index].style for index in range(2)] == [Style.model, Style.rule]
    assert [prompts[index].ground_truth for index in range(2)] == [None, "5"]
    alone = load(write(tmp_path / "b.parquet", [row(reward_model={"style": "model"})]))
    assert alone[0].style is Style.model and alone[0].ground_truth is None
    with pytest.raises(DataError, match="reward_model has no ground_truth"):
        load(write(tmp_path / "c.parquet", [row(reward_model={"style": "rule"})]))


def test_without_grading_a_column_of_messages_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": user("2 + 2?"), "level": 3}])
    prompt = load(path, graded=False)[0]
    assert (prompt.data_source, prompt.ground_truth, prompt.columns) == ("unknown", None, {"level": 3})
    odd = write(tmp_path / "odd.parquet", [{"prompt": user("2 + 2?"), "reward_model": "5"}])
    assert load(odd, graded=False)[0].columns == {"reward_model": "5"}
    said = str(refusal(path))
    assert "x.parquet: no column data_source" in said and "x.parquet: no column reward_model" in said


IMAGE = [{"bytes": b"x", "path": None}]


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("agent_name", "tool_agent", "agents"),
        ("interaction_kwargs", {"name": "gsm8k"}, "interactions"),
        ("tools_kwargs", {"calc": {"truth": 0}}, "tools"),
        ("tools", ["calc"], "tools"),
        ("images", IMAGE, "images"),
        ("videos", IMAGE, "videos"),
    ],
)
def test_rows_that_ask_for_more_than_text_are_refused(tmp_path: Path, column: str, value: object, what: str) -> None:
    nothing = dict.fromkeys(value) if isinstance(value, dict) else [] if isinstance(value, list) else None
    path = write(tmp_path / "x.parquet", [row(**{column: each}) for each in (nothing, value, None)])
    said = f"{column}: {what} are not supported, and 1 would be read as text alone: x.parquet:1. Leave these rows out"
    assert said in str(refusal(path))
    assert said in str(refusal(path, graded=False)), "neither is anything generated"
    inside = write(tmp_path / "y.parquet", [row(), row(extra_info={column: value})])
    assert f"extra_info.{column}: {what} are not supported, and 1 would" in str(refusal(inside))
    empty = write(tmp_path / "z.parquet", [row(**({"agent_name": "single_turn_agent"} | {column: nothing}))])
    assert len(load(empty)) == 1, "a column without values, and verl's name of one answer to a prompt"


class OfAgents:
    """Reads the columns of agents: rows of ``tool_agent`` name their tools, rows of ``other`` cannot be run."""

    def problem_of(self, record: dict[str, Any]) -> str:
        return "there is no such loop" if record.get("agent_name") == "other" else ""

    def tools_of(self, record: dict[str, Any]) -> list[dict[str, Any]] | None:
        return [{"name": "calc"}] if record.get("agent_name") == "tool_agent" else None


def test_rows_of_agents_name_their_tools_and_keep_their_columns(tmp_path: Path) -> None:
    kwargs = {"calc": {"create_kwargs": {"truth": 0}}}
    rows = [row(agent_name="tool_agent", tools_kwargs=kwargs), row(agent_name=None, tools_kwargs=None)]
    naming = prompt_files.tokenizer("{{ 'tools ' + tools[0].name if tools else 'none' }}")
    path, title = write(tmp_path / "x.parquet", rows), TITLE
    prompts = PromptSet.load([path], DataConfig(), naming, max_samples=None, title=title, agents=OfAgents())
    assert [TOKENIZER.decode(prompts[place].tokens) for place in (0, 1)] == ["tools calc", "none"]
    assert prompts[0].columns["agent_name"] == "tool_agent" and prompts[0].columns["tools_kwargs"] == kwargs


def test_rows_of_agents_that_cannot_be_run_are_named(tmp_path: Path) -> None:
    rows = [row(agent_name="tool_agent", images=None), row(agent_name="other", images=IMAGE)]
    path = write(tmp_path / "x.parquet", rows)
    with pytest.raises(DataError) as caught:
        PromptSet.load([path], DataConfig(), TOKENIZER, max_samples=None, title=TITLE, agents=OfAgents())
    assert "x.parquet:1: there is no such loop" in str(caught.value)
    assert "images: images are not supported" in str(caught.value) and "agent_name:" not in str(caught.value)


def test_the_template_is_given_its_arguments_and_its_refusals_name_the_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [row(), row(prompt=[{"role": "system", "content": "Add."}])])
    thinking = prompt_files.tokenizer("{{ 'think' if enable_thinking else 'answer' }}")
    prompts = load(path, tokenizer=thinking, chat_template_kwargs={"enable_thinking": True})
    assert TOKENIZER.decode(prompts[0].tokens) == "think"
    error = refusal(path, tokenizer=prompt_files.tokenizer(prompt_files.STRICT))
    assert error.problems == (
        "x.parquet:1: the chat template refuses it: roles must alternate. Mend the messages, or use another template",
    )
    assert "makes no token of it" in str(refusal(path, tokenizer=prompt_files.tokenizer("{{ '' }}")))


def test_a_tokenizer_that_begins_texts_begins_no_prompt_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [row("2 + 3?")])
    assert load(path, tokenizer=prompt_files.beginning_tokenizer())[0].tokens == by_hand("2 + 3?")


def test_files_of_one_name_and_more_rows_than_a_batch(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}/t.parquet", [row(f"{name} {n}") for n in range(1_001)], row_group_size=300)
        for name in ("a", "b")
    ]
    prompts = load(*paths)
    every = [prompts[index] for index in range(len(prompts))]
    assert len({prompt.id for prompt in every}) == 2_002
    assert all(prompt.tokens == by_hand(str(prompt.messages[0]["content"])) for prompt in every)
    assert (every[1_000].id, every[1_001].id) == ("a/t.parquet:1000", "b/t.parquet:0")
    assert every[2_001].messages == user("b 1000")


def test_samples_keep_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [row(f"{n}") for n in range(50)])
    prompts = load(path, max_samples=10)
    assert len(prompts) == prompts.num_rows == 10
    assert all(prompts[index].messages == user(prompts[index].id.rpartition(":")[2]) for index in range(10))
    assert [prompts[i].id for i in range(10)] != [load(path, max_samples=10, seed=2)[i].id for i in range(10)]


LONG = [row("1"), row("123456"), row("12345"), row("1234567890")]  # 5, 10, 9 and 14 tokens with the template


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation.left, (slice(1, None), slice(5, None))),
        (Truncation.right, (slice(0, 9), slice(0, 9))),
        (Truncation.middle, None),
    ],
)
def test_over_long_prompts_are_cut(tmp_path: Path, truncation: Truncation, kept: tuple[slice, slice] | None) -> None:
    prompts = load(write(tmp_path / "x.parquet", LONG), max_prompt_length=9, truncation=truncation)
    ten, fourteen = by_hand("123456"), by_hand("1234567890")
    cut = (ten[:4] + ten[5:], fourteen[:4] + fourteen[9:])  # 9 // 2 of the beginning, 5 of the end
    if kept is not None:
        cut = (ten[kept[0]], fourteen[kept[1]])
    assert [prompts[index].tokens for index in range(4)] == [by_hand("1"), cut[0], by_hand("12345"), cut[1]]
    assert (prompts.num_truncated, prompts.num_left_out) == (2, 0)
    assert prompts.describe().endswith(f"; 2 cut to 9 tokens ({truncation.value})")


def test_over_long_prompts_are_left_out_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", LONG)
    prompts = load(path, max_prompt_length=9, filter_overlong_prompts=True, truncation=Truncation.left)
    assert [prompts[index].id for index in range(len(prompts))] == ["x.parquet:0", "x.parquet:2"]
    assert (prompts.num_truncated, prompts.num_left_out, prompts.num_rows) == (0, 2, 4)
    assert "2 of 4 left out, longer than 9 tokens" in prompts.describe()
    (problem,) = refusal(path, max_prompt_length=9).problems
    begin = "2 prompts have more than data.max_prompt_length=9 tokens, the longest 14: x.parquet:1, x.parquet:3. "
    assert problem.startswith(begin) and "data.filter_overlong_prompts=true" in problem
    assert len(load(path, max_prompt_length=14)) == 4


def test_no_prompt_left_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", LONG)
    said = str(refusal(path, max_prompt_length=3, filter_overlong_prompts=True))
    assert "no prompt is left: all 4 have more than data.max_prompt_length=3 tokens. Write up to 14" in said
    schema = pa.Table.from_pylist(LONG).schema
    assert "the files have no rows" in str(refusal(write(tmp_path / "empty.parquet", [], schema)))
    assert "names no file" in str(refusal())


def test_every_broken_row_of_every_file_is_named_at_once(tmp_path: Path) -> None:
    rows = [
        row(),
        row(prompt=None),
        row(prompt=[]),
        row(prompt=user(None)),
        row(prompt=[{"role": None, "content": "x"}]),
        row(answer=None),
        row(reward_model=None),
        row(data_source=None),
        row(data_source=""),
        row("last"),
    ]
    broken = write(tmp_path / "broken.parquet", rows)
    flat = write(tmp_path / "flat.parquet", [row(prompt="2 + 3?", extra_info="{}", data_source=3, reward_model="5")])
    bare = write(tmp_path / "bare.parquet", [{"question": "2 + 3?"}])
    text = tmp_path / "text.parquet"
    text.write_text("prompt")
    problems = refusal(broken, flat, bare, text, tmp_path / "none.parquet").problems
    starts = [f"broken.parquet:{number}: " for number in range(1, 9)]
    assert [problem for problem in problems if problem.startswith("broken")] == [
        f"{starts[0]}prompt is null. Write a list of {{role, content}}, or leave the row out",
        f"{starts[1]}prompt has no messages. Write a list of {{role, content}}, or leave the row out",
        f"{starts[2]}prompt has no content in message 0. Write a list of {{role, content}}, or leave the row out",
        f"{starts[3]}prompt has no role in message 0. Write a list of {{role, content}}, or leave the row out",
        *(
            f"{start}reward_model has no ground_truth. Write the right answer, or leave the row out"
            for start in starts[4:6]
        ),
        *(f"{start}data_source is null or empty. Write the name of the data set" for start in starts[6:]),
    ]
    wrong = [problem.partition(".parquet: ")[2] for problem in problems if problem.startswith("flat")]
    assert [problem.split(",")[0] for problem in wrong] == [
        "column prompt is string",
        "column data_source is int64",
        "column extra_info is string",
        "column reward_model is string",
    ]
    missing = [problem.split(".parquet: ")[1] for problem in problems if problem.startswith("bare")]
    assert missing[0].startswith("no column prompt; it has question. Write")
    assert [problem.split(".")[0] for problem in missing[1:]] == ["no column data_source", "no column reward_model"]
    assert any("none.parquet: there is no such file" in problem for problem in problems)
    assert any("text.parquet: cannot be read as parquet" in problem for problem in problems)


def test_rows_with_one_fault_are_one_line_with_a_count(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [row(answer="1"), *(row(answer=None) for _ in range(25))])
    error = refusal(path)
    assert len(error.problems) == 25
    assert str(error).count("x.parquet:") == 1 and "(and 24 more with this fault)" in str(error)


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    content = not_utf8([b"2 + 3?", b"caf\xe9", b"4 + 4?"])
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), content], names=["role", "content"])
    table = pa.Table.from_pylist([row()] * 3)
    prompts = pa.ListArray.from_arrays([0, 1, 2, 3], messages)
    pq.write_table(table.set_column(1, "prompt", prompts), tmp_path / "x.parquet")
    (problem,) = refusal(tmp_path / "x.parquet").problems
    assert problem.startswith("x.parquet:1: has text that is no UTF-8.")


def test_cutting_keeps_what_it_says() -> None:
    tokens = list(range(10))
    for length in range(1, 12):
        left, right, middle = (list(truncated(tokens, length, kind)) for kind in list(Truncation)[1:])
        kept = min(length, 10)
        assert left == tokens[10 - kept :]
        assert right == tokens[:kept]
        assert len(middle) == kept and middle == sorted(set(middle))
        head = int(np.flatnonzero(np.diff([-1, *middle, 10]) > 1)[0]) if length < 10 else 10
        assert head == (length // 2 if length < 10 else 10)


def test_the_rows_of_the_prompts_with_all_columns(tmp_path: Path) -> None:
    long = row("Tom " * 40, "4")
    first = write(tmp_path / "a.parquet", [row("1?", "1"), long, row("2?", "2")])
    second = write(tmp_path / "b.parquet", [row("3?", "3", note="x")])
    prompts = load(first, second, max_prompt_length=20, filter_overlong_prompts=True)
    rows = [row("1?", "1", note=None), row("2?", "2", note=None), row("3?", "3", note="x")]
    assert prompts.table().to_pylist() == rows
    assert [prompts[index].messages for index in range(3)] == [each["prompt"] for each in rows]


def test_columns_of_two_types_do_not_go_together(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.parquet", [row(level=level)]) for name, level in (("a", 1), ("b", "hard"))]
    with pytest.raises(DataError, match=r"the files' columns do not go together.* Name files of one schema"):
        load(*paths).table()
