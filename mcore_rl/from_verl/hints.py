"""What the command line says of a key of verl's that ``train``, or a command with its keys, found not to be there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from mcore_rl.config.names import NO_KEY
from mcore_rl.config.trl_names import trl_remedy
from mcore_rl.from_verl.answer import Answer, shown
from mcore_rl.from_verl.facts import MEGATRON, keys_of, versions
from mcore_rl.from_verl.row import KeyRow, NotHereError
from mcore_rl.from_verl.rules import PER_ROLE, RULES
from mcore_rl.from_verl.table import row_for
from mcore_rl.from_verl.written import Verl, value_of
from mcore_rl.ground.errors import Violation

ALONE = ("aggregation", "estimator", "loss")  # rules whose answer follows from one key alone


def hinted(violations: Sequence[Violation]) -> list[Violation]:
    """``violations``; where a key that is none of ours may be verl's, the remedy is ours.  TRL's names have theirs."""
    from mcore_rl.config.run import any_run_schema
    from mcore_rl.config.typed import all_keys

    known = list(all_keys(any_run_schema()))
    unknown = [each for each in violations if each.problem == NO_KEY and not trl_remedy(each.key)]
    told = {each.key: hint(each.key, str(each.value), known) for each in unknown}
    return [replace(each, remedy=told.get(each.key) or each.remedy) for each in violations]


def hint(key: str, value: str, known: Collection[str]) -> str:
    """What to write in the place of a key that is none of ours; "" if nobody can say.

    It is taken for a key of verl's, or for the end of one, or for one that ends as keys of ours or verl's do.
    known: ours.
    """
    for whole in (key, f"actor_rollout_ref.{key}"):
        if row := row_for(whole):
            return _meant_of(row, whole, value)
    parts = key.split(".")
    for place in range(len(parts)):
        end = ".".join(parts[place:])
        if "." not in end and place:
            break  # the last name alone says too little
        if rows := _ending_in(end):
            same_ours = {row.ours for row in rows}
            return _meant_of(rows[0], "", value) if len(same_ours) == 1 else _any_of(rows)
        if near := sorted(each for each in known if each.endswith(f".{end}")):
            return f"Did you mean {' or '.join(near[:4])}?"
    return ""


def _ending_in(end: str) -> list[KeyRow]:
    """The rows of keys of verl's that end in ``end``."""
    ending = sorted(key for key in keys_of(MEGATRON) if key.endswith(f".{end}"))
    return list(dict.fromkeys(row for key in ending if (row := row_for(key))))


def _any_of(rows: list[KeyRow]) -> str:
    ours = sorted({each for row in rows for each in row.ours})
    return f"Of verl's keys that end so, here are {', '.join(ours)}" if ours else _meant_of(rows[0], "", "")


def _meant_of(row: KeyRow, key: str, value: str) -> str:
    """What to write in the place of a key that ``row`` is about.  key: verl's; "": one of several."""
    if row.rule in ALONE and key and value:
        alone = Answer(Verl("train", MEGATRON, versions()[-1], {key: _plain(value)}))
        if row.rule in RULES:
            RULES[row.rule](alone.verl, alone)
        for role in alone.verl.places if row.rule in PER_ROLE else ():
            PER_ROLE[row.rule](alone.verl, alone, role)
        came = [f"{ours}={shown(each.value)}" for ours, each in alone.settings.items() if key in each.sources]
        if came:
            return f"It is verl's; write {came[0]}"
    if row.ours and not row.rule and "*" not in row.verl:
        try:
            ours = row.convert(_plain(value))
        except (NotHereError, ValueError, TypeError) as error:
            return f"It is verl's; here it is {row.ours[0]}, and {error}"
        written = f"{row.ours[0]}={shown(ours)}" if ours is not None and value else row.ours[0]
        return f"It is verl's; write {written}{_aside(row)}"
    if row.ours:
        return f"It is verl's; here it is {' or '.join(row.ours)}{_aside(row)}"
    return f"It is verl's, and {'is not here' if row.absent else 'needs nothing here'}: {row.note}. Leave it out"


def _aside(row: KeyRow) -> str:
    return f" ({row.note})" if row.note else ""


def _plain(value: str) -> Any:
    return value_of(f"key={value}", value) if value else value
