"""Rows of files as a user names them: read once, checked by type, each with an id that names its place.

Knows files, columns and messages; not what a row is for.  Everything wrong is collected as text that names file and
row, so that the caller can say all of it at once.

Invariant: an id, ``<file>:<row counted from 0>``, names one row; a file is called by its name, with as many of its
folders as it takes to tell it from the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_rl.config.reward import Style
from mcore_rl.data.tables import FileRows, read_table

BATCH_ROWS = 1_000
LONG_ROWS = 20_000  # more than a few seconds: a bar shows how far it is
MAX_NAMED = 20
MESSAGES = "a list of {role, content}"
NO_UTF8 = "has text that is no UTF-8. Write the file again from text decoded as what it is"
GROUND_TRUTH = "Write data_source (text) and reward_model: {style, ground_truth} (docs/data.md)"
# Columns, also of extra_info, that ask for more than text; only a run of agents does some of it.
MORE_THAN_TEXT = {
    "agent_name": "agents",
    "interaction_kwargs": "interactions",
    "tools": "tools",
    "tools_kwargs": "tools",
    "images": "images",
    "videos": "videos",
}
AGENT_COLUMNS = ("agent_name", "interaction_kwargs", "tools_kwargs")  # which a run of agents reads
SINGLE_TURN = "single_turn_agent"  # verl's agent_name of what is done here: one answer to the prompt


class AgentRows(Protocol):
    """Reads the ``AGENT_COLUMNS`` of rows."""

    def problem_of(self, record: dict[str, Any]) -> str:
        """What keeps a row from being run as it asks, with the remedy; "" if nothing does."""
        ...

    def tools_of(self, record: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The schemas of the tools that a row's prompt names; None: it has none."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """The chosen rows of one file.

    name: in ids.  folder: that it is in.  table: them.  numbers: their rows in the file, ascending.  json: see
    ``tables.FileRows``.
    """

    name: str
    folder: Path
    table: pa.Table
    numbers: NDArray[np.int64]
    json: Mapping[str, pa.Array] = field(default_factory=dict)

    def row_id(self, index: int) -> str:
        """The id of ``table``'s row ``index``."""
        return f"{self.name}:{self.numbers[index]}"

    def record(self, index: int) -> dict[str, Any]:
        """``table``'s row ``index``, by column, as the file has it.  UnicodeDecodeError: text that is no UTF-8."""
        (record,) = self._records(index, 1)
        return record

    def batches(self) -> Iterator[tuple[int, list[dict[str, Any] | None]]]:
        """(index of the first, records) of up to BATCH_ROWS rows; None stands for a row whose text is no UTF-8."""
        for start in range(0, len(self.numbers), BATCH_ROWS):
            records: list[dict[str, Any] | None]
            try:
                records = [*self._records(start, BATCH_ROWS)]
            except UnicodeDecodeError:
                records = [self._decoded(index) for index in range(start, min(start + BATCH_ROWS, len(self.numbers)))]
            yield start, records

    def _records(self, start: int, count: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.table.slice(start, count).to_pylist(maps_as_pydicts="strict")
        for column in self.table.schema:
            if column.name in self.json:
                for record, text in zip(records, self.json[column.name].slice(start, count), strict=True):
                    record[column.name] = json.loads(text.as_py())
            elif has_unwritten(column.name, column.type):
                for record in records:
                    record[column.name] = as_written(column.name, column.type, record[column.name])
        return records

    def _decoded(self, index: int) -> dict[str, Any] | None:
        try:
            return self.record(index)
        except UnicodeDecodeError:
            return None


def read_files(
    files: Sequence[str | Path], problems: list[str], *, max_samples: int | None, seed: int
) -> list[SourceFile]:
    """The readable ones of ``files``; what is wrong with the others is added to ``problems``.

    max_samples: only so many rows of all files together, the first of a shuffle by ``seed``; they stay in file order.
    """
    if not files:
        problems.append("names no file. Name at least one")
    paths = [Path(file).expanduser().resolve() for file in files]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    problems += [f"{path}: is named twice. Name it once" for path in twice]
    paths = list(dict.fromkeys(paths))
    files_read = list[tuple[str, Path, FileRows]]()
    # Where the user sees it: files beside a link are not beside what it links to, as in the Hub's cache.
    folders = {Path(file).expanduser().resolve(): Path(file).expanduser().absolute().parent for file in files}
    for name, path in zip(distinct_names(paths), paths, strict=True):
        rows = read_table(path, name, problems)
        if rows is not None:
            files_read.append((name, folders[path], rows))
    ends = np.cumsum([rows.table.num_rows for _, _, rows in files_read], dtype=np.int64)
    total = int(ends[-1]) if files_read else 0
    chosen = np.ones(total, dtype=bool)
    if max_samples is not None and max_samples < total:
        numbers = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(total)
        chosen[np.argsort(numbers, kind="stable")[max_samples:]] = False
    read = []
    for (name, folder, rows), end in zip(files_read, ends, strict=True):
        mask = chosen[end - rows.table.num_rows : end]
        table = rows.table
        texts = rows.json
        if not mask.all():
            table = table.filter(pa.array(mask))
            texts = {column: text.filter(pa.array(mask)) for column, text in texts.items()}
        kept = np.flatnonzero(mask)
        read.append(SourceFile(name=name, folder=folder, table=table, numbers=kept, json=texts))
    return read


def usable_batches(
    files: Sequence[SourceFile],
    title: str,
    problems: list[str],
    type_problems: Callable[[SourceFile], Iterable[str]],
) -> Iterator[tuple[int, SourceFile, int, list[dict[str, Any] | None]]]:
    """(number of a file, the file, index of the first, records) of the batches of ``files``.

    title: of the bar that shows how far it is, where rows are many.  problems: grows by ``type_problems`` of each file,
    which make every row of it unusable.
    """
    total = sum(len(file.numbers) for file in files)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=total < LONG_ROWS)
    with bar:
        task = bar.add_task(f"{title}: tokenising", total=total)
        for number, file in enumerate(files):
            of_types = list(type_problems(file))
            problems += of_types
            for start, records in () if of_types else file.batches():
                yield number, file, start, records
                bar.advance(task, len(records))


def no_column(file: SourceFile, key: str, remedy: str) -> str:
    """The problem of a file without the column ``key``."""
    return f"{file.name}: no column {key}; it has {', '.join(file.table.schema.names) or 'none'}. {remedy}"


def column_problems(
    file: SourceFile,
    option: str,
    key: str,
    form: str,
    fits: Callable[[pa.DataType], bool],
    *,
    fields: bool = False,
    page: str = "docs/data.md",
) -> Iterator[str]:
    """What is wrong with the column ``key`` of a file, which ``option`` names.

    form: of its values, in words; ``fits``: whether a type has it.  fields: ``key`` may be a field of a column.
    page: where it is shown.
    """
    schema = file.table.schema
    kind = field_type(schema, key) if fields or key in schema.names else None
    if kind is None:
        yield no_column(file, key, f"Write {form} there, or name it as {option}")
    elif not fits(kind):
        yield f"{file.name}: column {key} is {kind}, not {form}. Write it so ({page})"


def reward_model_problems(file: SourceFile) -> Iterator[str]:
    """What is wrong with the column ``reward_model`` of a file whose rows are graded."""
    kind = field_type(file.table.schema, "reward_model")
    if kind is None:
        yield f"{file.name}: no column reward_model. {GROUND_TRUTH}"
    elif not pa.types.is_struct(kind) or all(kind.get_field_index(name) < 0 for name in ("style", "ground_truth")):
        yield f"{file.name}: column reward_model is {kind}, without a ground_truth. {GROUND_TRUTH}"


def too_long(ids: Sequence[str], longest: int, max_length: int, what: str = "") -> str:
    """The problem of rows with more than ``data.max_length`` tokens.  what: of them has these."""
    limit = f"data.max_length={max_length} tokens, the longest {longest}"
    remedy = f"Write data.truncation=right or left, or {longest} tokens"
    return f"{len(ids)} have {what}more than {limit}: {named(ids)}. {remedy}"


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Each path's name, with as many folders before it as tell it from the other ``paths``, which differ."""
    names = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        length = 1
        while any(parts[-length:] == path.parts[-length:] for parts in others):
            length += 1
        names.append("/".join(path.parts[-length:]))
    return names


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, also as a dictionary."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists, of whichever layout."""
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(check(kind) for check in checks)


def is_messages(kind: pa.DataType, *, parts: bool = False) -> bool:
    """Whether a column of this type holds lists of {role, content}, both text.

    parts: the content may be a list of {type, ...} as well.
    """
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    if not all(name in fields for name in ("role", "content")) or not is_text(fields["role"]):
        return False
    return is_text(fields["content"]) or (parts and _is_parts(fields["content"]))


def _is_parts(kind: pa.DataType) -> bool:
    return is_list(kind) and pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("type") >= 0


def has_unwritten(name: str, kind: pa.DataType) -> bool:
    """Whether values of the column ``name`` may have fields that no row wrote, and that templates or tools would read.

    Those of messages and of ``MORE_THAN_TEXT`` may, also within a struct.
    """
    if not pa.types.is_nested(kind):
        return False
    if name in MORE_THAN_TEXT or is_messages(kind, parts=True):
        return True
    return bool(pa.types.is_struct(kind)) and any(has_unwritten(each.name, each.type) for each in kind)


def as_written(name: str, kind: pa.DataType, value: Any) -> Any:
    """``value`` of a column that ``has_unwritten``, without the fields that are null because another row has them.

    Parquet and arrow do not say: a struct gives every object the fields of all, and nobody can tell a field that is
    absent from one that is null; absent is what is meant.
    """
    if name in MORE_THAN_TEXT or is_messages(kind, parts=True):
        return without_nulls(value)
    if not isinstance(value, dict):
        return value
    written = dict(value)
    for each in kind:
        if has_unwritten(each.name, each.type):
            written[each.name] = as_written(each.name, each.type, value[each.name])
    return written


def without_nulls(value: Any) -> Any:
    """``value`` without null fields, at any depth; null entries of lists stay."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def clean_messages(messages: Any) -> list[dict[str, Any]] | str:
    """The messages of a row without fields that are null there, which parquet adds; or what is wrong with them."""
    if messages is None:
        return "is null"
    if not messages:
        return "has no messages"
    cleaned = []
    for place, message in enumerate(messages):
        if message is None or not message.get("role"):
            return f"has no role in message {place}"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"has no content in message {place}"
        cleaned.append({key: value for key, value in message.items() if value is not None})
    return cleaned


def wants_more_than_text(record: dict[str, Any], agents: AgentRows | None = None, read: str = "") -> list[str]:
    """The columns of ``MORE_THAN_TEXT`` in which a row has a value; of ``extra_info``, as ``extra_info.NAME``.

    A column of any name whose values are files, as ``datasets`` writes pictures and sounds, is one of them.
    agents: read ``AGENT_COLUMNS``, which are then not among them.  read: a column that is read as it is; "": none.
    """
    inner = record.get("extra_info")
    values = record | ({f"extra_info.{key}": each for key, each in inner.items()} if isinstance(inner, dict) else {})
    unread = MORE_THAN_TEXT.keys() - (() if agents is None else AGENT_COLUMNS)
    values.pop(read, None)
    asked = [
        (key, each) for key, each in values.items() if key.removeprefix("extra_info.") in unread or _holds_files(each)
    ]
    return [key for key, each in asked if not _is_empty(each) and (key, each) != ("agent_name", SINGLE_TURN)]


def unread_pictures(files: Sequence[SourceFile], unread: Mapping[str, Sequence[str]], key: str | None) -> list[str]:
    """The problems of columns that no model would see, and of a column of pictures that no file has.

    unread: rows that ``wants_more_than_text`` of, by column.  key: ``data.image_key``; None: it is not set.
    """
    problems = [more_than_text(column, ids, may_see=key is None) for column, ids in unread.items()]
    if key is not None and files and all(key not in file.table.column_names for file in files):
        remedy = "Write data.image_key=COLUMN as it is there, or leave it out"
        problems.append(f"no file has a column {key} of pictures. {remedy}")
    return problems


def more_than_text(column: str, ids: Sequence[str], *, may_see: bool = False) -> str:
    """The problem of rows that ``wants_more_than_text`` of.

    ids: of these rows.  may_see: whether ``data.image_key`` may name a column.
    """
    what = MORE_THAN_TEXT.get(column.removeprefix("extra_info."), "pictures and sounds")
    remedy = f"Leave these rows out, or drop {column} where the text alone is meant"
    if may_see and what in ("images", "pictures and sounds") and not column.startswith("extra_info."):
        remedy += f"; data.image_key={column} gives pictures to a model that sees some"
    return f"{column}: {what} are not supported, and {len(ids):,} would be read as text alone: {named(ids)}. {remedy}"


def _holds_files(value: Any) -> bool:
    """Whether a value is {bytes, path} with bytes, or a list that begins with one."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and isinstance(first.get("bytes"), bytes)


def _is_empty(value: Any) -> bool:
    """Whether there is nothing in a value of a column: parquet gives each row every field, with null in it."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, (str, list)) and not value)


def style_of(reward_model: Any) -> Style:
    """Who scores a row with this value of the column ``reward_model``; ``rule`` where its style is no other."""
    style = reward_model.get("style") if isinstance(reward_model, dict) else None
    return Style(style) if style in (Style.model.value, Style.judge.value) else Style.rule


def named(ids: Sequence[str]) -> str:
    """The first ``MAX_NAMED`` of ``ids``, and how many more there are."""
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return ", ".join(ids[:MAX_NAMED]) + more


def field_value(record: dict[str, Any], key: str) -> Any:
    """The value of ``key``: a column of that name, else a field, as ``extra_info.answer``."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return value


def field_type(schema: pa.Schema, key: str) -> pa.DataType | None:
    """The type of ``field_value``; None if there is no such column or field."""
    if key in schema.names:
        return schema.field(key).type
    kind = pa.struct(list(schema))
    for part in key.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


class Ragged:
    """Many short integer sequences in one array: 4 bytes a token, where tuples take 40."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.int32]] = []
        self._lengths: list[int] = []
        self._flat: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._ends: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def append(self, values: Sequence[int]) -> None:
        """One more sequence, the last."""
        self._pieces.append(np.asarray(values, dtype=np.int32))
        self._lengths.append(len(values))

    def close(self) -> None:
        """Lay out what was appended; sequences can be read from here on."""
        if self._pieces:
            self._flat = np.concatenate(self._pieces)
        self._ends = np.cumsum(self._lengths, dtype=np.int64)
        self._pieces = []

    @property
    def lengths(self) -> list[int]:
        """Of each sequence."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        end = self._ends[index]
        return self._flat[end - self._lengths[index] : end]


@dataclass(kw_only=True)
class Reading:
    """The state of reading files: tokens of the usable rows, and what is wrong with others.

    too_long: ids of rows with more tokens than fit; longest: the most of one.  more_than_text: ids, by column.
    """

    tokens: Ragged = field(default_factory=Ragged)
    problems: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    longest: int = 0
    more_than_text: dict[str, list[str]] = field(default_factory=dict)

    def note_too_long(self, row_id: str, length: int) -> None:
        """Takes a row of ``length`` tokens among those that are too long."""
        self.too_long.append(row_id)
        self.longest = max(self.longest, length)

    def note_more_than_text(self, row_id: str, columns: Iterable[str]) -> None:
        """Takes a row that asks for more than text in ``columns``."""
        for column in columns:
            self.more_than_text.setdefault(column, []).append(row_id)
