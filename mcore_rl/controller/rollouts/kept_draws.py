"""What was drawn and not trained when a step was complete: a checkpoint has it in ``drawn.parquet``.

It is whole beside ``controller.json``, whose place in the data is the one before all of it: a run that does not go on
with the draws draws their prompts again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.controller.rollouts.drawn_file import DrawnFileError, DrawnGroup, RowOf, read_drawn, write_drawn
from mcore_rl.controller.step.rollout_collection import DroppedGroup, RolloutBatch
from mcore_rl.ground.errors import CheckpointError

FILE = "drawn.parquet"


@dataclass(frozen=True, kw_only=True)
class KeptDraws:
    """Groups of a ``RolloutStream``, or the batch of the next step that a ``RolloutSource`` drew ahead.

    place: the sampler's state after the prompts of all of it were drawn.
    groups: begun and neither trained nor dropped, in the order in which they were begun; ``facts`` has the ``ordinal``
        and the ``oldest`` version of each (``stream.Group``).
    next_ordinal: of the group that is begun next.
    num_trained: groups that were trained before.
    dropped: groups that were dropped, and that no step has reported yet.
    batch: the next step's.
    before: the sampler's state before the prompts of ``batch`` were drawn.
    """

    place: dict[str, Any]
    groups: tuple[DrawnGroup, ...] = ()
    next_ordinal: int = 0
    num_trained: int = 0
    dropped: tuple[DroppedGroup, ...] = ()
    batch: RolloutBatch | None = None
    before: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost without it."""
        return not self.groups and not self.dropped and self.batch is None

    def write(self, directory: Path, settings: Mapping[str, Any]) -> int:
        """Writes it into ``directory`` and returns its bytes; 0, and no file, if it is empty.

        settings: that it was drawn with, plain values.  OSError: the disk is full, or fails.
        """
        if self.is_empty:
            return 0
        facts = {
            "settings": dict(settings),
            "place": self.place,
            "next_ordinal": self.next_ordinal,
            "num_trained": self.num_trained,
            "dropped": [asdict(each) for each in self.dropped],
            "batch": None if self.batch is None else batch_facts(self.batch),
            "before": self.before,
        }
        groups = self.groups if self.batch is None else batch_groups(self.batch)
        write_drawn(directory / FILE, facts, groups)
        return (directory / FILE).stat().st_size


def read_kept(checkpoint: Path, row_of: RowOf) -> tuple[KeptDraws, dict[str, Any]] | None:
    """(what ``checkpoint`` has, the settings that it was drawn with); None: it has nothing.

    row_of: the prompts of the training files.  CheckpointError: the file cannot be read, or is of other data.
    """
    if not (path := checkpoint / FILE).is_file():
        return None
    try:
        facts, groups = read_drawn(path, row_of)
        batch = facts["batch"]
        kept = KeptDraws(
            place=facts["place"],
            groups=() if batch is not None else tuple(groups),
            next_ordinal=facts["next_ordinal"],
            num_trained=facts["num_trained"],
            dropped=tuple(DroppedGroup(**each) for each in facts["dropped"]),
            batch=None if batch is None else batch_of(batch, groups),
            before=facts["before"],
        )
        return kept, facts["settings"]
    except DrawnFileError as error:
        problem = str(error)
    except (LookupError, TypeError, ValueError) as error:
        problem = f"is no file of rollouts: {type(error).__name__}: {error}"
    remedy = "Resume from another step, or remove the file and its line in manifest.json: its prompts are drawn again"
    raise CheckpointError(str(checkpoint), [f"{FILE} {problem}. {remedy}"])


def batch_facts(batch: RolloutBatch) -> dict[str, Any]:
    """What ``batch`` has beside its episodes, as plain values."""
    return {
        "greedy": batch.greedy,
        "num_batches": batch.num_batches,
        "seconds": batch.seconds,
        "dropped": [asdict(each) for each in batch.dropped],
        "metrics": dict(batch.metrics),
    }


def batch_groups(batch: RolloutBatch) -> list[DrawnGroup]:
    """The episodes of ``batch``, group by group."""
    groups: dict[int, list[Any]] = {}
    for episode in batch.episodes:
        groups.setdefault(episode.group, []).append(episode)
    return [DrawnGroup(row=each[0].row, episodes=tuple(each)) for _, each in sorted(groups.items())]


def batch_of(facts: Mapping[str, Any], groups: Sequence[DrawnGroup]) -> RolloutBatch:
    """The batch that ``batch_facts`` and ``batch_groups`` were made of."""
    return RolloutBatch(
        episodes=[episode for group in groups for episode in group.episodes],
        greedy=facts["greedy"],
        num_batches=facts["num_batches"],
        seconds=facts["seconds"],
        dropped=tuple(DroppedGroup(**each) for each in facts["dropped"]),
        metrics=facts["metrics"],
    )
