"""metrics.jsonl: one JSON object a step, with the key ``step`` and the keys of ``metrics.METRICS``.

Other files of steps are written and read here too.  The invariant: steps rise, and after a kill at any time every line
is whole, except perhaps the last.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_rl.ground.json_text import read_json
from mcore_rl.tracking.atomic import write_whole


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl in order; [] if there is no file.  See ``read_steps``.

    Each has "step", an int, and its metrics: float, or None for a number that was not finite.
    """
    return read_steps(path)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a step, in the order of steps; [] if there is no file.

    Each has "step", an int.  Incomplete lines, as a killed run may leave, are skipped; of several lines for one step
    the last one counts.
    """
    rows = {row["step"]: row for row in step_rows(path)}
    return [rows[step] for step in sorted(rows)]


def step_rows(path: Path) -> list[dict[str, Any]]:
    """As ``read_steps``, in the order of the file, and of several lines for one step all."""
    if not path.is_file():
        return []
    rows = list[dict[str, Any]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = read_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool):
            rows.append(row)
    return rows


class StepFile:
    """Appends to ``path``, an object a step.  keep: existing lines of later steps are dropped.

    A line that does not fit on the disk is kept, and written before the next one.
    """

    def __init__(self, path: Path, keep: int) -> None:
        kept = [row for row in read_steps(path) if row["step"] <= keep]
        write_whole(path, "".join(map(_line, kept)))
        self._file = path.open("ab", buffering=0)
        self._unsent = b""

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line.  OSError: it does not fit on the disk now; the next call tries again."""
        self._unsent += _line(row).encode()
        self._send()

    def close(self) -> None:
        """Close the file.  OSError: lines did not fit on the disk, and are lost."""
        try:
            self._send()
        finally:
            self._file.close()

    def _send(self) -> None:
        """Write all that is unsent, or nothing of it."""
        size = os.fstat(self._file.fileno()).st_size
        rest = self._unsent
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise
        self._unsent = b""


class MetricsFile(StepFile):
    """Appends to a metrics.jsonl."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of one step.  OSError: see ``append``."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.append({"step": step} | finite)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
