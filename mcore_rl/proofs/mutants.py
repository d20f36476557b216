"""Every single wrong rule that a family's tables could hold by mistake: what the proof must not call proven.

A mutant is a family with one rule changed in one place: deleted, another source of the same shape, sources in another
order, another axis, layout, stage, dimension or other layers, and so on.  Two rules that have each other's sources are
one mutant too, because each name is then still consumed once.  ``mutation.py`` judges them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from types import FunctionType
from typing import Any, TypeVar

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.rules import (
    SIZES,
    Axis,
    HfTensor,
    Layers,
    Rule,
    Sections,
    ShardRanges,
    Sizes,
    Stage,
    always,
)

T = TypeVar("T")
UNJUDGED = "unjudged"
WRONG_KEY = "decoder.layers.{l}.self_attention.wrong.weight"
TABLES = ("weights", "rollout", "rollout_without_latent")


@dataclass(frozen=True)
class Mutant:
    """One wrong table.

    table: the field of ``Family`` that is wrong.  rule: the name of the rule.  part: what is changed of it, a field of
    ``Rule``, or another word for what happened to it.  change: how, in words.  family: with the wrong table.
    """

    table: str
    rule: str
    part: str
    change: str
    family: Family

    def __str__(self) -> str:
        return f"{self.table}: {self.rule}: {self.part} {self.change}".rstrip()


def with_rules(family: Family, table: str, rules: tuple[Rule, ...]) -> Family:
    """``family`` with other ``rules`` in ``table``."""
    changes: dict[str, Any] = {table: rules}
    return replace(family, **changes)


def mutants(family: Family, table: str, models: Sequence[ModelConfig]) -> Iterator[Mutant]:
    """Every mutant of a ``table`` of ``family``.

    models: of the family, which say what has equal shape.  A rule that none of them has is a mutant of its own, without
    a change: nobody can judge it.
    """
    rules: tuple[Rule, ...] = getattr(family, table)

    def made(at: int, part: str, change: str, *new: Rule) -> Mutant:
        wrong = with_rules(family, table, (*rules[:at], *new, *rules[at + 1 :]))
        return Mutant(table, rules[at].name, part, change, wrong)

    for number, rule in enumerate(rules):
        model = next((model for model in models if rule.only(model)), None)
        if model is None:
            yield Mutant(table, rule.name, UNJUDGED, "no model of the cases has it", family)
            continue
        yield made(number, "deleted", "")
        yield made(number, "doubled", "", rule, rule)
        for part, change, values in _changes(rule, rules, model):
            try:
                wrong = replace(rule, **values)  # type: ignore[arg-type]
            except AssertionError:
                continue  # a rule that cannot be written
            yield made(number, part, change, wrong)
    yield from _exchanges(family, table, models)


def _changes(rule: Rule, rules: tuple[Rule, ...], model: ModelConfig) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(part, change in words, new values of fields) of each way to get ``rule`` wrong."""
    sources = list(dict.fromkeys(tensor for other in rules if other.only(model) for tensor in other.hf))
    for place, held in enumerate(rule.hf):
        for other in sources:
            if other != held and other.shape(model) == held.shape(model):
                yield "hf", f"{held.name} is {other.name}", {"hf": _with(rule.hf, place, other)}
    for first, second in combinations(range(len(rule.hf)), 2):
        change = f"{rule.hf[first].name} and {rule.hf[second].name} change places"
        yield "hf", change, {"hf": _swapped(rule.hf, first, second)}
    if len(rule.hf) > 1:
        for place, held in enumerate(rule.hf):
            yield "hf", f"lacks {held.name}", {"hf": rule.hf[:place] + rule.hf[place + 1 :]}
    tables = (getattr(family, table) for family in FAMILIES.values() for table in TABLES)
    layouts: list[Any] = list(dict.fromkeys(each.layout for some in (*tables, rules) for each in some))
    choices: dict[str, list[object]] = {
        "layout": [*layouts, *_other_sections(rule, layouts)],
        "axis": list(Axis),
        "stage": list(Stage),
        "layers": list(Layers),
        "dim": list(range(max(len(rule.hf[0].dims), 2))),
        "stacked": [False, True],
        "turn": [(0, 1), (0, 2), (1, 2)],
        "dtype": [None, "float32"],
        "absent_ok": [False, True],
        "only": [always, _never],
        "checkpoint": [] if rule.stored_parts else [*([None] if rule.checkpoint else []), WRONG_KEY],
        "stored_parts": _other_parts(rule),
    }
    assert choices.keys() | {"name", "hf", "per_expert"} == {field.name for field in fields(Rule)}
    for part, values in choices.items():
        for value in values:
            if value != getattr(rule, part):
                yield part, f"is {_words(value)}", {part: value}


def _other_parts(rule: Rule) -> list[object]:
    """Ways to store ``rule`` in other parts: whole, in another order, or under another name."""
    parts = rule.stored_parts
    if parts:
        return [(), *(_swapped(parts, *pair) for pair in combinations(range(len(parts)), 2))]
    return [] if rule.dim or rule.checkpoint else [(("wrong", rule.hf[0].dims[0]),)]


@dataclass(frozen=True)
class _Exchanged:
    """``sections`` that takes two of them for each other: the tensor has its parts in another order."""

    sections: Sections
    first: int
    second: int

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        inner = [SIZES[part](model) for part in self.sections.parts]
        order = _swapped(tuple(range(len(inner))), self.first, self.second)
        places = self.sections.places(model, sizes)
        shard = self.sections.layout(model, [inner[part] for part in order], num_shards, index)
        moved = [places[order[each.source]].moved(each) for each in shard.ranges]
        return ShardRanges.of(moved, shard.size)

    def __str__(self) -> str:
        return f"{_words(self.sections)}, of which numbers {self.first} and {self.second} change places"


def _other_sections(rule: Rule, layouts: Sequence[Any]) -> Iterator[Any]:
    """The sections of a fused tensor cut in another way, of exchanged sizes, and one taken for another."""
    if not isinstance(rule.layout, Sections):
        return
    sections = rule.layout
    yield from (replace(sections, layout=layout) for layout in layouts if not isinstance(layout, Sections))
    for first, second in combinations(range(len(sections.parts)), 2):
        yield replace(sections, parts=_swapped(sections.parts, first, second))
        yield _Exchanged(sections, first, second)


def _never(model: ModelConfig) -> bool:
    return False


def _with(hf: tuple[HfTensor, ...], place: int, tensor: HfTensor) -> tuple[HfTensor, ...]:
    return (*hf[:place], tensor, *hf[place + 1 :])


def _swapped(values: tuple[T, ...], first: int, second: int) -> tuple[T, ...]:
    changed = list(values)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)


def _words(value: Any) -> str:
    if isinstance(value, Sections):
        return f"{_words(value.layout)} of {', '.join(value.parts)}"
    if isinstance(value, FunctionType):
        return str(value.__qualname__).replace(".<locals>.", " ").strip("_")
    return str(value)


def _exchanges(family: Family, table: str, models: Sequence[ModelConfig]) -> Iterator[Mutant]:
    """Two rules whose sources have equal shapes, with each other's."""
    rules: tuple[Rule, ...] = getattr(family, table)
    for (first, a), (second, b) in combinations(enumerate(rules), 2):
        model = next((model for model in models if a.only(model) and b.only(model)), None)
        if model is not None and a.hf != b.hf and a.hf_shapes(model) == b.hf_shapes(model):
            wrong = list(rules)
            wrong[first], wrong[second] = replace(a, hf=b.hf), replace(b, hf=a.hf)
            yield Mutant(table, a.name, "exchanged", f"with {b.name}", with_rules(family, table, tuple(wrong)))
