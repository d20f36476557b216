"""A file of rows as a table: parquet, jsonl, jsonl.gz, or arrow as ``datasets`` save_to_disk writes it.

What a file is follows from its name.  Rows of jsonl get the types that parquet would have given them: of a column, one
for all rows.  Such a type gives every object the fields of all; where that changes a value, the column's own JSON is
kept beside the table, so that a row is what the file says.  Nothing here knows what a column is for.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.ground.json_text import read_json

AGAIN = "Write it again (docs/data.md shows how)"
LINES = (".jsonl", ".jsonl.gz")
NO_TABLES = (".json", ".csv", ".tsv", ".txt", ".json.gz", ".csv.gz")
MAX_SHOWN = 5
BATCH = 8192  # rows of parquet


@dataclass(frozen=True)
class FileRows:
    """The rows of a file.

    table: them, each column of one type.
    json: columns of jsonl whose values that type changes, as the file has them: of each row, its JSON.
    """

    table: pa.Table
    json: Mapping[str, pa.Array] = field(default_factory=dict)


def read_table(path: Path, name: str, problems: list[str]) -> FileRows | None:
    """The rows of ``path``; what keeps it from being read is added to ``problems``.  name: of the file, in them."""
    if not path.exists():
        makers = "mcore-rl prepare makes data sets, mcore-rl generate responses"
        problems.append(f"{path}: there is no such file. Mend the path, or make it: {makers}")
    elif path.is_dir():
        problems.append(f"{path}: is a directory. Name the files in it")
    elif path.name.endswith(NO_TABLES):
        problems.append(f"{name}: is no table. Write parquet, or jsonl: an object a line, in a file called .jsonl")
    elif path.name.endswith(LINES):
        return _of_lines(path, name, problems)
    else:
        kind = "arrow" if path.suffix == ".arrow" else "parquet"
        try:
            return FileRows(_arrow(path) if kind == "arrow" else _parquet(path))
        except (OSError, pa.ArrowException) as error:
            said = str(error).partition("\n")[0]
            problems.append(f"{name}: cannot be read as {kind}: {said}. {AGAIN}")
    return None


def _parquet(path: Path) -> pa.Table:
    """In batches: a column of text within structs holds 2 GiB at most in one piece, and test cases are long."""
    with pq.ParquetFile(path) as file:
        return pa.Table.from_batches(list(file.iter_batches(BATCH)), file.schema_arrow)


def _arrow(path: Path) -> pa.Table:
    """``datasets`` writes streams; pyarrow's own files are taken too."""
    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()


def _of_lines(path: Path, name: str, problems: list[str]) -> FileRows | None:
    rows = list[dict[str, Any]]()
    wrong = list[str]()
    try:
        for number, line in _lines(path):
            try:
                row = read_json(line, parse_constant=_no_number)
            except ValueError as error:  # of which one is text that is no UTF-8
                wrong.append(f"line {number} is no JSON ({error})")
                continue
            if isinstance(row, dict):
                rows.append(row)
            else:
                wrong.append(f"line {number} is {type(row).__name__}, not an object with columns")
    except (OSError, EOFError) as error:
        problems.append(f"{name}: cannot be read as {path.suffix[1:]}: {error}. {AGAIN}")
        return None
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN} more" if wrong[MAX_SHOWN:] else ""
        problems.append(f"{name}: {'; '.join(wrong[:MAX_SHOWN])}{more}. {AGAIN}")
        return None
    names = list(dict.fromkeys(column for row in rows for column in row))
    columns = dict[str, pa.Array]()
    kept = dict[str, pa.Array]()
    before = len(problems)
    for column in names:
        values = [row.get(column) for row in rows]
        try:
            columns[column] = _array(values)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            row, said = _first_odd(column, rows, error)
            problems.append(f"{name}:{row}: {column}: {said}. Give the column one type in all rows")
            continue
        if _changes(columns[column], values):
            kept[column] = pa.array(map(json.dumps, values), type=pa.large_string())
    return FileRows(pa.table(columns), kept) if len(problems) == before else None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of those that are not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _array(values: Sequence[Any]) -> pa.Array:
    """``values`` as a column; where every one is an object without fields, which no file can hold, all are null.

    Objects in lists whose fields have no one type in all rows (the arguments of calls of two tools) are texts there.
    """
    try:
        array = pa.array(values)
    except (pa.ArrowException, ValueError, OverflowError):
        array = pa.array([_flat(value) for value in values])
    empty = pa.types.is_struct(array.type) and array.type.num_fields == 0
    return pa.nulls(len(values)) if empty else array


def _flat(value: Any) -> Any:
    """A list of objects with their lists and objects as JSON; anything else as it is."""
    if not isinstance(value, list):
        return value
    return [_flat_object(each) if isinstance(each, dict) else each for each in value]


def _flat_object(value: dict[str, Any]) -> dict[str, Any]:
    return {key: json.dumps(each) if isinstance(each, (dict, list)) else each for key, each in value.items()}


def writable(table: pa.Table) -> pa.Table:
    """``table`` as parquet can hold it: null in the place of objects of which no row has a field."""
    for place, column in enumerate(table.schema):
        if _has_no_fields(column.type):
            values = [_without_empty(value) for value in table.column(place).to_pylist()]
            table = table.set_column(place, column.name, pa.array(values))
    return table


def _has_no_fields(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return True
    return any(_has_no_fields(kind.field(index).type) for index in range(kind.num_fields))


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items()} or None
    return [_without_empty(each) for each in value] if isinstance(value, list) else value


def _changes(array: pa.Array, values: Sequence[Any]) -> bool:
    """Whether ``array``, made of ``values``, reads differently: fields that are null, numbers of another kind."""
    if not pa.types.is_nested(array.type):
        return False
    return any(json.dumps(read.as_py()) != json.dumps(value) for read, value in zip(array, values, strict=True))


def _first_odd(column: str, rows: Sequence[dict[str, Any]], error: Exception) -> tuple[int, str]:
    """(the first row with which the rows up to it have no one type, why), found by halves."""
    least = 0
    most = len(rows)
    while most - least > 1:
        middle = (least + most) // 2
        try:
            pa.array([row.get(column) for row in rows[:middle]])
            least = middle
        except (pa.ArrowException, ValueError, OverflowError) as why:
            most = middle
            error = why
    return most - 1, str(error).partition("\n")[0].rstrip(".")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is none of its numbers")
