"""Which teacher teaches which rows: the keys that name teachers, and the weights that these stand for, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BY_SOURCE = "by_source"  # the key that names teachers by a row's data source
REST = "teacher.path"  # stands for the data sources without a teacher of their own; no data source has such a name


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run.

    rest: the checkpoint that teaches rows of any other data source; None: there are none.
    by_source: data source -> the checkpoint that teaches its rows.

    What teaches a row is one of ``names``.  Several of these may stand for one teacher, one of ``directories``.
    """

    rest: str | None
    by_source: Mapping[str, str]

    @cached_property
    def _named(self) -> dict[str, str]:
        return ({} if self.rest is None else {REST: self.rest}) | dict(self.by_source)

    @property
    def names(self) -> tuple[str, ...]:
        """Data sources, and ``REST`` before them if there is a teacher of the rest."""
        return tuple(self._named)

    @property
    def directories(self) -> tuple[str, ...]:
        """Each checkpoint once.  The first is the teacher's live weights, the others are snapshots beside it."""
        return tuple(dict.fromkeys(self._named.values()))

    @property
    def numbers(self) -> tuple[int, ...]:
        """For each of ``names``, the number of its teacher among ``directories``."""
        return tuple(self.directories.index(directory) for directory in self._named.values())

    @property
    def are_several(self) -> bool:
        """Whether the data source of a row decides anything."""
        return len(self.names) > 1

    def name_of(self, source: str) -> int:
        """The place among ``names`` of what teaches rows of ``source``; preparation has seen that somebody does."""
        names = self.names
        return names.index(source if source in self.by_source else REST)

    def untaught(self, sources: Sequence[str]) -> list[str]:
        """Those of ``sources`` whose rows nobody teaches."""
        return [] if self.rest is not None else [each for each in dict.fromkeys(sources) if each not in self.by_source]


def snapshot_of(number: int) -> str | None:
    """The snapshot with the weights of a teacher, by its number; None: they are the live ones."""
    return f"teacher_{number}" if number else None
