"""report.html: what was learned, how it went, and what the model writes now, from the run directory alone.

It reads files and computes nothing but the verdict.  Its head says which model was trained, by what, on what, for how
long, at what cost, and with what result.  A run that was killed gets the same page without a verdict, and the page
names what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.names import leaf_values
from mcore_rl.tracking.atomic import write_whole
from mcore_rl.tracking.console import duration, number, spent
from mcore_rl.tracking.curves import curves, names_of
from mcore_rl.tracking.metrics import METRICS
from mcore_rl.tracking.page import LIGHT, details, page, table, text
from mcore_rl.tracking.run_files import RecordedRun, read_run, setting
from mcore_rl.tracking.run_owner import OWNER, Owner, read_owner
from mcore_rl.tracking.sample_section import OFFLINE_LOSSES, before_after, sample_browser
from mcore_rl.tracking.time_section import time_section
from mcore_rl.tracking.verdict import Accuracy, Gain, best, gain

# The shares by which runs without samples are judged: what is held out, what a share of it is, and as a sentence.
HELD_OUT = {
    "prefer/val_accuracy": (
        "Held-out pairs",
        "the preferred answer has the higher reward",
        "the preferred answer of {} of the pairs has the higher reward",
    ),
    "reward/val_accuracy": (
        "Held-out pairs or outcomes",
        "scores agree with the labels",
        "scores agree with the labels of {} of them",
    ),
}
LOSSES = {
    "sft/val_loss": "nats per trained token",
    "prefer/val_loss": "a pair or answer",
    "reward/val_loss": "a pair or answer",
}
# The tiles of the head that the table of several runs has, after the result.
TILES = ("Model", "Algorithm", "Data", "Hardware", "Time in steps", "Cost")
ABSENT = "-"
RECENT = 20  # steps, of which the mean tells how long the rest will take


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` into the run directory, and return its path.  ConfigError: there is no run in it."""
    run = read_run(run_dir)
    path = run.path / "report.html"
    write_whole(path, report_page(run))
    return path


def report_page(run: RecordedRun, live: Mapping[str, str] | None = None) -> str:
    """The page of ``run``.  live: of a page that follows the run; see ``page``."""
    sections = {
        "head": head_card(run) + _heading(run),
        "accuracy": "" if _is_said_in_one(run) else _learned([run]),
        "curves": curves([run]),
        "time": time_section(run),
        "compared": before_after(run),
        "browse": sample_browser(run),
        "notes": _notes_and_warnings(run),
    }
    links = {"curves": "Curves", "time": "Time", "compared": "Before and after", "browse": "Samples", "notes": "Notes"}
    menu = "".join(f'<a href="#{name}">{title}</a>' for name, title in links.items() if sections[name])
    note = '<p id="live" class="soft">Live: this page follows the run.</p>' if live else ""
    inside = "".join(f'<section id="{name}">{html}</section>\n' for name, html in sections.items())
    scripts = [*(["live_page.js"] if live else []), "sample_browser.js"]  # the first keeps the page as it was sent
    body = f'<nav>{menu}</nav>{note}<main data-together="together">{inside}</main>'
    return page(f"{run.name}: what was learned", [body], scripts, live)


def write_comparison(run_dirs: Sequence[Path | str], path: Path) -> Path:
    """Write one page with the curves of several runs over one another.  ConfigError: one of them is no run."""
    runs = [read_run(each) for each in run_dirs]
    names = ", ".join(names_of(runs))
    sections = [f"<h1>{text(names)}</h1>", _run_table(runs), _learned(runs), _settings_that_differ(runs), curves(runs)]
    named = zip(names_of(runs), runs, strict=True)
    sections += [details(f"Configuration of {name}", f"<pre>{text(run.config)}</pre>") for name, run in named]
    body = f'<main data-together="together">{"".join(sections)}</main>'
    write_whole(path, page(f"Runs: {names}", [body]))
    return path


def _run_table(runs: Sequence[RecordedRun]) -> str:
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


def _settings_that_differ(runs: Sequence[RecordedRun]) -> str:
    """The HTML of a table of the keys of config.yaml that have not one value in all ``runs``.

    Keys that some have not, as those of another program, are in a fold.
    """
    flat = [dict(leaf_values(run.settings)) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [[key, *(str(each.get(key, ABSENT)) for each in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    of_all = [row for row in rows if all(row[0] in each for each in flat)]
    others = [row for row in rows if row not in of_all]
    head = ["key", *names_of(runs)]
    title = "<h2>Settings that differ</h2>"
    said = table(head, of_all) if of_all else '<p class="soft">None that all of these runs have.</p>'
    return title + said + (details("Keys that not all of them have", table(head, others)) if others else "")


def _all_of(name: str, value: str, notes: Sequence[str]) -> str:
    return "; ".join(filter(None, [f"{name}: {value}" if name else value, *notes]))


def _is_said_in_one(run: RecordedRun) -> bool:
    """Whether a sentence above says all that the table of validations would."""
    return run.complete and len(run.accuracies) == 1


def _heading(run: RecordedRun) -> str:
    sections = [_troubles(run)]
    if not run.complete:
        sections = [_progress(run), *sections, _said("No verdict", "this run has not been recorded to its end")]
    elif not run.accuracies and any(run.values(key) for key in LOSSES):
        judged = [(run.numbers(key), unit) for key, unit in LOSSES.items()]
        sections += [_loss_verdict(losses, unit) for losses, unit in judged if losses]
        for key, (title, _, said) in HELD_OUT.items():
            sections += [_share_verdict(title, said, shares)] if (shares := run.numbers(key)) else []
        sections += [_calibration(errors)] if (errors := run.numbers("reward/val_ece")) else []
    elif not run.accuracies:
        sections.append(_said("No verdict", "there are no validation samples"))
    elif _is_said_in_one(run):
        sections += [_verdict(source, validations) for source, validations in run.accuracies.items()]
    return "".join(sections)


def _said(title: str, sentence: str, kind: str = "") -> str:
    """A sentence of the verdict.  kind: a class of the style sheet, "good" or "bad"."""
    return f'<div class="{f"verdict {kind}".strip()}"><p><b>{text(title)}:</b> {text(sentence)}.</p></div>'


def _kind(gained: float, *, told: bool) -> str:
    """The class of a change for the better or the worse; "" where that cannot be told."""
    return ("good" if gained > 0 else "bad") if told else ""


def _share_verdict(title: str, said: str, shares: Sequence[tuple[int, float]]) -> str:
    """What ``said`` says of the first and the last of ``shares``: (step, share) of each validation, one or more."""
    first, before = shares[0]
    last, after = shares[-1]
    sentence = f"{said.format(f'{before:.1%}')} at step {first}"
    if last > first:
        sentence += f", and of {after:.1%} at step {last}"
    return _said(title, sentence, _kind(after - before, told=last > first))


def _calibration(errors: Sequence[tuple[int, float]]) -> str:
    """How far the probabilities that scores stand for are from what is so.  errors: (step, ECE), one or more."""
    step, error = errors[-1]
    sentence = f"the probabilities that scores stand for are {error:.1%} from what is so at step {step}, in the mean"
    return _said("Calibration", sentence)


def _loss_verdict(losses: Sequence[tuple[int, float]], unit: str) -> str:
    """What training did to the validation loss.  losses: (step, loss) of each validation, one or more."""
    first, before = losses[0]
    last, after = losses[-1]
    sentence = f"{number(before)} {unit} at step {first}"
    if last > first:
        lowest = min(losses, key=lambda each: each[1])
        sentence = f"went from {sentence} to {number(after)} at step {last}; the lowest was {number(lowest[1])} "
        sentence += f"at step {lowest[0]}"
    return _said("Validation loss", sentence, _kind(before - after, told=last > first))


def _progress(run: RecordedRun) -> str:
    total = "an unknown number of" if run.total_steps is None else str(run.total_steps)
    reached = "no step" if run.last_step is None else f"step {run.last_step}"
    return f'<p class="soft">{text(run.name)}: {reached} of {total} steps recorded.</p>'


def _troubles(run: RecordedRun) -> str:
    """What went wrong within steps, by the metrics that count it."""
    troubles = [
        f"{amount:g} {row.unit} {row.help}"
        for row in METRICS
        if row.better == "down" and row.reduction == "sum" and not row.key.startswith("time/")
        if (amount := sum(value or 0 for _, value in run.values(row.key)))
    ]
    return "".join(f"<p>Worth a look: {text(each)}.</p>" for each in troubles)


def _verdict(source: str, validations: Sequence[Accuracy]) -> str:
    first = validations[0]
    last = validations[-1]
    if len(validations) == 1:
        return _said(source, f"validated once, at step {last.step}: {_accuracy(last)}, {last.num_prompts} prompts")
    change = gain(first, last)
    word = "gain" if change.points >= 0 else "loss"
    points = f"{abs(100 * change.points):.1f} points"
    judgement = (
        f"a significant {word} of {points}" if change.significant else f"no significant change ({word} of {points})"
    )
    p = "" if change.p is None else f", {_p(change.p)}"
    sentence = (
        f"validation accuracy went from {_accuracy(first)} at step {first.step} to {_accuracy(last)} at step "
        f"{last.step} on {last.num_prompts} prompts: {judgement} ({change.basis}{p})"
    )
    if (top := best(validations)).step != last.step:
        sentence += f". The best was {_accuracy(top)} at step {top.step}; the highest of several is partly luck"
    return _said(source, sentence, _kind(change.points, told=change.significant))


def _learned(runs: Sequence[RecordedRun]) -> str:
    """The table of first, best and last validation of each run and data source."""
    rows = []
    for name, run in zip(names_of(runs), runs, strict=True):
        for source, validations in run.accuracies.items():
            first = validations[0]
            top = best(validations)
            last = validations[-1]
            cells = [f"{_accuracy(each)} (step {each.step})" for each in (first, top, last)]
            rows.append([name, source, last.num_prompts, *cells, _change(gain(first, last), run.complete)])
    if not rows and any(run.values(key) for run in runs for key in OFFLINE_LOSSES):
        return ""  # such training is judged by its loss
    if not rows:
        return "<h2>Validation accuracy</h2><p class='soft'>No validation samples were found in validation/.</p>"
    head = ["run", "data source", "prompts", "first", "best", "last", "last against first"]
    skip = 1 if len(runs) == 1 else 0
    note = (
        "In brackets: 95 % intervals (Wilson's, over prompts). The best is the highest of several, and so partly luck: "
        "judge a run by the last."
    )
    body = table(head[skip:], [row[skip:] for row in rows])
    return f'<h2>Validation accuracy</h2>{body}<p class="soft">{text(note)}</p>'


def _notes_and_warnings(run: RecordedRun) -> str:
    config = f"<pre>{text(run.config)}</pre>" if run.config else '<p class="soft">config.yaml is missing.</p>'
    values = leaf_values(run.environment)
    rows = [[key, " ".join(map(str, value)) if isinstance(value, list) else value] for key, value in values]
    place = table([], rows) if rows else '<p class="soft">environment.json is missing.</p>'
    return "<h2>Notes and warnings</h2>" + details("Configuration", config) + details("Environment", place)


def _accuracy(accuracy: Accuracy) -> str:
    low, high = accuracy.interval
    return f"{100 * accuracy.mean:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def _change(change: Gain, complete: bool) -> str:
    if not complete:
        return f"{100 * change.points:+.1f} points so far"
    judgement = "significant" if change.significant else "not significant"
    return f"{100 * change.points:+.1f} points, {judgement}" + ("" if change.p is None else f", {_p(change.p)}")


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


@dataclass(frozen=True)
class Fact:
    """One tile.  value: in large; notes: below it.  kind: "good", "bad" or "".  wide: the result, which comes first."""

    name: str
    value: str
    notes: Sequence[str] = ()
    kind: str = ""
    wide: bool = False


def head_card(run: RecordedRun) -> str:
    """The HTML of the title, the state and the tiles."""
    state, kind = state_of(run)
    tiles = "".join(_tile(fact) for fact in facts(run))
    title = f'<div class="title"><h1>{text(run.name)}</h1><span class="badge {kind}">{text(state)}</span></div>'
    return f'{title}<dl class="facts">{tiles}</dl>'


def facts(run: RecordedRun) -> list[Fact]:
    """The tiles of ``run``; what its files do not tell is left out."""
    config = run.settings
    made = [_result(run), _model(run, config), _algorithm(config), _data(config), _hardware(run, config), *_time(run)]
    return [fact for fact in made if fact is not None and fact.value]


def _tile(fact: Fact) -> str:
    lines = "".join(f"<dd>{text(line)}</dd>" for line in (fact.value, *fact.notes) if line)
    kinds = " ".join(filter(None, [fact.kind, "result" if fact.wide else ""]))
    return f'<div class="{kinds}"><dt>{text(fact.name)}</dt>{lines}</div>'


def state_of(run: RecordedRun) -> tuple[str, str]:
    """The state of the run in words, and its class of the style sheet."""
    if run.complete:
        return "finished", "good"
    owner = read_owner(run.path / OWNER)
    us = Owner()
    if owner is None or (owner.machine == us.machine and owner.pid == os.getpid()):
        return "ended before its last step", ""
    lives = owner.lives(us) if owner.machine == us.machine else None
    if lives is None:
        return f"belongs to a program on {owner.host}", ""
    return ("running", "good") if lives else ("killed", "bad")


def _result(run: RecordedRun) -> Fact | None:
    """The verdict in a number: of the first data source, or of the validation loss."""
    for source, validations in run.accuracies.items():
        first = validations[0]
        last = validations[-1]
        if len(validations) == 1:
            return Fact("Validated once", f"{last.mean:.1%}", [source], wide=True)
        change = gain(first, last)
        sure = "more than chance" if change.significant else "may be chance"
        notes = [f"{first.mean:.1%} to {last.mean:.1%}, {source}; {sure}"]
        kind = _kind(change.points, told=change.significant and run.complete)
        name = "Validation" if run.complete else "Validation so far"
        return Fact(name, f"{100 * change.points:+.1f} points", notes, kind, wide=True)
    for key, (title, note, _) in HELD_OUT.items():
        shares = [value for _, value in run.numbers(key)]
        if not shares:
            continue
        kind = _kind(shares[-1] - shares[0], told=len(shares) > 1 and run.complete)
        notes = [f"from {shares[0]:.1%}: {note}"]
        return Fact(title, f"{shares[-1]:.1%}", notes, kind, wide=True)
    losses = [value for key in LOSSES for _, value in run.numbers(key)]
    if not losses:
        return None
    unit = next(unit for key, unit in LOSSES.items() if run.values(key))
    kind = _kind(losses[0] - losses[-1], told=len(losses) > 1 and run.complete)
    notes = [f"from {number(losses[0])} {unit}"]
    return Fact("Validation loss", number(losses[-1]), notes, kind, wide=True)


def _model(run: RecordedRun, config: Mapping[str, Any]) -> Fact | None:
    path = str(setting(config, "model.path") or "")
    count = run.plan.get("num_parameters")
    size = f"{count / 1e9:.1f}B" if isinstance(count, int) and count >= 1e8 else f"{(count or 0) / 1e6:.2f}M"
    notes = [f"{size} parameters"] if count else []
    if title := setting(config, "recipe.title"):
        notes.append(f"recipe: {title}")
    is_export = _end_of(path).startswith("hf/")  # of another run, whose folder is before
    return Fact("Model", _end_of(path, 3 if is_export else 2), notes)


def _offline(config: Mapping[str, Any], notes: list[str]) -> str:
    """What a run without an estimator trains by; adds its settings to ``notes``."""
    preference = setting(config, "actor.preference.loss")
    reward = setting(config, "actor.reward.loss")
    if reward is not None:
        return f"Reward model by {reward}"
    if preference is None:
        return "Supervised fine-tuning"
    if (beta := setting(config, "actor.preference.beta")) is not None:
        notes.append(f"beta {beta}")
    return f"Preferences by {preference}"


def _algorithm(config: Mapping[str, Any]) -> Fact | None:
    estimator = setting(config, "algorithm.adv_estimator")
    loss = setting(config, "actor.loss_mode")
    rate = setting(config, "actor.optim.lr")
    notes = [f"learning rate {rate:.3g}"] if isinstance(rate, int | float) else []
    if estimator is None:
        return Fact("Algorithm", _offline(config, notes), notes) if config else None
    notes.insert(0, f"advantages {estimator}, loss {loss}")
    if setting(config, "algorithm.use_kl_in_reward"):
        notes.append(f"KL in the reward, {setting(config, 'algorithm.kl_ctrl.kl_coef')}")
    if setting(config, "actor.use_kl_loss"):
        notes.append(f"KL in the loss, {setting(config, 'actor.kl_loss_coef')}")
    if coef := setting(config, "algorithm.distill.coef"):
        paths = [setting(config, "teacher.path"), *(setting(config, "teacher.by_source") or {}).values()]
        notes.append(f"teacher {', '.join(dict.fromkeys(_end_of(each) for each in paths if each))}, {coef}")
    return Fact("Algorithm", title_of(config) or str(estimator), notes)


def title_of(config: Mapping[str, Any]) -> str:
    """The algorithm whose estimator and loss ``config`` has, and most of whose other keys; "" if there is none."""
    parts = ("algorithm.adv_estimator", "actor.loss_mode")
    best = (1.0, 0)
    title = ""
    for each in algorithms().values():
        wanted = {key: _plain(setting.value) for key, setting in each.all_settings().items()}
        if any(setting(config, key) != wanted[key] for key in parts):
            continue
        fixed = {key: value for key, value in wanted.items() if not (isinstance(value, str) and "${" in value)}
        missed = sum(setting(config, key) != value for key, value in fixed.items())
        if (rank := (missed / len(fixed), -len(fixed))) < best:
            best = rank
            title = each.title
    return title


def _data(config: Mapping[str, Any]) -> Fact | None:
    train, val = (_names(setting(config, f"data.{part}_files")) for part in ("train", "val"))
    size = setting(config, "data.train_batch_size")
    draws = setting(config, "rollout.n")
    notes = [f"validated on {val}" if val else ""]
    if size is not None:
        notes.append(f"{size} prompts a step, {draws} responses each" if draws else f"{size} conversations a step")
    return Fact("Data", train, notes)


def _hardware(run: RecordedRun, config: Mapping[str, Any]) -> Fact | None:
    machine = run.environment.get("hardware")
    if not isinstance(machine, dict):
        return None
    devices = num_devices(run)
    nodes = run.plan.get("num_nodes") or setting(config, "trainer.nnodes") or 1
    where = f"{nodes} node" + ("s" if nodes != 1 else "")
    layout = _short(str(run.plan.get("layout") or ""))
    if on_accelerator(run):
        return Fact("Hardware", f"{devices} x {machine.get('device_name') or 'accelerators'}", [where, layout])
    cores = f"{machine.get('cpus', '?')} cores, {machine.get('memory_gib', '?')} GiB"
    return Fact("Hardware", str(machine.get("processor") or "CPU"), [f"{cores}, {where}", layout])


def _short(layout: str) -> str:
    """``layout`` without what is 1."""
    parts = (part.split(" ", 1) if " " in part else ["", part] for part in layout.split("; "))
    kept = ((name, ",".join(size for size in sizes.split(",") if not size.endswith("=1"))) for name, sizes in parts)
    return "; ".join(f"{name} {sizes}".strip() for name, sizes in kept if sizes)


def _time(run: RecordedRun) -> list[Fact]:
    times = [value or 0.0 for _, value in run.values("time/step")]
    trained = [value or 0.0 for step, value in run.values("time/step") if step > 0]  # 0 is a validation
    reached = run.last_step or 0
    total = run.total_steps
    if not times:
        return []
    notes = [f"{total} steps, {spent(sum(trained) / len(trained))} each"] if run.complete and total and trained else []
    if not run.complete and trained:
        a_step = sum(trained[-RECENT:]) / len(trained[-RECENT:])
        notes += [f"about {duration((total - reached) * a_step)} left"] if total is not None else []
        notes.append(f"{spent(a_step)} a step of late")
    notes.append(_started(run))
    hours = sum(times) / 3600
    time = Fact("Time in steps", spent(sum(times)), notes)
    if not on_accelerator(run):
        return [time, Fact("Cost", "no GPU hours", [f"{hours:.2g} h of this machine's CPU"])]
    devices = num_devices(run)
    return [time, Fact("Cost", f"{_hours(hours * devices)} GPU hours", [f"{devices} devices, while in steps"])]


def _started(run: RecordedRun) -> str:
    """When the run last started, to the minute."""
    try:
        started = datetime.fromisoformat(str(run.environment.get("started")))
    except ValueError:
        return ""
    return f"started {started:%Y-%m-%d %H:%M} {started.tzname() or ''}".rstrip()


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def on_accelerator(run: RecordedRun) -> bool:
    """Whether the run's devices are accelerators; if it did not record that, whether torch was no CPU build."""
    machine, versions = (run.environment.get(key) or {} for key in ("hardware", "versions"))
    if isinstance(machine, dict) and machine.get("device"):
        return bool(machine["device"] != "cpu")
    return not str(versions.get("torch", "+cpu") if isinstance(versions, dict) else "+cpu").endswith("+cpu")


def num_devices(run: RecordedRun) -> int:
    """Devices of the whole run, those of a separate rollout included."""
    planned = run.plan.get("num_gpus")
    if isinstance(planned, int):
        return planned
    sizes = (setting(run.settings, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    return prod(int(size or 1) for size in sizes)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _names(files: object) -> str:
    """The files' last folder and name each."""
    listed = files if isinstance(files, list) else [files] if files else []
    return ", ".join(map(_end_of, listed))


def _end_of(path: object, parts: int = 2) -> str:
    """The last names of a path."""
    return "/".join(str(path).rstrip("/").split("/")[-parts:])
