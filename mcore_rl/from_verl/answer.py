"""What follows from verl's keys: settings of ours, and entries of the list that ``from-verl`` shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.from_verl.written import Verl


class Difference(Enum):
    """How an entry of the list that ``from-verl`` shows is headed."""

    absent = "Not here, and left out"
    unknown = "Not understood, and left out"
    changed = "Means something else here"
    default = "Another default"
    dropped = "Not needed here"


@dataclass(frozen=True)
class Entry:
    """kind: its heading.  verl, value: the key and what was written.  ours: what stands for it.  text: what differs."""

    kind: Difference
    verl: str
    value: Any
    ours: str = ""
    text: str = ""


@dataclass(frozen=True)
class TranslatedSetting:
    """A value of a key of ours.  sources: verl's keys that it comes from.  written: whether one of them was written."""

    value: Any
    sources: tuple[str, ...]
    written: bool


@dataclass
class ModelFacts:
    """Facts of the model that is trained, as far as they are known.

    checkpoint: its name in ``mcore-rl models``.  refused: why it is not trained here; "": nobody knows of a reason.
    sees: true of a model that is named as one of pictures, or whose vision tower is read here; false of one that reads
    text; None: that is not known, or it may do either.
    tower: the kind of the tower that is read here; "": it has none, or another; None: that is not known.
    """

    num_layers: int | None = None
    is_mixture: bool | None = None
    checkpoint: str = ""
    refused: str = ""
    sees: bool | None = None
    tower: str | None = None


@dataclass
class Answer:
    """What follows from verl's keys: settings of ours, and entries of the list."""

    verl: Verl
    model: ModelFacts = field(default_factory=ModelFacts)
    settings: dict[str, TranslatedSetting] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def set(self, ours: str, value: Any, *sources: str) -> None:
        """``ours`` is ``value``, which comes from ``sources``; what was written goes before what was not."""
        setting = TranslatedSetting(value, sources, self.verl.has(*sources))
        known = self.settings.get(ours)
        if known is None or setting.written or not known.written:
            self.settings[ours] = setting

    def add(self, ours: str, names: list[str], value: Any, source: str) -> None:
        """``value`` goes into the group ``ours``, in which any key may be, under ``names`` one below the other."""
        known = self.settings.get(ours)
        group = place = dict(known.value) if known else {}
        for name in names[:-1]:
            place[name] = dict(place.get(name) or {})
            place = place[name]
        place[names[-1]] = value
        self.settings[ours] = TranslatedSetting(group, (*(known.sources if known else ()), source), written=True)

    def tell(self, kind: Difference, key: str, text: str, ours: str = "") -> None:
        """An entry of the list, if ``key`` was written."""
        if key in self.verl.written:
            self.entries.append(Entry(kind, key, self.verl.written[key], ours, text))
