"""verl's configuration of a run into ours: a yaml file, and the list of what is different.

Nothing that was written is passed over in silence: each key is in the yaml, or in the list, or in both.  verl's
defaults are written too where they decide what is trained and ours are others, so that the same run comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from mcore_rl.config.algorithm_registry import algorithms, estimators
from mcore_rl.config.bounds import settings
from mcore_rl.from_verl.answer import Answer, Difference, Entry, ModelFacts, TranslatedSetting, shown
from mcore_rl.from_verl.row import KeyRow, NotHereError, same
from mcore_rl.from_verl.rules import PER_ROLE, RULES
from mcore_rl.from_verl.table import row_for, rows_of
from mcore_rl.from_verl.written import MODEL_PATHS, Verl
from mcore_rl.ground.errors import ConfigError, Violation

EMPTY: tuple[object, ...] = (None, False, 0, "", "null", "None", [], {})
NOT_READ = "is not read: "
EMPTY_VALUE = "???"  # composing refuses it until it is written


@dataclass
class Translation:
    """What becomes of a run of verl's.

    program: ours that runs it.  algorithm: the choice that the yaml begins with; "": none.
    settings: our key -> its value.  entries: the list.  violations: what our run refuses of it.
    run: our configuration; None if it cannot be composed.
    """

    verl: Verl
    program: str
    algorithm: str
    settings: dict[str, TranslatedSetting]
    entries: list[Entry]
    violations: list[Violation]
    run: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether our run does all that verl's does, and can be run."""
        return not self.violations and not any(
            each.kind in (Difference.absent, Difference.unknown) for each in self.entries
        )

    def of_kind(self, kind: Difference) -> list[Entry]:
        """The entries of one heading."""
        return [each for each in self.entries if each.kind is kind]


def translate(verl: Verl, model: ModelFacts | None = None) -> Translation:
    """``verl`` in our keys.  model: what is known of the model that it trains."""
    answer = Answer(verl, model or ModelFacts())
    for text, why in verl.unread:
        row = row_for(_key_of(text), verl.program)
        if row is not None and not row.ours and not row.absent:
            answer.entries.append(Entry(Difference.dropped, text, "", text=row.note))
        else:
            answer.entries.append(Entry(Difference.unknown, text, "", text=why))
    idle = _idle_groups(verl)
    rows = [row for row in rows_of(verl.program) if not any(_is_of(row, group) for group in idle)]
    for key in verl.written:
        _tell_unknown(answer, key, idle)
    for row in rows:
        _apply(answer, row)
    wanted = {row.rule for row in rows if row.rule}
    for name, rule in RULES.items():
        if name in wanted:
            rule(verl, answer)
    for name, per_role in PER_ROLE.items():
        for role in verl.places:
            if name in wanted and role not in idle:
                per_role(verl, answer, role)
    _tell_of_rules(answer)
    if answer.model.refused:
        for key in MODEL_PATHS:
            answer.absent(key, answer.model.refused)
    if answer.model.checkpoint and verl.program == "train":
        answer.settings["recipe.checkpoint"] = TranslatedSetting(answer.model.checkpoint, (), written=True)
    algorithm = _algorithm(answer) if verl.program == "train" else ""
    _leave_out_defaults(answer, algorithm)
    violations, run = _refused(answer, algorithm)
    _compare_defaults(answer, run if run is not None else _composed(answer, algorithm, {}))
    for text, _ in verl.unread:
        row = row_for(_key_of(text), verl.program)
        if row is not None and (name := _empty(row, _key_of(text))):
            answer.settings[name] = TranslatedSetting(EMPTY_VALUE, (), written=True)
    return Translation(verl, verl.program, algorithm, answer.settings, answer.entries, violations, run)


def _key_of(word: str) -> str:
    """The key of an override."""
    return word.partition("=")[0].lstrip("+~")


def _empty(row: KeyRow, key: str) -> str:
    """Our key that has no value since nobody could read verl's ``key``; "" where the default may stay."""
    if row.keeps:
        return ""
    last = key.rpartition(".")[2]
    alike = [each for each in row.ours if last in (each.rpartition(".")[2], f"lora_{each.rpartition('.')[2]}")]
    return next(iter(row.ours if len(row.ours) == 1 else alike), "")


def _idle_groups(verl: Verl) -> dict[str, str]:
    """Groups of ours that this run has no use for -> why."""
    if verl.program != "train":
        return {}
    estimator = verl["algorithm.adv_estimator"]
    idle = {} if estimator == "gae" else {"critic": f"algorithm.adv_estimator={estimator} needs no critic"}
    if not verl["reward_model.enable"] and not verl["reward.reward_model.enable"]:
        idle["reward_model"] = "there is no reward model"
    return idle


def _is_of(row: KeyRow, group: str) -> bool:
    """Whether a row is about nothing but a group of ours; the switch of the group is not."""
    if group == "critic":
        return row.verl.startswith("critic.")
    return any(each.startswith(f"{group}.") for each in row.ours) and row.ours != (f"{group}.enable",)


def _tell_unknown(answer: Answer, key: str, idle: Mapping[str, str]) -> None:
    """An entry of a key that no row is about, or one of an idle group."""
    row = row_for(key, answer.verl.program)
    if row is None:
        near = get_close_matches(key, answer.verl.keys - {*answer.verl.written}, 1)
        remedy = f"did you mean {near[0]}?" if near else "docs/configuration.md has all of ours"
        answer.unknown(key, f"verl has no such key in the versions that are known; {remedy}")
    elif why := next((why for group, why in idle.items() if _is_of(row, group)), ""):
        answer.dropped(key, why)


def _apply(answer: Answer, row: KeyRow) -> None:
    """What a row alone says of the keys that it is about."""
    verl = answer.verl
    if row.rule:
        return
    if "*" in row.verl:
        keys = [key for key in verl.written if row.matches(key) and row_for(key, verl.program) is row]
    else:
        keys = [key for key in row.names if key in verl.keys]
    for key in keys:
        written = key in verl.written
        value = verl[key]
        try:
            ours = row.convert(value)
        except (NotHereError, ValueError, TypeError) as error:
            answer.absent(key, str(error), row.ours[0] if row.ours else "")
            continue
        if row.ours and "*" in row.verl:
            names = key.removeprefix(row.verl.partition("*")[0]) if "{" not in row.verl else key.rpartition(".")[2]
            answer.add(row.ours[0], names.split("."), ours, key)
            if row.differs:
                answer.changed(key, row.note, f"{row.ours[0]}.{names}={shown(ours)}")
        elif row.ours:
            _take(answer, row, key, ours, written=written)
        elif written:
            is_needless = not row.absent or row.convert is not same
            harmless = is_needless or value in EMPTY or value == verl.defaults.get(key)
            answer.tell(Difference.dropped if harmless else Difference.absent, key, row.note)


def _take(answer: Answer, row: KeyRow, key: str, ours: Any, *, written: bool) -> None:
    """A key of ours takes the value."""
    (name,) = row.ours
    if not written and row.needed:
        if ours not in (None, []) and name not in answer.settings:
            answer.entries.append(Entry(Difference.default, key, ours, f"{name}=", "is nobody's: write yours"))
        return
    if not written and (row.keeps or ours is None):
        if row.keeps and ours not in (None, ""):
            answer.entries.append(Entry(Difference.default, key, ours, name))  # compared with ours later
        return
    if ours is None and (row.convert is not same or not _takes_null(name, answer.verl.program)):
        answer.dropped(key, row.note or "the default here")
        return
    before = answer.settings.get(name)
    answer.set(name, ours, key)
    if written and before is not None and before.written and before.value != ours:
        for lost in before.sources:
            answer.changed(lost, f"{key} holds, which is the same key here", f"{name}={shown(ours)}")
    if row.differs:
        answer.changed(key, row.note, f"{name}={shown(ours)}")


def _takes_null(key: str, program: str) -> bool:
    """Whether a key of ours may be null."""
    schema = _schema(program)
    return any(each.optional for each in settings(schema) if each.key == key)  # type: ignore[arg-type]  # a class


def _schema(program: str) -> type[Any]:
    from mcore_rl.config.evaluate import EvaluateConfig
    from mcore_rl.config.generate import GenerateConfig
    from mcore_rl.config.run import any_run_schema
    from mcore_rl.config.sft import SftConfig

    schemas: dict[str, type[Any]] = {
        "train": any_run_schema(),
        "sft": SftConfig,
        "generate": GenerateConfig,
        "evaluate": EvaluateConfig,
    }
    return schemas[program]


def _tell_of_rules(answer: Answer) -> None:
    """Entries of the written keys that rules read: what they came to, and what is different."""
    told = {each.verl for each in answer.entries}
    for key in answer.verl.written:
        row = row_for(key, answer.verl.program)
        if row is None or not row.rule or key in told:
            continue
        came = [f"{ours}={shown(each.value)}" for ours, each in answer.settings.items() if key in each.sources]
        if came and row.differs:
            answer.changed(key, row.note, " ".join(came))
        elif not came:
            answer.dropped(key, row.note or "the default here")


def _algorithm(answer: Answer) -> str:
    """The algorithm whose estimator and loss these are: the one of the loss's name, or else of the estimator's."""
    estimator = answer.settings["algorithm.adv_estimator"].value
    mode = answer.settings.get("actor.loss_mode")
    loss = "ppo_clip" if mode is None else mode.value
    both = [name for name, each in algorithms().items() if (each.advantages.name, each.loss.name) == (estimator, loss)]
    for name in (loss, estimator):
        if name in both:
            return str(name)
    one = [name for name, each in algorithms().items() if each.advantages.name == estimator]
    assert estimator in estimators() and one, estimator
    return both[0] if len(both) == 1 else estimator if estimator in one else one[0]


def _composed(answer: Answer, algorithm: str, settings: dict[str, TranslatedSetting]) -> Any:
    """Our configuration with ``settings``, as the yaml file composes.  Raises ConfigError."""
    from mcore_rl.config.typed import composed, put

    program = answer.verl.program
    tree = deepcopy(_base(program, algorithm))
    for key, setting in settings.items():
        put(tree, key, setting.value)
    return composed(_schema(program), tree, settings)


@cache
def _base(program: str, algorithm: str) -> Any:
    """What hydra composes of our files alone."""
    from mcore_rl.config.compose import offer_algorithms, read

    choices = [f"algorithm={algorithm}"] if algorithm else []
    return read(program, program, None, offer_algorithms(choices, None))


@cache
def _ours(program: str, algorithm: str) -> dict[str, Any]:
    """The defaults of our ``program`` with ``algorithm``."""
    from mcore_rl.config.compose import as_dict

    return as_dict(_composed(Answer(Verl(program, "", "", {})), algorithm, {}))


def _leave_out_defaults(answer: Answer, algorithm: str) -> None:
    """Leaves out verl's defaults that are ours too, and lists the others, which are written."""
    ours = _ours(answer.verl.program, algorithm)
    for key, setting in list(answer.settings.items()):
        if setting.written:
            continue
        if _equal(_at(ours, key), setting.value):
            del answer.settings[key]
        else:
            source = next((each for each in setting.sources if each in answer.verl.keys), "")
            theirs = answer.verl[source] if source else setting.value
            text = "written into the yaml, so that it is the same run"
            name = source or setting.sources[0]
            answer.entries.append(Entry(Difference.default, name, theirs, f"{key}={shown(setting.value)}", text))


def _compare_defaults(answer: Answer, run: Any) -> None:
    """Completes the entries of defaults that ours keeps, and leaves out those that are the same."""
    from mcore_rl.config.compose import as_dict

    ours = as_dict(run)
    entries = list[Entry]()
    for each in answer.entries:
        if each.kind is not Difference.default or "=" in each.ours:
            entries.append(each)
        elif not _equal(here := _at(ours, each.ours), each.value):
            entries.append(replace(each, ours=f"{each.ours}={shown(here)}"))
    answer.entries = entries


def _refused(answer: Answer, algorithm: str) -> tuple[list[Violation], Any]:
    """Takes out the keys that our run would not read; (what else it refuses, the run)."""
    from mcore_rl.config.evaluate import evaluate_violations
    from mcore_rl.config.generate import generate_violations
    from mcore_rl.config.run import run_violations

    while True:
        try:
            composed = _composed(answer, algorithm, answer.settings)
        except ConfigError as error:
            return list(error.violations), None
        program = answer.verl.program
        if program in ("generate", "evaluate"):
            violations = generate_violations(composed) if program == "generate" else evaluate_violations(composed)
            return [each for each in violations if not each.problem.startswith("is not set")], composed
        violations = run_violations(composed, planned=True) if program == "train" else composed.violations(planned=True)
        unread = [each for each in violations if each.problem.startswith(NOT_READ) and each.key in answer.settings]
        if not unread:
            return violations, composed
        for each in unread:
            setting = answer.settings.pop(each.key)
            answer.entries = [entry for entry in answer.entries if not entry.ours.startswith(f"{each.key}=")]
            for key in setting.sources if setting.written else ():
                if not any(entry.verl == key for entry in answer.entries) and not _came(answer, key):
                    answer.dropped(key, f"not read here: {each.problem.removeprefix(NOT_READ)}")


def _came(answer: Answer, key: str) -> bool:
    return any(key in each.sources for each in answer.settings.values())


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two plain values mean the same."""
    if isinstance(ours, list) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool) or ours is None or theirs is None:
        return ours is theirs
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return str(ours) == str(theirs)
