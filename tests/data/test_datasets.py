"""Known data sets in the field's schema: the real GSM8K, and the forms that the others are published in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.data import DataConfig, SftDataConfig
from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.data.conversations import ConversationSet
from mcore_rl.data.datasets import (
    AS_PUBLISHED,
    DAPO_PROMPT,
    EURUS_ABILITIES,
    arithmetic_rows,
    last_boxed,
    product_rows,
    published_rows,
    square_rows,
    write_rows,
)
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tables import read_table
from mcore_rl.ground.errors import DataError
from mcore_rl.rewards.registry import grader_of
from mcore_rl.rewards.score import RewardRequest
from tests.support import prompt_files
from tests.support.chat_styles import style
from tests.support.pictures import picture
from tests.support.skips import NOT_INSTALLED

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info", "response"]


def jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"{NOT_INSTALLED}the GSM8K files in {GSM8K}")
def test_the_real_gsm8k(tmp_path: Path) -> None:
    rows = published_rows("gsm8k", str(GSM8K))
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 7_473, "test": 1_319}
    for split, of_split in rows.items():
        write_rows(of_split, tmp_path / f"{split}.parquet")
        originals = [json.loads(line) for line in (GSM8K / f"{split}.jsonl").read_text("utf-8").splitlines()]
        table = pq.read_table(tmp_path / f"{split}.parquet")
        assert table.column_names == COLUMNS
        for index, (row, original) in enumerate(zip(table.to_pylist(), originals, strict=True)):
            truth = row["reward_model"]["ground_truth"]
            assert re.fullmatch(r"-?\d+(\.\d+)?", truth)
            assert original["answer"].replace(",", "").endswith(f"#### {truth}")
            assert row["extra_info"] == {"split": split, "index": index} | original
            assert row["response"] == original["answer"]
    assert rows["train"][0]["prompt"] == [
        {
            "role": "user",
            "content": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
            "How many clips did Natalia sell altogether in April and May? Let's think step by step and output the "
            'final answer after "####".',
        }
    ]
    first = rows["train"][0]
    assert (first["data_source"], first["ability"], first["reward_model"]) == (
        "openai/gsm8k",
        "math",
        {"style": "rule", "ground_truth": "72"},
    )


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"{NOT_INSTALLED}the GSM8K files in {GSM8K}")
def test_the_real_gsm8k_for_agents(tmp_path: Path) -> None:
    """The columns that verl's examples write, and what runs agents takes them."""
    plain = published_rows("gsm8k", str(GSM8K))["test"]
    agents = AgentRunner(AgentConfig(tools=["calc_gsm8k_reward"]), CodeConfig(), style("qwen2.5"))
    for name, loop in (("gsm8k-tools", "tool_agent"), ("gsm8k-interaction", "interaction")):
        rows = published_rows(name, str(GSM8K))["test"]
        write_rows(rows, tmp_path / "test.parquet")
        table = pq.read_table(tmp_path / "test.parquet")
        kwargs = "tools_kwargs" if name == "gsm8k-tools" else "interaction_kwargs"
        assert table.column_names == [*COLUMNS[:-1], "agent_name", kwargs]
        for row, other in zip(table.to_pylist(), plain, strict=True):
            truth = other["reward_model"]["ground_truth"]
            assert (row["agent_name"], row["reward_model"]) == (loop, other["reward_model"])
            system, user = row["prompt"]
            assert user["content"].startswith(other["extra_info"]["question"]) and user["content"].endswith("`####`.")
            given = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
            if loop == "interaction":
                given = {"name": "gsm8k", "query": user["content"], "ground_truth": truth}
                assert "point out your answer is wrong" in system["content"]
            else:
                assert "`calc_gsm8k_reward`" in system["content"]
            assert row[kwargs] == given
        loaded = PromptSet.load(
            [tmp_path / "test.parquet"], DataConfig(max_prompt_length=2048), style("qwen2.5"), max_samples=None,
            title="data.train_files", agents=agents,
        )  # fmt: skip
        assert len(loaded) == 1_319 and agents.loop_of_row(loaded[0]) == loop


def test_dapo_for_a_model_with_an_interpreter(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "train.jsonl", {"problem": "Halve 1.", "answer": "0.5"})
    (row,) = published_rows("dapo-interpreter", source)["train"]
    (message,) = row["prompt"]
    assert message["content"] == (
        DAPO_PROMPT.replace("{problem}", "Halve 1.")
        + "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
    )
    assert (row["agent_name"], row["data_source"]) == ("tool_agent", "math_dapo")
    again = jsonl(tmp_path / "again.jsonl", {"prompt": row["prompt"][:1], "reward_model": {"ground_truth": "0.5"}})
    assert "Halve 1." in published_rows("dapo-interpreter", again)["train"][0]["prompt"][0]["content"]


def test_a_number_with_commas(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "train.jsonl", {"question": "How much?", "answer": "So 1,000 + 1.\n#### 1,001 "})
    assert published_rows("gsm8k", source)["train"][0]["reward_model"]["ground_truth"] == "1001"


def test_math(tmp_path: Path) -> None:
    record = {"problem": "Halve 1.", "level": "Level 1", "solution": "It is $\\boxed{2}$, no, $\\boxed{\\frac{1}{2}}$."}
    for split in ("train", "test"):
        (tmp_path / split / "algebra").mkdir(parents=True)
        (tmp_path / split / "algebra" / "1.json").write_text(json.dumps(record))
    rows = published_rows("math", str(tmp_path))
    assert rows["test"] == [
        {
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": prompt_files.user(
                "Halve 1. Let's think step by step and output the final answer within \\boxed{}."
            ),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
            "extra_info": {"split": "test", "index": 0, "answer": record["solution"], "question": "Halve 1."},
            "response": record["solution"],
        }
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{1} then \\fbox{{a}{b}} end}", "{a}{b}"),
        ("\\fbox{1} then \\boxed{\\text{(A) }x}", "\\text{(A) }x"),
        ("so $\\boxed 7$.", "7"),
        ("\\boxed{never closed", None),
        ("\\boxed{}", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def published(problem: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": prompt_files.user(DAPO_PROMPT.replace("{problem}", problem)),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


def test_dapo_repeats_itself_and_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "dapo-math-17k.parquet"
    prompt_files.write(path, [published("1 + 1?", "2"), published("2 + 2?", "4"), published("1 + 1?", "2")])
    rows = published_rows("dapo-math", str(path))["train"]
    assert [(row["extra_info"]["question"], row["extra_info"]["index"]) for row in rows] == [
        ("1 + 1?", 0),
        ("2 + 2?", 1),
    ]
    assert rows[1]["prompt"] == published("2 + 2?", "4")["prompt"]
    assert (rows[1]["reward_model"]["ground_truth"], rows[1]["data_source"], rows[1]["response"]) == (
        "4",
        "math_dapo",
        None,
    )
    write_rows(rows, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").column_names == COLUMNS[:-1]


@pytest.mark.parametrize(
    "record",
    [
        {"ID": "2024-I-4", "Problem": "1 + 1?", "Solution": "Count: 2.", "Answer": 2},
        {"id": 60, "problem": "1 + 1?", "solution": "Count: 2.", "answer": "2", "url": "x", "year": "2024"},
        published("1 + 1?", "2"),
        {"prompt": "1 + 1?", "solution": "2"},
    ],
)
def test_aime24_in_the_forms_it_is_published_in(tmp_path: Path, record: dict[str, Any]) -> None:
    (row,) = published_rows("aime24", jsonl(tmp_path / "aime.jsonl", record))["test"]
    assert row["prompt"] == published("1 + 1?", "2")["prompt"]
    assert row["prompt"][0]["content"].startswith(
        "Solve the following math problem step by step. The last line of your"
    )
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("aime24", "2")
    assert row["extra_info"] == {"split": "test", "index": 0, "answer": "2", "question": "1 + 1?"}


SYSTEM = "\nWhen tackling complex reasoning tasks, you have access to the following actions.\n"


def eurus2(source: str, ability: str, truth: object, *roles: str) -> dict[str, Any]:
    """A row of the published columns, with a problem of ours."""
    said = {"system": SYSTEM, "user": f"What of {source} and {truth}?"}
    return {
        "data_source": source,
        "prompt": [{"content": said[role], "role": role} for role in roles or ("system", "user")],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }


def test_eurus2_has_math_and_code_as_they_are_published_and_graders_that_read_them(tmp_path: Path) -> None:
    script = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    call = json.dumps({"fn_name": "double", "inputs": [[3]], "outputs": [6]})
    of_math = [eurus2(source, "math", "\\frac{1}{2}") for source, kind in EURUS_ABILITIES.items() if kind == "math"]
    of_code = [eurus2(source, "code", script) for source, kind in EURUS_ABILITIES.items() if kind == "code"]
    published = [*of_math, *of_code, eurus2("taco", "code", call), of_math[0]]
    for split in ("train", "validation"):
        prompt_files.write(tmp_path / f"{split}.parquet", published)
    rows = published_rows("eurus2-rl", str(tmp_path))
    assert rows["train"][0]["extra_info"]["split"] == "train" and rows.keys() == {"train", "validation"}
    write_rows(rows["validation"], tmp_path / "out.parquet")
    again = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(again) == len(published) - 1, "a repeated row is kept once"
    answers = {"math": "It is $\\boxed{0.5}$.", "code": "```python\nprint(sum(map(int, input().split())))\n```"}
    config = RewardConfig(code=CodeConfig(continuous=True, first_cases=10, allow_weak_confinement=True))
    for row, original in zip(again, published[:-1], strict=True):
        for column in ("data_source", "ability"):
            assert row[column] == original[column]
        assert [dict(each) for each in row["prompt"]] == original["prompt"]
        truth = row["reward_model"]["ground_truth"]
        assert row["reward_model"] == original["reward_model"]
        assert row["extra_info"]["answer"] == (truth if row["ability"] == "math" else None)
        answer = "```python\ndef double(x):\n    return 2 * x\n```" if truth == call else answers[row["ability"]]
        for said, value in ((answer, 1.0), ("```python\n1\n```", 0.0)):
            score = grader_of(row["data_source"])(RewardRequest(("row", 0), row["data_source"], said, truth), config)
            assert score.value == value


def test_what_eurus2_has_not_is_refused_in_one_message(tmp_path: Path) -> None:
    good, cases = eurus2("taco", "code", '{"inputs": ["1"], "outputs": ["1"]}'), '{"inputs": ["1"], "outputs": []}'
    broken = {
        "data_source is 'leetcode', and none of numina_aops_forum": eurus2("leetcode", "code", "x"),
        "data_source is None": {"id": 1, "task": "Math", "instruction": "x", "reference": "1"},
        "ability is 'math', and apps is code": eurus2("apps", "math", "1"),
        "prompt is not a message of the user's": eurus2("apps", "code", cases, "user", "user"),
        "prompt is not": eurus2("apps", "code", cases) | {"prompt": "x"},
        "reward_model.ground_truth is no text": eurus2("numina_cn_k12", "math", None),
        "reward_model.ground_truth is no JSON": eurus2("codeforces", "code", "1 2"),
        "reward_model.ground_truth has no inputs with an output each": eurus2("codecontests", "code", cases),
        "reward_model.ground_truth has no inputs": eurus2("codecontests", "code", "[]"),
    }
    with pytest.raises(DataError) as caught:
        published_rows("eurus2-rl", jsonl(tmp_path / "train.jsonl", good, *broken.values()))
    assert len(caught.value.problems) == len(broken)
    for number, (said, problem) in enumerate(zip(broken, caught.value.problems, strict=True), 2):
        assert problem.startswith(f"train.jsonl line {number}: {said}") and problem.endswith(AS_PUBLISHED)


def test_rows_of_several_row_groups_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("datasets", "sources", "tables"):
        monkeypatch.setattr(f"mcore_rl.data.{module}.BATCH", 4)
    rows = [eurus2("apps", "code", json.dumps({"inputs": [str(n)], "outputs": ["1"]})) for n in range(10)]
    prompt_files.write(tmp_path / "train.parquet", rows)
    written = published_rows("eurus2-rl", str(tmp_path / "train.parquet"))["train"]
    write_rows(written, tmp_path / "out.parquet")
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3
    read = read_table(tmp_path / "out.parquet", "out", [])
    assert read is not None
    assert [row["reward_model"] for row in read.table.to_pylist()] == [row["reward_model"] for row in rows]


def test_records_of_something_else_are_named(tmp_path: Path) -> None:
    good = {"question": "1 + 1?", "answer": "#### 2"}
    broken = [
        {"question": "x", "answer": "2"},
        {"question": "x", "answer": "#### "},
        {"question": None, "answer": "#### 2"},
    ]
    with pytest.raises(DataError) as caught:
        published_rows("gsm8k", jsonl(tmp_path / "train.jsonl", good, *broken))
    assert [problem.split(". ")[0] for problem in caught.value.problems] == [
        "train.jsonl line 2: answer has no number after ####",
        "train.jsonl line 3: answer has no number after ####",
        "train.jsonl line 4: has no text in question; it has question, answer",
    ]
    with pytest.raises(DataError, match="split train has no records"):
        published_rows("gsm8k", jsonl(tmp_path / "train.jsonl"))
    with pytest.raises(DataError, match=r"line 1: solution has no answer in \\boxed"):
        published_rows("math", jsonl(tmp_path / "train.jsonl", {"problem": "x", "solution": "2"}))
    with pytest.raises(DataError, match=r"line 1: has question, and no problem with an answer"):
        published_rows("aime24", jsonl(tmp_path / "test.jsonl", {"question": "x"}))
    with pytest.raises(DataError, match=r"line 1: prompt or reward_model\.ground_truth is empty"):
        published_rows("dapo-math", jsonl(tmp_path / "train.jsonl", {"prompt": prompt_files.user("x")}))


def test_arithmetic_serves_both_kinds_of_training(tmp_path: Path) -> None:
    rows = arithmetic_rows(1, 30, 10, seed=2)
    for split, of_split in rows.items():
        write_rows(of_split, tmp_path / f"{split}.parquet")
    tokenizer = prompt_files.tokenizer()
    options = {"max_samples": None, "title": "data.train_files"}
    prompts = PromptSet.load([tmp_path / "train.parquet"], DataConfig(), tokenizer, **options)
    taught = ConversationSet.load([tmp_path / "train.parquet"], SftDataConfig(), tokenizer, **options)
    assert (len(prompts), len(taught), len(rows["val"])) == (30, 30, 10)
    for index, row in enumerate(rows["train"]):
        prompt, conversation = prompts[index], taught[index]
        assert prompt.tokens == conversation.tokens[: len(prompt.tokens)]
        response = [t for t, mask in zip(conversation.tokens, conversation.mask, strict=True) if mask]
        assert tokenizer.decode(response) == f"{row['extra_info']['answer']}<|end|>"
        assert row["extra_info"]["answer"].endswith(f"#### {prompt.ground_truth}")
        assert prompt.data_source == "arithmetic"
    questions = [{row["extra_info"]["question"] for row in of_split} for of_split in rows.values()]
    assert not questions[0] & questions[1]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "train.parquet"
    write_rows(arithmetic_rows(1, 3, 1, 0)["train"], path)
    before = path.read_bytes()
    write_rows(arithmetic_rows(1, 3, 1, 0)["train"], path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["train.parquet"]

    def full_disk(where: Path, schema: object) -> None:
        Path(where).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", full_disk)
    with pytest.raises(DataError, match=r"train\.parquet: 1 problem:\n  - cannot be written: No space left on device"):
        write_rows(arithmetic_rows(1, 4, 1, 0)["train"], path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["train.parquet"]


def test_products_serve_an_agent_and_its_warm_up(tmp_path: Path) -> None:
    rows = product_rows(12, 4, seed=2)
    assert {name: len(of_one) for name, of_one in rows.items()} == {"train": 12, "val": 4, "sft": 12}
    for name, of_one in rows.items():
        write_rows(of_one, tmp_path / f"{name}.parquet")
    columns = {name: set(pq.read_table(tmp_path / f"{name}.parquet").column_names) for name in rows}
    shared = {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert columns == {"train": shared | {"agent_name"}, "val": shared | {"agent_name"}, "sft": shared | {"messages"}}
    for warm, row in zip(rows["sft"], rows["train"], strict=True):
        assert warm["prompt"] == row["prompt"] == warm["messages"][:1] and row["agent_name"] == "tool_agent"
        assert warm["messages"][2]["content"] == row["reward_model"]["ground_truth"]


def published_geometry(folder: Path, **changes: Any) -> str:
    """Files as hiyouga/geometry3k has them; the same is asked of two pictures."""
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        records = [
            {"images": [{"bytes": picture(seed=seed), "path": None}], "problem": "<image>Find x.", "answer": f"{seed}"}
            for seed in (1, 2)
        ]
        table = pa.Table.from_pylist([record | changes for record in records])
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return str(folder)


def test_geo3k(tmp_path: Path) -> None:
    """Word for word what verl's examples/data_preprocess/geo3k.py writes; and a run reads it."""
    rows = published_rows("geo3k", published_geometry(tmp_path))
    assert {split: len(each) for split, each in rows.items()} == {"train": 2, "validation": 2, "test": 2}
    write_rows(rows["test"], tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    columns = ["data_source", "prompt", "images", "ability", "reward_model", "extra_info"]
    assert table.column_names == columns
    asked = (
        "<image>Find x. You FIRST think about the reasoning process as an internal monologue and then provide the "
        "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. "
        "The final answer MUST BE put in \\boxed{}."
    )
    assert table.to_pylist()[1] == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": asked}],
        "images": [{"bytes": picture(seed=2), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "test", "index": 1, "answer": "2", "question": "<image>Find x."},
    }
    reader = PictureReader(Sizing(14))
    prompts = PromptSet.load(
        [tmp_path / "out.parquet"], DataConfig(), style("qwen2.5-vl"), max_samples=None, title="x", pictures=reader
    )
    assert [len(prompts[index].media) for index in range(2)] == [1, 1]
    response = "<think>It is so.</think> \\boxed{2}"
    request = RewardRequest(("p", 0), prompts[1].data_source, response, prompts[1].ground_truth)
    assert grader_of(prompts[1].data_source)(request, RewardConfig()).value == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": [{"bytes": None, "path": "a.png"}]}, "images[0] has no bytes. Take the files as published"),
        ({"images": [{"bytes": b"x", "path": None}]}, "images[0] is no PNG, JPEG or WEBP"),
        ({"problem": ""}, "has no text in problem"),
    ],
)
def test_records_of_another_data_set_are_no_geometry(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        published_rows("geo3k", published_geometry(tmp_path, **changes))
    assert any(said in problem and problem.startswith("train-00000") for problem in caught.value.problems)


def test_squares(tmp_path: Path) -> None:
    rows = square_rows(12, 4, seed=2)
    assert {split: len(each) for split, each in rows.items()} == {"train": 12, "val": 4}
    write_rows(rows["train"], tmp_path / "train.parquet")
    reader = PictureReader(Sizing(14))
    prompts = PromptSet.load(
        [tmp_path / "train.parquet"], DataConfig(), style("qwen3-vl"), max_samples=None, title="x", pictures=reader
    )
    for row, index in zip(rows["train"], range(12), strict=True):
        prompt = prompts[index]
        assert prompt.messages == [{"role": "user", "content": "<image>How many red squares are there?"}]
        assert prompts.image_files(index) == [row["images"][0]["bytes"]] and prompt.media[0].grid.tokens == 4
        request = RewardRequest(("p", 0), prompt.data_source, row["response"], prompt.ground_truth)
        assert grader_of(prompt.data_source)(request, RewardConfig()).correct == 1.0
