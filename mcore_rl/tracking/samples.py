"""Samples as parquet: ``rollouts/step_N.parquet`` and ``validation/step_N.parquet`` of the run directory.

Thumbnails of their pictures are in ``media/``, by the picture's sha256.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.tracking.atomic import replaced

Kind = Literal["rollouts", "validation", "record"]
Rows = Callable[[], Sequence[dict[str, Any]]]
SIDE = 256  # pixels of the longer side of a thumbnail


def write_samples(run_dir: Path, step: int, kind: Kind, rows: Sequence[dict[str, Any]]) -> Path:
    """Write ``rows``; their keys become columns, and a missing key becomes null.

    A column without a common type, or with nested values, is written as JSON text, so that no row of a data set or of a
    reward function can end a run.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    path = run_dir / kind / f"step_{step}.parquet"
    with replaced(path) as new:
        pq.write_table(table, new)
    return path


def sample_files(run_dir: Path, kind: Kind) -> dict[int, Path]:
    """Step -> its file, in the order of steps."""
    files = {}
    for path in (run_dir / kind).glob("step_*.parquet"):
        if match := re.fullmatch(r"step_(\d+)\.parquet", path.name):
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def thumbnail_file(run_dir: Path, sha256: str) -> Path:
    """The file of the thumbnail of a picture."""
    return run_dir / "media" / f"{sha256}.webp"


def _column(values: list[Any]) -> Any:
    try:
        column = pa.array(values)
        if not pa.types.is_nested(column.type):
            return column
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass  # mixed types, integers of more than 64 bits, half a surrogate pair
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode("utf-8", errors="replace").decode("utf-8")
