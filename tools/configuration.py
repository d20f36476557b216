"""Write docs/configuration.md, every key of every command, from the dataclasses of mcore_rl/config.

python tools/configuration.py            # writes the page
python tools/configuration.py --check    # exits with 1 where it is out of date

A key's values and default are those of its field.  Its meaning is an entry of its dataclass's docstring: an entry
begins a line, or follows a sentence and two spaces, with the names of fields and a colon, and ends at the next entry or
at an empty line.  A subclass has the entries of its bases.  A field whose values are an Enum needs none if the Enum's
docstring says all.  Who reads a key is asked of every published algorithm, since a run refuses what nothing reads
(``config/unread_keys.py``); tests/house/test_key_readers.py holds the answers against computed advantages and losses.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from mcore_rl.config.algorithm_registry import ESTIMATOR_KEY, LOSS_KEY, algorithms
from mcore_rl.config.bounds import LARGEST_FLOAT, LARGEST_INT, PathKind, Setting, setting_of
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.compose import compose, offer_algorithms, read
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.names import field_of, has_key, key_of, value_at
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig, any_run_schema, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.typed import defaults, merge
from mcore_rl.config.unread_keys import why_unread

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
COMMANDS: dict[str, type[Any]] = {
    "train": any_run_schema(),
    "sft": SftConfig,
    "prefer": PreferConfig,
    "reward": RewardTrainingConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "cluster": ClusterConfig,
}
INTRODUCTION = f"""# Configuration: every key

<!-- made by tools/configuration.py -->

Every command checks all values before it imports torch or starts anything, and says everything that is wrong at once:
the key, the value, what is wrong, what to write instead. The exit code is then 2. `mcore-rl train`, `sft`, `generate`,
`evaluate`, `mcore-rl plan`, `mcore-rl rehearse` and `mcore-rl submit` share the checks; options of the other
tools have the same bounds. Contradictions between keys are refused too, and not listed here.

`[0, 1)` is 0 <= x < 1. Where a range ends at inf, a whole number is at most {LARGEST_INT:,} and another at most
{LARGEST_FLOAT:g}; nan and inf are never taken. A list of one item may be written without brackets. A text is what was
written, on a command line and in a file: `8:00:00`, `0123`, `1e3` and `on` are no numbers and no booleans where a
text belongs. Only below `megatron`, `engine`, `config_overrides` and `chat_template_kwargs`, whose keys have no
declared type, yaml decides. A text has one line of at most 4,096 characters, and is empty only where its default is.
A path that is read must be there and be a regular file (or a directory without pipes and devices in it); a path that
is written must be writable. A yaml file has at most 128 KiB, 32 levels, and 100,000 values with every alias written
out; an override has at most 65,536 characters.
The planner and the rehearsal look at no path of the run.

**default**: what a command takes where nothing is written; `${{KEY}}` is the value of another key, and *by algorithm*
means that `algorithm=NAME` [may set another](algorithms.md#which-settings-make-which-algorithm).
**read by**: the commands; `cluster` is `mcore-rl plan`, `submit` and `rehearse`, as `cluster.KEY=VALUE` or in a file of
`launch/clusters`. Then the algorithms of `mcore-rl train`, unless all of them read it, and what else has to be written
for it. A key that is written and [not read](algorithms.md#keys-that-are-not-read) is refused.

"""
CLUSTER = "cluster"
# Keys, or groups of keys, of a schema that a command shares with others and refuses, whatever else is written.
REFUSED = {
    "sft": (
        "actor.share_prompts",
        "trainer.critic_warmup",
        "trainer.mode",
        "trainer.record_rollouts",
        "trainer.replay",
    ),
    "generate": ("rollout.partial", "rollout.over_sampling", "rollout.val_kwargs", "rollout.return_routed_experts"),
    "evaluate": ("reward.judge.path",),
}
BLIND = ("actor.microbatch_patches",)  # of trainers that read text alone
REFUSED["prefer"] = (*REFUSED["sft"], *BLIND, "data.step_labels_key")
REFUSED["reward"] = (*REFUSED["sft"], *BLIND, "data.end_of_turn")
PAGES = re.compile(r"\bdocs/(\w+)\.md\b")
HEADS = ("key", "values", "default", "meaning", "read by")


@dataclass(frozen=True)
class Key:
    """A key of one command.  schema: the dataclass that has it.  default: as the page shows it."""

    command: str
    schema: type[Any]
    setting: Setting
    default: str

    @property
    def section(self) -> str:
        """The group that it is of, dotted; "" for keys of none."""
        return self.setting.key.rpartition(".")[0]

    @property
    def cells(self) -> tuple[str, ...]:
        """All of its row but who reads it."""
        name = self.setting.key.rpartition(".")[2]
        meant = meaning(self.schema, name, self.setting.kind)
        return self.setting.key, values_of(self.setting), self.default, meant


def values_of(each: Setting) -> str:
    """What a setting may be."""
    place = each.mark(PathKind)
    if each.range is not None:
        kind = f"{'whole ' if each.kind is int else ''}{'numbers' if each.listed else 'number'} in {each.range.text}"
    elif isinstance(each.kind, type) and issubclass(each.kind, Enum):
        kind = " or ".join(f"`{one.value}`" for one in each.kind)
    elif place is not None:
        named = {"": "", "model": " or [Hub id](hub.md)", "dataset": ", folder or [Hub id](hub.md)"}[place.hub]
        kind = f"{place.kind}{' to write' if place.written else ''}{named}"
    else:
        kind = {bool: "`true` or `false`", str: "text"}.get(each.kind, "keys and values")
        assert kind != "keys and values" or get_origin(each.kind) is dict, each.key
    many = "list: " if each.listed else "names, and for each a " if each.mapped else ""
    return f"{many}{kind}{', or `null`' if each.optional else ''}"


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Enum):
        return str(value.value)
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def composed(command: str) -> Any:
    """What a command takes where nothing is written; interpolations are not resolved."""
    if command == CLUSTER:
        return defaults(ClusterConfig)
    tree = defaults(COMMANDS[command])
    merge(tree, read(command, command, None, offer_algorithms([], None)))
    return tree


def keys(command: str, schema: type[Any]) -> Iterator[Key]:
    """Every key of a command, in the order of its fields."""
    set_by_algorithms = {key for each in algorithms().values() for key in each.all_settings()}
    prefix = f"{CLUSTER}." if command == CLUSTER else ""

    def of(group: type[Any], node: Any, path: str) -> Iterator[Key]:
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            if each.metadata.get("omegaconf_ignore"):
                continue
            hint = hints[each.name]
            value = node[key_of(each.name)]
            key = f"{path}{key_of(each.name)}"
            if is_dataclass(hint):
                yield from of(hint, value, f"{key}.")  # type: ignore[arg-type]  # a class
                continue
            default = f"`{shown(value)}`" if value != "" else ""
            if command == "train" and key in set_by_algorithms:
                default += ", by algorithm"
            yield Key(command, group, setting_of(key, hint, None), default)

    return of(schema, composed(command), prefix)


def notes(section: str) -> list[str]:
    """What is said of a group as a whole: by the field that it is, and by its dataclass."""
    told: dict[str, list[str]] = {}
    for command, schema in COMMANDS.items():
        path = section.split(".")
        if not section or (path[0] == CLUSTER) != (command == CLUSTER):
            continue
        outer = None
        inner = schema
        for name in path[1:] if command == CLUSTER else path:
            outer = inner
            inner = get_type_hints(inner, include_extras=True).get(name) if is_dataclass(inner) else None
        if not is_dataclass(inner):
            continue
        said = entries(outer).get(path[-1], "") if outer else ""  # type: ignore[arg-type]  # a class
        told.setdefault(f"{said} {about(inner)}".strip(), []).append(command)  # type: ignore[arg-type]
    texts = [(text[0].upper() + text[1:], commands) for text, commands in told.items() if text]
    return [text if len(texts) == 1 else f"In `{'`, `'.join(commands)}`: {text}" for text, commands in texts]


def rows_of(rows: dict[tuple[str, ...], list[str]]) -> Iterator[str]:
    """The lines of a section's table; what several commands read otherwise stays together."""
    order = list(dict.fromkeys(cells[0] for cells in rows))
    seen = set[str]()
    for cells, commands in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        key, *others = cells
        who = ", ".join(commands)
        if "train" in commands and (by := readers_text(key)):
            who += f"<br>{by}"
        anchor = "" if key in seen else f'<a id="{key}"></a>'
        seen.add(key)
        yield f"| {anchor}`{key}` | {' | '.join((*others, who))} |"


def page() -> str:
    """The whole page."""
    sections: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for command, schema in COMMANDS.items():
        for each in keys(command, schema):
            if any(f"{each.setting.key}.".startswith(f"{one}.") for one in REFUSED.get(command, ())):
                continue
            sections.setdefault(each.section, {}).setdefault(each.cells, []).append(command)
    titles = {name: f"`{name}`" if name else "Keys of no group" for name in sections}
    anchors = {name: title.strip("`").replace(".", "").replace(" ", "-").lower() for name, title in titles.items()}
    lines = [INTRODUCTION + "Groups: " + ", ".join(f"[{titles[name]}](#{anchors[name]})" for name in sections) + "."]
    for section, rows in sections.items():
        lines += [f"\n## {titles[section]}\n", *(f"{note}\n" for note in notes(section))]
        lines += [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}", *rows_of(rows)]
    return PAGES.sub(r"[\1](\1.md)", "\n".join(lines)) + "\n"


ENTRY = re.compile(r"(?:^ *|(?<=\.  ))((?:\w+, )*\w+): ", re.MULTILINE)
WORDS = {"None": "`null`", "True": "`true`", "False": "`false`"}
SPECIAL = re.compile(r"\b(?:None|True|False)\b|[<*]")


def in_markdown(text: str) -> str:
    """A docstring in one line of markdown, in the words of yaml."""
    line = re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split()))
    pieces = line.split("`")  # every second one is code
    pieces[::2] = [SPECIAL.sub(lambda word: WORDS.get(word[0], f"\\{word[0]}"), each) for each in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|")


def _entries(schema: type[Any]) -> tuple[str, dict[str, str]]:
    """(what the docstring of ``schema`` says before its first entry, its entries), without those of its bases."""
    names = {each.name for each in fields(schema)}
    text = inspect.cleandoc(schema.__doc__ or "")
    starts = [match for match in ENTRY.finditer(text) if set(match[1].split(", ")) <= names]
    ends = [*(match.start() for match in starts), len(text)][1:]
    before = text[: starts[0].start()] if starts else text
    made = dict[str, str]()
    for match, end in zip(starts, ends, strict=True):
        named = match[1].split(", ")
        entry = text[match.end() : end].partition("\n\n")[0]
        several = f"{', '.join(f'``{name}``' for name in named)}: " if len(named) > 1 else ""
        made |= dict.fromkeys(named, several + entry)
    return before, made


@cache
def entries(schema: type[Any]) -> dict[str, str]:
    """The entry of each field of a dataclass that has one, as markdown."""
    classes = [each for each in reversed(schema.__mro__) if is_dataclass(each) and "__doc__" in vars(each)]
    return {name: in_markdown(text) for each in classes for name, text in _entries(each)[1].items()}


def about(schema: type[Any]) -> str:
    """What the docstring of a dataclass says of the whole group, as markdown."""
    return " ".join(in_markdown(each) for each in _entries(schema)[0].split("\n\n") if each.strip())


def meaning(schema: type[Any], name: str, kind: Any) -> str:
    """What the field ``name`` of ``schema`` means, as markdown; "" if nothing says so.  kind: of its values."""
    entry = entries(schema).get(name, "")  # type: ignore[arg-type]  # a class is hashable
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return entry
    values = in_markdown(kind.__doc__ or "")
    return f"{re.sub(f'see `{kind.__name__}`[.;]?', '', entry).strip()} {values}".strip()


@cache
def runs() -> Mapping[str, RunConfig]:
    """A run of each published algorithm, with nothing else written."""
    return {name: run_with(name) for name in algorithms()}


def readers(key: str) -> dict[str, tuple[str, ...]]:
    """Algorithm -> the overrides without which it would not read ``key``, as a refusal's remedies write them.

    An algorithm is absent if it has no use for the key, or refuses one of these overrides.
    """
    reading = {}
    for name, run in runs().items():
        remedies = tuple(dict.fromkeys(remedy for _, remedy in why_unread(run, key)))
        if all(_is_setting(each) and not _is_refused(name, each) for each in remedies):
            reading[name] = remedies
    return reading


def _is_setting(remedy: str) -> bool:
    """Whether ``remedy`` is an override that leaves the algorithm what it is."""
    key, written, _ = remedy.partition("=")
    return bool(written) and key not in (ESTIMATOR_KEY, LOSS_KEY) and " " not in key


@cache
def _is_refused(name: str, override: str) -> bool:
    """Whether a run of the algorithm ``name`` refuses ``override``."""
    key = override.partition("=")[0]
    run = run_with(name, override.partition(", or ")[0])
    return any(each.key == key for each in run_violations(run, planned=True))


@cache
def run_with(name: str, *overrides: str) -> RunConfig:
    """A run of the algorithm ``name`` with ``overrides``; none counts as written, so that none is refused as unread."""
    run = compose(RunConfig, "train", [f"algorithm={name}", *overrides])
    run.written = frozenset()
    return run


def changed(run: RunConfig, key: str, value: Any) -> RunConfig:
    """A copy of ``run`` with another value."""
    *groups, name = field_of(key).split(".")
    copied = copy.deepcopy(run)
    setattr(reduce(getattr, groups, copied), name, value)
    return copied


def as_condition(remedy: str, key: str) -> str:
    """``remedy`` with every value that makes ``key`` read, where its values are few."""
    switch, _, _ = remedy.partition("=")
    for run in runs().values():
        value = value_at(run, switch) if has_key(run, switch) else None
        if not isinstance(value, Enum) or remedy not in [each for _, each in why_unread(run, key)]:
            continue
        reading = [
            each for each in type(value) if all(remedy != one for _, one in why_unread(changed(run, switch, each), key))
        ]
        if len(reading) > 1 and len(reading) == len(type(value)) - 1:
            (other,) = set(type(value)) - set(reading)
            return f"`{switch}` other than `{other.value}`"
        return f"`{switch}={'` or `'.join(each.value for each in reading)}`"
    return f"`{remedy}`" if remedy.endswith(("=true", "=false")) else f"`{remedy}`, say"


def named(names: Sequence[str], among: Sequence[str], everyone: str) -> str:
    """``names`` in a table: all ``among`` which they are, all but a few, or these.  everyone: the word for all."""
    rest = [each for each in among if each not in names]
    if not rest:
        return everyone
    return f"{everyone} but {_listed(rest)}" if len(rest) < len(names) else _listed(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def readers_text(key: str) -> str:
    """The algorithms that read ``key``, as markdown; "" if all do, and "no algorithm" if none does."""
    reading = readers(key)
    if not reading:
        return "no algorithm"
    by_themselves = [name for name, remedies in reading.items() if not remedies]
    if len(by_themselves) == len(algorithms()):
        return ""
    told = [named(by_themselves, list(algorithms()), "all")] if by_themselves else []
    asked = [name for name, remedies in reading.items() if remedies]
    if asked:
        remedies = dict.fromkeys(each for name in asked for each in reading[name])
        conditions = " and ".join(as_condition(each, key) for each in remedies)
        rest = [name for name in algorithms() if name not in by_themselves]
        told.append(f"{named(asked, rest, 'the others' if told else 'all')} with {conditions}")
    return "; ".join(told)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main())
