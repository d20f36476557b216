"""Generated responses in parquet, written and read beside the columns of their prompts.

A response is the model's last text.  If other turns came before it, a column of its own holds the conversation, and
others what its agent did.  Responses with scores also become pairs of a better and a worse one, which preferences are
learnt from.

Invariant: a row keeps all its columns and its place; its responses are in the order in which they were requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.reward import Style
from mcore_rl.data.rows import (
    GROUND_TRUTH,
    MESSAGES,
    NO_UTF8,
    SourceFile,
    clean_messages,
    is_list,
    is_messages,
    is_text,
    no_column,
    read_files,
    reward_model_problems,
    style_of,
)
from mcore_rl.data.tables import writable
from mcore_rl.ground.errors import DataError
from mcore_rl.tracking.atomic import replaced

RESPONSES = "responses"
NUM_TOKENS = "response_num_tokens"
FINISH = "finish_reasons"
TURNS = "response_turns"
LENGTH = "length"  # finish reason of a response that was cut off at its limit
TURN = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("num_tokens", pa.int32()),
        ("trained", pa.bool_()),
        ("reward", pa.float64()),
    ]
)
# Columns of what an agent did, by the fields of ``AgentRecord``.
OF_AGENTS = {
    "reason": ("end_reasons", pa.string()),
    "turns": ("num_turns", pa.int32()),
    "calls": ("num_calls", pa.int32()),
    "failed_calls": ("num_failed_calls", pa.int32()),
    "tool_s": ("tool_s", pa.float64()),
}
REASONS = OF_AGENTS["reason"][0]
GENERATED = (RESPONSES, NUM_TOKENS, FINISH, TURNS, *(column for column, _ in OF_AGENTS.values()))
LOST = "abort"  # finish reason of an episode whose environment or engine failed


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """What the agent of a response did; the fields are those of ``episodes.AgentCounts``."""

    reason: str
    turns: int
    calls: int = 0
    failed_calls: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True)
class Generated:
    """One response as it is written.

    text: the model's last text.
    num_tokens: of everything after the prompt.
    finish: ``stop``, ``length`` or ``abort``.
    turns: everything after the prompt, each {role, content, num_tokens, trained, reward}; empty if that is the text
        alone.
    agent: what its agent did; None if it had none.
    """

    text: str
    num_tokens: int
    finish: str
    turns: tuple[Mapping[str, Any], ...] = ()
    agent: AgentRecord | None = None


def agent_summary(agents: Sequence[AgentRecord | None]) -> dict[str, float]:
    """The means over those of ``agents`` that are there, by the names of the ``agent/`` metrics; {} if none is."""
    there = [each for each in agents if each is not None]
    if not there:
        return {}
    calls = sum(each.calls for each in there)
    reasons = Counter(each.reason for each in there)
    return {
        "turns_mean": fmean(each.turns for each in there),
        "calls_mean": calls / len(there),
        "failed_call_share": sum(each.failed_calls for each in there) / max(1, calls),
        "tool_s_mean": fmean(each.tool_s for each in there),
        **{f"end/{reason}": count / len(there) for reason, count in sorted(reasons.items())},
    }


def agents_line(summary: Mapping[str, float]) -> str:
    """An ``agent_summary`` for people."""
    reasons = {name.removeprefix("end/"): share for name, share in summary.items() if name.startswith("end/")}
    ends = ", ".join(f"{reason} {share:.1%}" for reason, share in reasons.items())
    did = f"{summary['turns_mean']:.2f} turns, {summary['calls_mean']:.2f} calls"
    failed = f"{summary['failed_call_share']:.1%} of them failed"
    return f"agents: {did} ({failed}) and {summary['tool_s_mean']:.2f} s in tools an episode; ended by: {ends}"


@dataclass(frozen=True, kw_only=True)
class ResponseRow:
    """A prompt's row with its responses.

    id, data_source, ground_truth, extra_info: as in ``PromptRow``.
    columns: as in ``PromptRow``, without the responses.
    responses: texts.
    num_tokens, truncated: of each response; 0 and False if the file lacks them.
    turns: of each response, everything after the prompt as {role, content}; the text alone if the file has no turns.
    turn_rewards: of each response, the rewards that tools and interactions gave for its turns.
    lost: of each response, why the episode of its agent was lost; "" if it was not.
    agents: of each response, what its agent did; None if it had none.
    messages: of the prompt; empty if the file does not hold messages.
    """

    id: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    responses: tuple[str, ...]
    num_tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    turns: tuple[list[dict[str, Any]], ...]
    turn_rewards: tuple[tuple[float, ...], ...]
    lost: tuple[str, ...]
    agents: tuple[AgentRecord | None, ...]
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def style(self) -> Style:
        """Who scores it, by ``reward_model.style``."""
        return style_of(self.columns["reward_model"])


def taken_columns(names: Sequence[str]) -> list[str]:
    """The columns among ``names`` that ``write_responses`` would overwrite."""
    return [name for name in names if name in GENERATED]


def write_responses(path: Path, prompts: pa.Table, groups: Sequence[Sequence[Generated]]) -> None:
    """Write ``prompts`` with the columns ``responses``, ``response_num_tokens`` and ``finish_reasons``.

    groups: the responses of each row.  If any response has turns, there is also ``response_turns``, and if any had an
    agent, ``OF_AGENTS``.  The file appears when it is complete.
    """
    assert prompts.num_rows == len(groups) and not taken_columns(prompts.column_names)
    columns = {
        RESPONSES: pa.array([[each.text for each in group] for group in groups], type=pa.list_(pa.string())),
        NUM_TOKENS: pa.array([[each.num_tokens for each in group] for group in groups], type=pa.list_(pa.int32())),
        FINISH: pa.array([[each.finish for each in group] for group in groups], type=pa.list_(pa.string())),
    }
    if any(each.turns for group in groups for each in group):
        turns = [[list(each.turns) for each in group] for group in groups]
        columns[TURNS] = pa.array(turns, type=pa.list_(pa.list_(TURN)))
    if any(each.agent is not None for group in groups for each in group):
        for name, (column, kind) in OF_AGENTS.items():
            values = [[None if each.agent is None else getattr(each.agent, name) for each in group] for group in groups]
            columns[column] = pa.array(values, type=pa.list_(kind))
    for name, column in columns.items():
        prompts = prompts.append_column(name, column)
    with replaced(path) as new:
        pq.write_table(writable(prompts), new)


class ResponseSet:
    """Rows with their responses, in file order; made by ``load``.

    has_lengths, has_finish: whether the file has these columns.  counts: responses of each row.
    """

    def __init__(self, file: SourceFile, prompt_key: str, response_key: str) -> None:
        self._file = file
        self._prompt_key = prompt_key
        self._response_key = response_key
        self.has_lengths = NUM_TOKENS in file.table.column_names
        self.has_finish = FINISH in file.table.column_names
        types = {column.name: column.type for column in file.table.schema}
        self._has_agents = all(column in types and is_list(types[column]) for column, _ in OF_AGENTS.values())
        self._has_messages = prompt_key in types and is_messages(types[prompt_key])
        self.counts: list[int] = []
        self._with_messages: list[bool] = []
        self.data_sources: list[str] = []
        self.styles: list[Style] = []  # who scores the row

    @classmethod
    def load(cls, path: str | Path, prompt_key: str, response_key: str) -> ResponseSet:
        """The rows of ``path``, checked.

        Raises DataError with every violation: no such file or column, a column of another type, a row without response,
        data source or ground truth, or with another number of lengths than of responses.
        """
        problems: list[str] = []
        files = read_files([path], problems, max_samples=None, seed=0)
        for file in files:
            problems += _type_problems(file, response_key)
        if problems:
            raise DataError("path", problems)
        responses = cls(files[0], prompt_key, response_key)
        for start, records in responses._file.batches():
            for index, record in enumerate(records, start):
                problem = responses._check(record)
                if problem:
                    problems.append(f"{responses._file.row_id(index)}: {problem}")
        if not problems and not responses.counts:
            problems.append("the file has no rows. Name one with responses")
        if problems:
            raise DataError("path", problems)
        return responses

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[ResponseRow]:
        for start, records in self._file.batches():
            for index, record in enumerate(records, start):
                assert record is not None, "load has seen this row"
                yield self._row(self._file.row_id(index), record)

    def ids_of(self, style: Style) -> list[str]:
        """Ids of the rows of ``style``."""
        return [self._file.row_id(index) for index, each in enumerate(self.styles) if each is style]

    @property
    def without_messages(self) -> list[str]:
        """Ids of the rows whose prompt is no messages."""
        return [self._file.row_id(index) for index, there in enumerate(self._with_messages) if not there]

    def _check(self, record: dict[str, Any] | None) -> str:
        """What is wrong with a row, else ""; then its number of responses and its data source are noted."""
        if record is None:
            return NO_UTF8
        responses = _texts(record[self._response_key])
        if not responses or None in responses:
            return f"{self._response_key} is null or empty, or holds a null. Generate it again, or leave the row out"
        if not record["data_source"]:
            return "data_source is null or empty. Write the name of the data set"
        asked = record["reward_model"]
        key = self._prompt_key
        messages = clean_messages(record[key]) if self._has_messages else f"is not {MESSAGES}"
        if (style := style_of(asked)) is not Style.rule:
            reader = "the judge" if style is Style.judge else "the reward model"
            if isinstance(messages, str):
                return f"{key} {messages}, and {reader} reads it. Write {MESSAGES}, or name it as prompt_key"
        elif asked is None or asked.get("ground_truth") is None:
            return "reward_model has no ground_truth. Write the right answer, or leave the row out"
        for name in (NUM_TOKENS, FINISH, TURNS, *(column for column, _ in OF_AGENTS.values() if self._has_agents)):
            if name in record and len(record[name] or ()) != len(responses):
                have = f"{len(record[name] or ())} entries for {len(responses)} responses"
                return f"{name} has {have}. Generate it again, or drop the column"
        self.counts.append(len(responses))
        self.data_sources.append(record["data_source"])
        self.styles.append(style)
        self._with_messages.append(not isinstance(messages, str))
        return ""

    def _row(self, name: str, record: dict[str, Any]) -> ResponseRow:
        responses = _texts(record.pop(self._response_key))
        lengths, finish, turns = (record.pop(key, None) for key in (NUM_TOKENS, FINISH, TURNS))
        agents = _agents(record) if self._has_agents else [None] * len(responses)
        record.pop(RESPONSES, None)
        prompt = record.pop(self._prompt_key, None)
        messages = clean_messages(prompt) if self._has_messages else ""
        return ResponseRow(
            messages=[] if isinstance(messages, str) else messages,
            id=name,
            data_source=record.pop("data_source"),
            extra_info=record.pop("extra_info", None) or {},
            ground_truth=record["reward_model"].get("ground_truth"),
            columns=record,
            responses=tuple(responses),
            num_tokens=tuple(lengths or [0] * len(responses)),
            truncated=tuple(each == LENGTH for each in finish or [""] * len(responses)),
            turns=tuple(map(_messages, responses, turns or [None] * len(responses))),
            turn_rewards=tuple(map(_rewards, turns or [None] * len(responses))),
            agents=tuple(agents),
            lost=tuple(map(_lost, agents, finish or [""] * len(responses))),
        )


def _messages(response: str, turns: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The turns after the prompt; a response without turns is the model's only turn."""
    said = turns or [{"role": "assistant", "content": response}]
    return [{"role": each["role"], "content": each["content"]} for each in said]


def _rewards(turns: Sequence[Mapping[str, Any]] | None) -> tuple[float, ...]:
    rewards = (each.get("reward") for each in turns or ())
    return tuple(float(each) for each in rewards if each is not None)


def _lost(agent: AgentRecord | None, finish: str) -> str:
    return agent.reason if agent is not None and finish == LOST else ""


def _agents(record: dict[str, Any]) -> list[AgentRecord | None]:
    """What the agents of a row's responses did; takes their columns out of ``record``."""
    columns = {name: record.pop(column) for name, (column, _) in OF_AGENTS.items()}
    each = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [None if values["reason"] is None else AgentRecord(**values) for values in each]


def _texts(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    return list(value or ())


def _type_problems(file: SourceFile, response_key: str) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable."""
    types = {column.name: column.type for column in file.table.schema}
    if response_key not in types:
        yield no_column(file, response_key, "Name the one with the responses as response_key")
    elif not is_text(kind := types[response_key]) and not (is_list(kind) and is_text(kind.value_type)):
        yield f"{file.name}: column {response_key} is {kind}, not a list of texts. Write it so"
    if "data_source" not in types or not is_text(types["data_source"]):
        yield f"{file.name}: no column data_source of text. {GROUND_TRUTH}"
    yield from reward_model_problems(file)
    for name in (NUM_TOKENS, FINISH):
        if name != response_key and name in types and not is_list(types[name]):
            yield f"{file.name}: column {name} is {types[name]}, not a list. Write one entry a response, or drop it"
    turns = types.get(TURNS)
    if turns is not None and not (is_list(turns) and is_messages(turns.value_type)):
        wanted = "a list of lists of {role, content}, one list a response"
        yield f"{file.name}: column {TURNS} is {turns}, not {wanted}. Write it so, or drop it"


MESSAGE_LIST = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
COLUMNS = pa.schema(
    [
        ("prompt", MESSAGE_LIST),
        ("chosen", MESSAGE_LIST),
        ("rejected", MESSAGE_LIST),
        ("margin", pa.float64()),
        ("data_source", pa.string()),
    ]
)
BATCH = 1024  # pairs that are held before they are written


def best_with_worst(scores: Sequence[float | None]) -> list[tuple[int, int, float]]:
    """Of each pair the places, the better one first, and by how much its score is the higher; None: in no pair."""
    scored = {place: score for place, score in enumerate(scores) if score is not None}
    ranked = sorted(scored, key=lambda place: -scored[place])  # of equal ones the earlier first
    halves = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    pairs = ((better, worse, scored[better] - scored[worse]) for better, worse in halves)
    return [pair for pair in pairs if pair[2] > 0]


def write_pairs(path: Path, rows: Iterable[tuple[ResponseRow, Sequence[float | None]]]) -> str:
    """Writes the pairs of ``rows``, each with the scores of its responses, and says for people what it wrote.

    A row of the file has the prompt, ``chosen`` and ``rejected`` as messages, ``margin``, by how much the better one's
    score is the higher, and the row's ``data_source``.  The file appears when it is complete.  DataError: no prompt has
    two responses of different scores.
    """
    pairs = 0
    prompts = 0
    without = 0
    with replaced(path) as new:
        with pq.ParquetWriter(new, COLUMNS) as writer:
            held: list[dict[str, Any]] = []
            for row, scores in rows:
                made = [*_pairs_of(row, scores)]
                pairs = pairs + len(made)
                prompts = prompts + 1
                without = without + (not made)
                held += made
                if len(held) >= BATCH:
                    writer.write_table(pa.Table.from_pylist(held, COLUMNS))
                    held = []
            writer.write_table(pa.Table.from_pylist(held, COLUMNS))
        if not pairs:
            problem = f"no prompt of {prompts:,} has two responses of different scores. Generate more (rollout.n)"
            raise DataError("pairs", [problem])
    return f"pairs: {pairs:,} in {path}; {without:,} of {prompts:,} prompts have none: no two responses differ in score"


def _pairs_of(row: ResponseRow, scores: Sequence[float | None]) -> Iterator[dict[str, Any]]:
    seen: set[tuple[str, str]] = set()
    for better, worse, margin in best_with_worst(scores):
        texts = str(row.turns[better]), str(row.turns[worse])
        if texts[0] == texts[1] or texts in seen:
            continue
        seen.add(texts)
        yield {
            "prompt": row.messages,
            "chosen": row.turns[better],
            "rejected": row.turns[worse],
            "margin": margin,
            "data_source": row.data_source,
        }
