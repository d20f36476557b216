"""What follows from verl's keys: settings of ours, which a yaml file has, and entries of the list of ``from-verl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.from_verl.written import Verl

DOCUMENT_END = "...\n"  # after a value alone, as yaml writes it


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

    def absent(self, key: str, text: str, ours: str = "") -> None:
        """An entry of what is not here."""
        self.tell(Difference.absent, key, text, ours)

    def unknown(self, key: str, text: str) -> None:
        """An entry of what is not understood."""
        self.tell(Difference.unknown, key, text)

    def changed(self, key: str, text: str, ours: str) -> None:
        """An entry of what means something else here."""
        self.tell(Difference.changed, key, text, ours)

    def dropped(self, key: str, text: str) -> None:
        """An entry of what is not needed here."""
        self.tell(Difference.dropped, key, text)


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(each)}' for name, each in value.items())}}}"
    return "null" if value is None else str(value)


def yaml_of(program: str, algorithm: str, settings: Mapping[str, TranslatedSetting], head: str) -> str:
    """The yaml file of a run of ``program``.  algorithm: its choice; "": none.  head: the first comment."""
    import yaml

    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += ["defaults:", f"  - {program}"]
    lines += [f"  - override algorithm: {algorithm}"] if algorithm else []
    lines += ["  - _self_"]
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        *groups, name = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = setting

    def written(values: Mapping[str, Any], depth: int) -> Iterator[str]:
        for name, each in values.items():
            indent = "  " * depth
            if not isinstance(each, TranslatedSetting):
                yield f"{indent}{name}:"
                yield from written(each, depth + 1)
                continue
            text = yaml.safe_dump(each.value, default_flow_style=True, width=10**6, sort_keys=False)
            mark = "" if each.written else "  # verl's default"
            yield f"{indent}{name}: {text.removesuffix(DOCUMENT_END).strip()}{mark}"

    return "\n".join([*lines, "", *written(tree, 0)]) + "\n"
