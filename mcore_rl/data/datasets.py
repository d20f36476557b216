"""Known data sets as rows in the field's schema, and the parquet file that holds them.

A row is ``data_source``, ``prompt`` (list of {role, content}), ``ability``, ``reward_model`` ({style: rule,
ground_truth}) and ``extra_info`` ({split, index, answer, question}); and ``response``, the solution as text, if the
data set has one, so that the same file serves supervised fine-tuning.  Prompts are those of verl (gsm8k, math) and
DAPO (arXiv:2503.14476; dapo-math, aime24), of the GRPO course for TRL (gsm8k-xml), and those of Eurus-2-RL-Data as they
are published.  Those for agents have ``agent_name``, ``tools_kwargs`` and ``interaction_kwargs``, those with pictures
``images``.

Invariant: a file appears under its name only when it is complete, and equal records give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.arithmetic import Split, generate, products
from mcore_rl.data.media.images import image_size, values_of
from mcore_rl.data.sources import Record, read_splits
from mcore_rl.data.squares import QUESTION, squares
from mcore_rl.data.tables import BATCH
from mcore_rl.ground.errors import DataError
from mcore_rl.ground.json_text import read_json

DatasetRow = dict[str, Any]

# Of verl's examples/data_preprocess/gsm8k_multiturn_w_tool.py and gsm8k_multiturn_w_interaction.py.
TOOL_SYSTEM_PROMPT = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reasoning step by step "
    "before any tool call. You should use the `calc_gsm8k_reward` tool after step by step solving the question, before "
    "generate final answer at least once and refine your answer if necessary. Put your final answer in the format of "
    "`#### <answer>`."
)
INTERACTION_SYSTEM_PROMPT = (
    "You are a math expert. You are given a question and you need to solve it step by step. You should rethinking "
    "carefully if user point out your answer is wrong. Put your final answer in the format of `#### <answer>`."
)
TURNS_INSTRUCTION = "Let's think step by step and output the final answer after `####`."
# Of verl's recipe/retool/retool.py, behind DAPO's prompt.
INTERPRETER_INSTRUCTION = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
# Of verl's examples/data_preprocess/geo3k.py.
THINK_INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
# Of grpo_demo.py, gist willccbb/4676755236bb08cab5f4e54a0475d6fb, with its line breaks: a model sees them.
XML_SYSTEM_PROMPT = "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
AS_PUBLISHED = "Take the files as published"
# Of Eurus-2-RL-Data, by data_source, the ability; the graders of these names are those that verl gives them.
EURUS_ABILITIES = {
    **dict.fromkeys(
        (
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        "math",
    ),
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), "code"),
}
TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": pa.list_(pa.struct({"role": TEXT, "content": TEXT})),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": TEXT})),
        "ability": TEXT,
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": pa.struct({"split": TEXT, "index": pa.int64(), "answer": TEXT, "question": TEXT}),
        "response": TEXT,
        "messages": pa.list_(pa.struct({"role": TEXT, "content": TEXT})),
        "agent_name": TEXT,
        "tools_kwargs": pa.struct(
            {"calc_gsm8k_reward": pa.struct({"create_kwargs": pa.struct({"ground_truth": TEXT})})}
        ),
        "interaction_kwargs": pa.struct({"name": TEXT, "query": TEXT, "ground_truth": TEXT}),
    }
)
# Columns of files in which a row has a value.
OPTIONAL = ("images", "response", "messages", "agent_name", "tools_kwargs", "interaction_kwargs")


@dataclass(frozen=True)
class Solved:
    """A problem with its answer.

    prompt: the user's message.  solution: None if there is only an answer.  system: the message before it; "": none.
    agent: the columns that ask for an agent; None: one answer is all.
    data_source: where it differs from the data set's.  ability: "math" or "code", whose ground truth is no answer.
    images: the pictures of the question, as {bytes, path}.
    """

    question: str
    prompt: str
    ground_truth: str
    solution: str | None
    system: str = ""
    agent: Mapping[str, Any] | None = None
    data_source: str = ""
    ability: str = "math"
    images: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Dataset:
    """A published data set.

    data_source: its name for rewards; "": each record has its own.  hub_id: where it is published.
    splits: the splits that it has.
    solved: parses a record; raises ValueError with the problem and the remedy.  folder: in the Hub's repository.
    """

    data_source: str
    hub_id: str
    splits: tuple[str, ...]
    solved: Callable[[Mapping[str, Any]], Solved]
    folder: str = ""


def gsm8k(fields: Mapping[str, Any]) -> Solved:
    """Cobbe et al., arXiv:2110.14168: question, and an answer that ends in ``#### number``."""
    question = _text(fields, "question")
    answer = _text(fields, "answer")
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise ValueError(f"answer has no number after ####. {AS_PUBLISHED}")
    return Solved(question, f"{question} {GSM8K_INSTRUCTION}", number.strip().replace(",", ""), answer)


def gsm8k_xml(fields: Mapping[str, Any]) -> Solved:
    """``gsm8k`` as the GRPO course for TRL asks it: ``<reasoning>`` and ``<answer>``, and no solution to imitate."""
    solved = gsm8k(fields)
    number = solved.ground_truth.replace("$", "")
    return Solved(solved.question, solved.question, number, None, system=XML_SYSTEM_PROMPT)


def gsm8k_tools(fields: Mapping[str, Any]) -> Solved:
    """``gsm8k`` for a model that may ask whether an answer is right, as verl's example: tool ``calc_gsm8k_reward``."""
    solved = gsm8k(fields)
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solved.ground_truth}}}
    return replace(
        _in_turns(solved), system=TOOL_SYSTEM_PROMPT, agent={"agent_name": "tool_agent", "tools_kwargs": kwargs}
    )


def gsm8k_interaction(fields: Mapping[str, Any]) -> Solved:
    """``gsm8k`` for a model that is told whether its answer is right, until it is, as verl's example."""
    solved = _in_turns(gsm8k(fields))
    kwargs = {"name": "gsm8k", "query": solved.prompt, "ground_truth": solved.ground_truth}
    agent = {"agent_name": "interaction", "interaction_kwargs": kwargs}
    return replace(solved, system=INTERACTION_SYSTEM_PROMPT, agent=agent)


def _in_turns(solved: Solved) -> Solved:
    return replace(solved, prompt=f"{solved.question} {TURNS_INSTRUCTION}", solution=None)


def dapo_interpreter(fields: Mapping[str, Any]) -> Solved:
    """``dapo`` for a model with a Python interpreter, as verl's ReTool recipe (arXiv:2504.11536)."""
    solved = dapo(fields)
    prompt = DAPO_PROMPT.replace("{problem}", solved.question) + INTERPRETER_INSTRUCTION
    return replace(solved, prompt=prompt, agent={"agent_name": "tool_agent"})


def math(fields: Mapping[str, Any]) -> Solved:
    """Hendrycks et al., arXiv:2103.03874: problem, and a solution with the answer in its last ``\\boxed``."""
    problem = _text(fields, "problem")
    solution = _text(fields, "solution")
    answer = last_boxed(solution)
    if not answer:
        raise ValueError(f"solution has no answer in \\boxed{{}}. {AS_PUBLISHED}")
    return Solved(problem, f"{problem} {MATH_INSTRUCTION}", answer, solution)


def dapo(fields: Mapping[str, Any]) -> Solved:
    """Yu et al., arXiv:2503.14476: rows in our schema, or a problem and an answer under their usual names."""
    named = {name.lower(): value for name, value in fields.items()}
    if isinstance(named.get("prompt"), list) and named["prompt"]:
        prompt = named["prompt"][-1].get("content")
        truth = (named.get("reward_model") or {}).get("ground_truth")
        if not prompt or truth in (None, ""):
            raise ValueError(f"prompt or reward_model.ground_truth is empty. {AS_PUBLISHED}")
        before, after = DAPO_PROMPT.split("{problem}")
        return Solved(prompt.removeprefix(before).removesuffix(after), prompt, str(truth), None)
    problem = next((named[name] for name in ("problem", "question", "prompt") if named.get(name)), None)
    answer = next((named[name] for name in ("answer", "solution") if named.get(name) not in (None, "")), None)
    if not isinstance(problem, str) or answer is None:
        raise ValueError(f"has {', '.join(fields)}, and no problem with an answer. {AS_PUBLISHED}")
    return Solved(problem, DAPO_PROMPT.replace("{problem}", problem), str(answer), None)


def eurus2(fields: Mapping[str, Any]) -> Solved:
    """Cui et al., arXiv:2502.01456: rows in our schema, of mathematics and of code.

    Each is kept as it is, with its system prompt, and checked: what graders could not read is refused here, before
    anything is written.
    """
    source = fields.get("data_source")
    if source not in EURUS_ABILITIES:
        raise ValueError(f"data_source is {source!r}, and none of {', '.join(EURUS_ABILITIES)}. {AS_PUBLISHED}")
    ability = EURUS_ABILITIES[source]
    if fields.get("ability") != ability:
        raise ValueError(f"ability is {fields.get('ability')!r}, and {source} is {ability}. {AS_PUBLISHED}")
    said = _said(fields.get("prompt"))
    if tuple(role for role, _ in said) not in (("user",), ("system", "user")):
        raise ValueError(f"prompt is not a message of the user's, with or without one of the system's. {AS_PUBLISHED}")
    truth = (fields.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"reward_model.ground_truth is no text. {AS_PUBLISHED}")
    if ability == "code":
        _check_cases(truth)
    system = said[0][1] if len(said) == 2 else ""
    question = said[-1][1]
    return Solved(question, question, truth, None, system=system, data_source=source, ability=ability)


def geo3k(fields: Mapping[str, Any]) -> Solved:
    """Lu et al., arXiv:2105.04165, as LLaMA-Factory's and verl's examples have it: problem, answer, images."""
    problem = _text(fields, "problem")
    answer = _text(fields, "answer")
    images = values_of(fields.get("images"))
    for place, image in enumerate(images):
        content = image.get("bytes") if isinstance(image, Mapping) else None
        if not isinstance(content, bytes):
            raise ValueError(f"images[{place}] has no bytes. {AS_PUBLISHED}")
        try:
            image_size(content)
        except ValueError as error:
            raise ValueError(f"images[{place}] {error}") from error
    return Solved(problem, f"{problem} {THINK_INSTRUCTION}", answer, None, images=images)


DATASETS: dict[str, Dataset] = {
    "gsm8k": Dataset("openai/gsm8k", "openai/gsm8k", ("train", "test"), gsm8k, folder="main"),
    "gsm8k-xml": Dataset("gsm8k_xml", "openai/gsm8k", ("train", "test"), gsm8k_xml, folder="main"),
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval", ("train", "test"), math
    ),
    "dapo-math": Dataset("math_dapo", "BytedTsinghua-SIA/DAPO-Math-17k", ("train",), dapo),
    "aime24": Dataset("aime24", "BytedTsinghua-SIA/AIME-2024", ("test",), dapo),
    "gsm8k-tools": Dataset("openai/gsm8k", "openai/gsm8k", ("train", "test"), gsm8k_tools, folder="main"),
    "gsm8k-interaction": Dataset("openai/gsm8k", "openai/gsm8k", ("train", "test"), gsm8k_interaction, folder="main"),
    "dapo-interpreter": Dataset("math_dapo", "BytedTsinghua-SIA/DAPO-Math-17k", ("train",), dapo_interpreter),
    "aime24-interpreter": Dataset("aime24", "BytedTsinghua-SIA/AIME-2024", ("test",), dapo_interpreter),
    "geo3k": Dataset("hiyouga/geometry3k", "hiyouga/geometry3k", ("train", "validation", "test"), geo3k, folder="data"),
    "eurus2-rl": Dataset("", "PRIME-RL/Eurus-2-RL-Data", ("train", "validation"), eurus2),
}


def published_rows(name: str, source: str) -> dict[str, list[DatasetRow]]:
    """The rows of each split of data set ``name``, without repeated questions (DAPO repeats its own).

    A question about a picture is no repetition: many ask the same of another one.
    source: a folder, a file, or a Hub id.  DataError: it cannot be read, or a record is not of this data set.
    """
    dataset = DATASETS[name]
    problems: list[str] = []
    rows: dict[str, list[DatasetRow]] = {}
    for split, records in read_splits(source, dataset.splits, dataset.folder).items():
        solved = [(index, each) for index, record in enumerate(records) if (each := _solved(dataset, record, problems))]
        first = {index if each.images else each.question: (index, each) for index, each in reversed(solved)}
        kept = sorted(first.values(), key=lambda pair: pair[0])
        rows[split] = [_row(dataset.data_source, split, index, each) for index, each in kept]
    problems += [f"split {split} has no records. {AS_PUBLISHED}" for split, kept in rows.items() if not kept]
    if problems:
        raise DataError(source, problems)
    return rows


def arithmetic_rows(difficulty: int, train: int, val: int, seed: int) -> dict[str, list[DatasetRow]]:
    """Generated problems (``arithmetic``), ``train`` and ``val`` of them; no question is in both."""

    def solved(count: int, split: Split) -> Iterator[Solved]:
        for each in generate(difficulty, count, seed, split):
            yield Solved(each.question, each.question, each.answer, each.solution)

    return _generated_rows("arithmetic", train, val, solved)


def product_rows(train: int, val: int, seed: int) -> dict[str, list[DatasetRow]]:
    """Generated products (``products``) for a model with a calculator: ``train`` and ``val`` of them, run by an agent.

    ``sft`` has the conversations of the training questions, with the call and its result.
    """

    def solved(count: int, split: Split) -> Iterator[Solved]:
        for each in products(count, seed, split):
            yield Solved(each.question, each.question, each.answer, None, agent={"agent_name": "tool_agent"})

    rows = _generated_rows("products", train, val, solved)
    conversations = []
    for row, product in zip(rows["train"], products(train, seed, Split.train), strict=True):
        said = "\n".join(each["content"] for each in product.conversation[1:])
        info = row["extra_info"] | {"split": "sft", "answer": said}
        conversations.append(row | {"messages": product.conversation, "agent_name": None, "extra_info": info})
    return rows | {"sft": conversations}


def square_rows(train: int, val: int, seed: int) -> dict[str, list[DatasetRow]]:
    """Generated pictures (``squares``), ``train`` and ``val`` of them; no picture is in both."""

    def solved(count: int, split: Split) -> Iterator[Solved]:
        for each in squares(count, seed, split):
            images = [{"bytes": each.png, "path": None}]
            yield Solved(QUESTION, QUESTION, each.answer, f"#### {each.answer}", images=images)

    return _generated_rows("squares", train, val, solved)


def _generated_rows(
    data_source: str, train: int, val: int, solved: Callable[[int, Split], Iterable[Solved]]
) -> dict[str, list[DatasetRow]]:
    """The rows of both splits.  solved: makes so many problems of a split."""
    counts = {"train": (train, Split.train), "val": (val, Split.validation)}
    return {
        name: [_row(data_source, name, index, each) for index, each in enumerate(solved(*asked))]
        for name, asked in counts.items()
    }


def write_rows(rows: Sequence[DatasetRow], path: Path) -> None:
    """Write ``rows`` to the parquet file ``path``, replacing an older one.  DataError: it cannot be written."""
    absent = [name for name in OPTIONAL if all(row.get(name) is None for row in rows)]
    schema = pa.schema([field for field in SCHEMA if field.name not in absent])
    incomplete = path.with_name(f"{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(incomplete, schema) as file:
            for first in range(0, len(rows), BATCH):
                file.write_table(pa.Table.from_pylist(list(rows[first : first + BATCH]), schema=schema))
        with incomplete.open("rb") as file:
            os.fsync(file.fileno())
        incomplete.replace(path)
    except OSError as error:
        with suppress(OSError):
            incomplete.unlink()
        raise DataError(
            str(path), [f"cannot be written: {error.strerror}. Mend that, or give another folder"]
        ) from error


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` or ``\\fbox{...}``, with its inner braces; None without one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.lstrip().startswith("{"):
        return rest.split("$")[0].strip() or None  # \boxed 5, without braces
    depth = 0
    opening = rest.index("{")
    for place in range(opening, len(rest)):
        depth += {"{": 1, "}": -1}.get(rest[place], 0)
        if depth == 0:
            return rest[opening + 1 : place].strip() or None
    return None


def _row(data_source: str, split: str, index: int, solved: Solved) -> DatasetRow:
    tests = solved.ability == "code"
    answer = solved.solution if solved.solution is not None or tests else solved.ground_truth
    system = [{"role": "system", "content": solved.system}] if solved.system else []
    return {
        "data_source": solved.data_source or data_source,
        "prompt": [*system, {"role": "user", "content": solved.prompt}],
        "ability": solved.ability,
        "reward_model": {"style": "rule", "ground_truth": solved.ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": solved.question},
        "response": solved.solution,
        **({"images": list(solved.images)} if solved.images else {}),
        **(solved.agent or {}),
    }


def _solved(dataset: Dataset, record: Record, problems: list[str]) -> Solved | None:
    try:
        return dataset.solved(record.fields)
    except ValueError as error:
        problems.append(f"{record.place}: {error}")
        return None


def _said(prompt: object) -> list[tuple[str, str]]:
    """(role, text) of each message; nothing where one has no text."""
    messages = prompt if isinstance(prompt, list) else []
    said = [(each.get("role"), each.get("content")) for each in messages if isinstance(each, Mapping)]
    return [(str(role), text) for role, text in said if isinstance(text, str) and text.strip()]


def _check_cases(truth: str) -> None:
    """ValueError: ``truth`` is not JSON of as many inputs as outputs, at least one."""
    try:
        cases = read_json(truth)
    except ValueError as error:
        raise ValueError(f"reward_model.ground_truth is no JSON: {error}. {AS_PUBLISHED}") from error
    lists = [cases.get(name) if isinstance(cases, dict) else None for name in ("inputs", "outputs")]
    sizes = {len(each) if isinstance(each, list) else 0 for each in lists}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"reward_model.ground_truth has no inputs with an output each. {AS_PUBLISHED}")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has no text in {name}; it has {', '.join(fields)}. {AS_PUBLISHED}")
    return value
