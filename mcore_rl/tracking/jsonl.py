"""metrics.jsonl: one JSON object a step, with the key ``step`` and the keys of ``metrics.METRICS``.

Other files of steps are written and read here too.  The invariant: steps rise, and after a kill at any time every line
is whole, except perhaps the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.tracking.atomic import replaced


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
    if not path.is_file():
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


class StepFile:
    """Appends to ``path``, an object a step.  keep: existing lines of later steps are dropped."""

    def __init__(self, path: Path, keep: int) -> None:
        kept = [row for row in read_steps(path) if row["step"] <= keep]
        with replaced(path) as new:
            new.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._torn = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write and flush one line.  OSError: it did not fit on the disk."""
        line = _line(row)
        start, self._torn = "\n" if self._torn else "", True  # end a half line that an earlier failure left
        self._file.write(start + line)
        self._file.flush()
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsFile(StepFile):
    """Appends to a metrics.jsonl."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush the line of one step.  OSError: it did not fit on the disk."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.append({"step": step} | finite)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
