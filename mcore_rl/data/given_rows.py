"""Rows that a program has in memory, ``datasets.Dataset`` or a list of dicts, as a file that a run reads and keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mcore_rl.ground.errors import ConfigError, Violation

SOURCE = "dataset"  # data source of rows without one
ANSWERS = ("ground_truth", "answer", "solution")  # columns that may hold what an answer is compared with


@dataclass(frozen=True)
class GivenRows:
    """Rows as a file that is yet to be written.

    path: its name follows from its content.  data: that content.  texts: every prompt is a text, none a conversation.
    """

    path: Path
    data: bytes
    texts: bool


def rows_file(rows: Iterable[Any], folder: Path, *, argument: str, split: str, prompt_key: str) -> GivenRows:
    """Make the file of ``rows`` in ``folder``: jsonl, in the schema of docs/data.md.

    A prompt that is a text becomes a question of the user's.  A row without ``data_source`` or ``reward_model`` gets
    one; of the latter the ground truth is the first of ``ANSWERS`` that the row has, or "".

    argument: of the call, for messages.  split: begins the file's name.  prompt_key: the column of prompts.
    Raises ConfigError: there are no rows, or one cannot be used.
    """
    if isinstance(rows, Mapping):
        remedy = f"Give one of them: {argument}=splits[{next(iter(rows), 'train')!r}]"
        raise _refused(argument, ", ".join(map(str, rows)), "are splits, and no rows", remedy)
    lines = list[str]()
    texts = True
    number = -1
    for number, row in enumerate(rows):
        where = f"row {number}"
        if not isinstance(row, Mapping):
            raise _refused(argument, where, f"is {type(row).__name__}, and no dict", "Give rows as dicts")
        if prompt_key not in row:
            problem = f"has no {prompt_key}; it has {', '.join(map(str, row))}"
            raise _refused(argument, where, problem, "Rename the column, or write its name as data.prompt_key")
        texts = texts and isinstance(row[prompt_key], str)
        try:
            lines.append(json.dumps(_completed(row, prompt_key), ensure_ascii=False, default=_plain) + "\n")
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(argument, where, f"cannot be written: {error}", "Give plain values") from error
    if number < 0:
        raise _refused(argument, "", "has no rows", "Give at least one")
    data = "".join(lines).encode(errors="surrogatepass")
    return GivenRows(folder / f"{split}-{xxhash.xxh3_64_hexdigest(data)}.jsonl", data, texts)


def _completed(row: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    prompt = row[prompt_key]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    truth = next((row[name] for name in ANSWERS if row.get(name) is not None), "")
    filled = {"data_source": SOURCE, "reward_model": {"style": "rule", "ground_truth": truth}}
    said = {name: value for name, value in row.items() if value is not None or name not in filled}
    return {**filled, **said, prompt_key: asked}


def _plain(value: Any) -> Any:
    """Turn NumPy values into lists and numbers.  Raises TypeError for other types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain value")


def _refused(argument: str, value: object, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(argument, value, problem, remedy)])
