"""schedule.jsonl: which groups each step trained, and in which order; one JSON object a step.

It is the ledger that ``ledger.audit`` proves, and with ``trainer.record_rollouts`` the order in which
``trainer.replay`` trains again.  A line stands alone, whatever a resume changed before it.  What a resumed run trains
again is written anew; the lines that a kill left beyond the checkpoint go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mcore_rl.tracking.jsonl import StepFile, read_steps

SCHEDULE = "schedule.jsonl"


@dataclass(frozen=True, kw_only=True)
class ScheduledGroup:
    """A group that a step trained.

    id, number, epoch: of its prompt, as in the files, in the training data, and the pass in which it was drawn.
    oldest, newest: the versions of its tokens; None where the engine names none.
    samples: its responses.  lost: those whose environment failed.  trained: those of which any token is in the loss.
    """

    id: str
    number: int
    epoch: int
    oldest: int | None
    newest: int | None
    samples: int
    lost: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class ScheduledDrop:
    """A group that was drawn and that no step trains.  reason: ``filter_groups``, say."""

    id: str
    number: int
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """One line.

    version: of the weights that the step began with.
    mode: ``trainer.mode``.  batch: groups of a step.  bound: the most versions that a token may be older than
        ``version``.
    num_prompts: in the training data.
    groups: in the order in which they were trained.
    dropped: since the step before.
    epoch, position: the place in the data after it: prompts of earlier epochs were all drawn, of this one so many.
    again: (epoch, number) of prompts that were drawn, and that no step up to this one trained or dropped.
    updates: optimizer steps of each role.
    settings: a checksum of the settings that decide what the step computes.
    """

    step: int
    version: int
    mode: str
    batch: int
    bound: int
    num_prompts: int
    groups: Sequence[ScheduledGroup]
    dropped: Sequence[ScheduledDrop] = ()
    epoch: int
    position: int
    again: Sequence[tuple[int, int]] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    settings: str = ""


class ScheduleFile(StepFile):
    """Appends to a schedule.jsonl."""

    def write(self, step: ScheduledStep) -> None:
        """Write the line of one step.  OSError: see ``append``."""
        self.append(as_row(step))


def as_row(step: ScheduledStep) -> dict[str, Any]:
    """The line of ``step``: groups by column, which is a third of the size."""
    row = asdict(step)
    for name, kind in (("groups", ScheduledGroup), ("dropped", ScheduledDrop)):
        row[name] = {column: [each[column] for each in row[name]] for column in kind.__dataclass_fields__}
    return row


def read_schedule(path: Path) -> tuple[list[ScheduledStep], list[int]]:
    """(the steps of a schedule.jsonl in order, those whose line says something else); both [] if there is no file."""
    steps = list[ScheduledStep]()
    wrong = list[int]()
    for row in read_steps(path):
        try:
            steps.append(_step(row))
        except (LookupError, TypeError, ValueError, AttributeError, msgspec.ValidationError):
            wrong.append(row["step"])
    return steps, wrong


def _step(row: Mapping[str, Any]) -> ScheduledStep:
    by_row = {**row, "groups": _rows(row["groups"]), "dropped": _rows(row["dropped"])}
    if unknown := row.keys() - ScheduledStep.__dataclass_fields__.keys():
        raise ValueError(f"unknown fields {unknown}")
    return msgspec.convert(by_row, ScheduledStep)  # each field of its type: no text for a number


def _rows(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
