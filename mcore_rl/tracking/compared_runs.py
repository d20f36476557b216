"""What is said of several runs beside their curves: a table of the runs, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from mcore_rl.tracking.curves import names_of
from mcore_rl.tracking.head_card import facts, state_of
from mcore_rl.tracking.page import LIGHT, details, table, text
from mcore_rl.tracking.run_files import RecordedRun

# The first row is the result, whose name says what it is of.
TILES = ("Model", "Algorithm", "Data", "Hardware", "Time in steps", "Cost")
ABSENT = "-"


def run_table(runs: Sequence[RecordedRun]) -> str:
    """The HTML of a table with a column for each run, headed by its colour in the charts."""
    names = names_of(runs)
    keys = "".join(f'<li><i class="c{at % len(LIGHT)}"></i>{text(name)}</li>' for at, name in enumerate(names))
    columns = [{fact.name: fact for fact in facts(run)} for run in runs]
    results = [next((fact for fact in column.values() if fact.wide), None) for column in columns]
    rows = [
        ["state", *(state_of(run)[0] for run in runs)],
        ["steps", *(f"{run.last_step or 0} of {run.total_steps or 'unknown'}" for run in runs)],
        ["result", *("" if fact is None else _all_of(fact.name, fact.value, fact.notes) for fact in results)],
    ]
    for tile in TILES:
        told = [column.get(tile) for column in columns]
        rows.append([tile.lower(), *("" if fact is None else _all_of("", fact.value, fact.notes) for fact in told)])
    return f'<figure class="big"><ul>{keys}</ul>{table([], [["", *names], *rows])}</figure>'


def settings_that_differ(runs: Sequence[RecordedRun]) -> str:
    """The HTML of a table of the keys of config.yaml that have not one value in all ``runs``.

    Keys that some have not, as those of another program, are in a fold.
    """
    flat = [dict(_leaves(_config(run))) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [[key, *(str(each.get(key, ABSENT)) for each in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    of_all = [row for row in rows if all(row[0] in each for each in flat)]
    others = [row for row in rows if row not in of_all]
    head, title = ["key", *names_of(runs)], "<h2>Settings that differ</h2>"
    said = table(head, of_all) if of_all else '<p class="soft">None that all of these runs have.</p>'
    return title + said + (details("Keys that not all of them have", table(head, others)) if others else "")


def _all_of(name: str, value: str, notes: Sequence[str]) -> str:
    return "; ".join(filter(None, [f"{name}: {value}" if name else value, *notes]))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inside in value.items():
            yield from _leaves(inside, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _config(run: RecordedRun) -> Any:
    try:
        return yaml.safe_load(run.config) or {}
    except yaml.YAMLError:
        return {}
