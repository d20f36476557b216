"""report.html: what was learned, how it went, and what the model writes now, from the run directory alone.

It reads files and computes nothing but the verdict.  A run that was killed gets the same page without a verdict, and
the page names what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.config.names import leaf_values
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.before_after import OFFLINE_LOSSES, before_after
from mcore_rl.tracking.console import number
from mcore_rl.tracking.curves import curves, names_of
from mcore_rl.tracking.head_card import LOSSES, facts, head_card, state_of
from mcore_rl.tracking.metrics import METRICS
from mcore_rl.tracking.page import LIGHT, details, page, table, text
from mcore_rl.tracking.run_files import RecordedRun, read_run
from mcore_rl.tracking.sample_browser import sample_browser
from mcore_rl.tracking.time_section import time_section
from mcore_rl.tracking.verdict import Accuracy, Gain, best, gain

# The shares by which runs without samples are judged: what is held out, and the sentence about a share of it.
HELD_OUT = {
    "prefer/val_accuracy": ("Held-out pairs", "the preferred answer of {} of the pairs has the higher reward"),
    "reward/val_accuracy": ("Held-out pairs or outcomes", "scores agree with the labels of {} of them"),
}

# The tiles of the head that the table of several runs has, after the result.
TILES = ("Model", "Algorithm", "Data", "Hardware", "Time in steps", "Cost")
ABSENT = "-"


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` into the run directory, and return its path.  ConfigError: there is no run in it."""
    run = read_run(run_dir)
    path = run.path / "report.html"
    with replaced(path) as new:
        new.write_text(report_page(run), encoding="utf-8")
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
    with replaced(path) as new:
        new.write_text(page(f"Runs: {names}", [body]), encoding="utf-8")
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
        sections[:0] = [_progress(run)]
        sections.append(
            '<div class="verdict"><p><b>No verdict:</b> this run has not been recorded to its end.</p></div>'
        )
    elif not run.accuracies and any(run.values(key) for key in LOSSES):
        judged = [(run.numbers(key), unit) for key, unit in LOSSES.items()]
        sections += [_loss_verdict(losses, unit) for losses, unit in judged if losses]
        sections += [_share_verdict(*said, shares) for key, said in HELD_OUT.items() if (shares := run.numbers(key))]
        sections += [_calibration(errors)] if (errors := run.numbers("reward/val_ece")) else []
    elif not run.accuracies:
        sections.append('<div class="verdict"><p><b>No verdict:</b> there are no validation samples.</p></div>')
    elif _is_said_in_one(run):
        sections += [_verdict(source, validations) for source, validations in run.accuracies.items()]
    return "".join(sections)


def _share_verdict(title: str, said: str, shares: Sequence[tuple[int, float]]) -> str:
    """What ``said`` says of the first and the last of ``shares``: (step, share) of each validation, one or more."""
    (first, before), (last, after) = shares[0], shares[-1]
    sentence = f"{said.format(f'{before:.1%}')} at step {first}"
    if last > first:
        sentence += f", and of {after:.1%} at step {last}"
    kind = "" if last == first else "good" if after > before else "bad"
    return f'<div class="verdict {kind}"><p><b>{title}:</b> {text(sentence)}.</p></div>'


def _calibration(errors: Sequence[tuple[int, float]]) -> str:
    """How far the probabilities that scores stand for are from what is so.  errors: (step, ECE), one or more."""
    step, error = errors[-1]
    sentence = f"the probabilities that scores stand for are {error:.1%} from what is so at step {step}, in the mean"
    return f'<div class="verdict"><p><b>Calibration:</b> {text(sentence)}.</p></div>'


def _loss_verdict(losses: Sequence[tuple[int, float]], unit: str) -> str:
    """What training did to the validation loss.  losses: (step, loss) of each validation, one or more."""
    (first, before), (last, after) = losses[0], losses[-1]
    sentence = f"{number(before)} {unit} at step {first}"
    if last > first:
        lowest = min(losses, key=lambda each: each[1])
        sentence = f"went from {sentence} to {number(after)} at step {last}; the lowest was {number(lowest[1])} "
        sentence += f"at step {lowest[0]}"
    kind = "" if last == first else "good" if after < before else "bad"
    return f'<div class="verdict {kind}"><p><b>Validation loss:</b> {text(sentence)}.</p></div>'


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
        sentence = f"validated once, at step {last.step}: {_accuracy(last)}, {last.num_prompts} prompts"
        return f'<div class="verdict"><p><b>{text(source)}:</b> {text(sentence)}.</p></div>'
    change = gain(first, last)
    word = "gain" if change.points >= 0 else "loss"
    points = f"{abs(100 * change.points):.1f} points"
    judgement = (
        f"a significant {word} of {points}" if change.significant else f"no significant change ({word} of {points})"
    )
    kind = ("good" if change.points > 0 else "bad") if change.significant else ""
    p = "" if change.p is None else f", {_p(change.p)}"
    sentence = (
        f"validation accuracy went from {_accuracy(first)} at step {first.step} to {_accuracy(last)} at step "
        f"{last.step} on {last.num_prompts} prompts: {judgement} ({change.basis}{p})"
    )
    if (top := best(validations)).step != last.step:
        sentence += f". The best was {_accuracy(top)} at step {top.step}; the highest of several is partly luck"
    return f'<div class="verdict {kind}"><p><b>{text(source)}:</b> {text(sentence)}.</p></div>'


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
