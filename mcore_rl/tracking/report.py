"""report.html: what was learned, how it went, and what the model writes now, from the run directory alone.

It reads files and computes nothing but the verdict.  A run that was killed gets the same page without a verdict, and
the page names what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.role_table import ROLES
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.before_after import before_after
from mcore_rl.tracking.charts import BarSeries, Series, line_chart, stacked_bars
from mcore_rl.tracking.console import duration, number
from mcore_rl.tracking.metrics import METRICS, PHASES, Metric, metric_of
from mcore_rl.tracking.page import NEUTRAL, details, page, table, text
from mcore_rl.tracking.run_files import RecordedRun, read_run
from mcore_rl.tracking.verdict import Accuracy, Gain, best, gain

ACCURACY = "Accuracy on training prompts"
VAL_LOSS = "sft/val_loss"
PARTS = "reward/part/"
# Title and keys of the charts that are always open; the other metrics have charts in a fold below.  A key that ends in
# a slash is every metric that begins so.
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss, per trained token", ("sft/loss", "sft/val_loss")),
    ("Reward", ("reward/mean",)),
    ("Parts of the reward", (PARTS,)),
    (ACCURACY, ("reward/accuracy",)),
    ("Response length", ("response/length_mean", "response/length_max")),
    ("Responses cut off", ("response/clip_share",)),
    ("KL to the reference, per token", ("kl/loss",)),
    ("KL to the reference, per response", ("kl/reward",)),
    ("KL of the update, per token", ("actor/kl_k3",)),
    ("Entropy", ("actor/entropy",)),
    ("Log-prob difference, trainer and sampler", ("rollout/logprob_diff_mean",)),
    ("Gradient norm", tuple(f"{role.name}/grad_norm" for role in ROLES.values() if role.trains)),
    ("Learning rate", tuple(f"{role.name}/lr" for role in ROLES.values() if role.trains)),
    ("Clipped tokens", ("actor/clip_fraction_low", "actor/clip_fraction_high", "actor/clip_fraction_dual")),
    ("Explained variance of the critic", ("value/explained_variance",)),
    ("Throughput", ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s")),
    ("Model FLOPs utilisation", ("perf/mfu", "perf/mfu_logprobs")),
    ("TFLOP/s of a device", ("perf/tflops_per_device", "perf/tflops_per_device_logprobs")),
)


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` into the run directory, and return its path.  ConfigError: there is no run in it."""
    run = read_run(run_dir)
    path = run.path / "report.html"
    sections = [
        _heading(run),
        _learned([run]),
        _curves([run]),
        _seconds(run),
        before_after(run),
        _notes_and_warnings(run),
    ]
    with replaced(path) as new:
        new.write_text(page(f"{run.name}: what was learned", sections), encoding="utf-8")
    return path


def write_comparison(run_dirs: Sequence[Path | str], path: Path) -> Path:
    """Write one page with the curves of several runs over one another.  ConfigError: one of them is no run."""
    runs = [read_run(each) for each in run_dirs]
    names = ", ".join(_names(runs))
    sections = [f"<h1>{text(names)}</h1>", *(_progress(run) for run in runs), _learned(runs), _curves(runs)]
    sections += [details(f"Configuration of {run.name}", f"<pre>{text(run.config)}</pre>") for run in runs]
    with replaced(path) as new:
        new.write_text(page(f"Runs: {names}", sections), encoding="utf-8")
    return path


def _heading(run: RecordedRun) -> str:
    sections = [f"<h1>{text(run.name)}</h1>", _progress(run)]
    if not run.complete:
        sections.append(
            '<div class="verdict"><p><b>No verdict:</b> this run has not been recorded to its end.</p></div>'
        )
    elif not run.accuracies and (losses := _numbers(run, VAL_LOSS)):
        sections.append(_loss_verdict(losses))
    elif not run.accuracies:
        sections.append('<div class="verdict"><p><b>No verdict:</b> there are no validation samples.</p></div>')
    else:
        sections += [_verdict(source, validations) for source, validations in run.accuracies.items()]
    return "".join(sections)


def _loss_verdict(losses: Sequence[tuple[int, float]]) -> str:
    """What fine-tuning did to the validation loss.  losses: (step, nats) of each validation, one or more."""
    (first, before), (last, after) = losses[0], losses[-1]
    sentence = f"{number(before)} nats per trained token at step {first}"
    if last > first:
        lowest = min(losses, key=lambda each: each[1])
        sentence = f"went from {sentence} to {number(after)} at step {last}; the lowest was {number(lowest[1])} "
        sentence += f"at step {lowest[0]}"
    kind = "" if last == first else "good" if after < before else "bad"
    return f'<div class="verdict {kind}"><p><b>Validation loss:</b> {text(sentence)}.</p></div>'


def _numbers(run: RecordedRun, key: str) -> list[tuple[int, float]]:
    """The finite numbers of ``key``, with their steps."""
    return [(step, value) for step, value in run.values(key) if value is not None]


def _progress(run: RecordedRun) -> str:
    total = "an unknown number of" if run.total_steps is None else str(run.total_steps)
    reached = "no step" if run.last_step is None else f"step {run.last_step}"
    facts = [f"{run.name}: {reached} of {total} steps recorded"]
    if seconds := sum(value or 0 for _, value in run.values("time/step")):
        facts.append(f"{duration(seconds)} in steps")
    if started := run.environment.get("started"):
        facts.append(f"last started {started}")
    troubles = [
        f"{amount:g} {row.unit} {row.help}"
        for row in METRICS
        if row.better == "down" and row.reduction == "sum" and not row.key.startswith("time/")
        if (amount := sum(value or 0 for _, value in run.values(row.key)))
    ]
    notes = "".join(f"<p>Worth a look: {text(each)}.</p>" for each in troubles)
    return f'<p class="soft">{text("; ".join(facts))}.</p>{notes}'


def _verdict(source: str, validations: Sequence[Accuracy]) -> str:
    first, last = validations[0], validations[-1]
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
    return f'<div class="verdict {kind}"><p><b>{text(source)}:</b> {text(sentence)}.</p></div>'


def _learned(runs: Sequence[RecordedRun]) -> str:
    """The table of first, best and last validation of each run and data source."""
    rows = []
    for name, run in zip(_names(runs), runs, strict=True):
        for source, validations in run.accuracies.items():
            first, top, last = validations[0], best(validations), validations[-1]
            cells = [f"{_accuracy(each)} (step {each.step})" for each in (first, top, last)]
            rows.append([name, source, last.num_prompts, *cells, _change(gain(first, last), run.complete)])
    if not rows and any(run.values("sft/loss") for run in runs):
        return ""  # fine-tuning is judged by its loss
    if not rows:
        return "<h2>Validation accuracy</h2><p class='soft'>No validation samples were found in validation/.</p>"
    head = ["run", "data source", "prompts", "first", "best", "last", "last against first"]
    skip = 1 if len(runs) == 1 else 0
    note = (
        "95 % Wilson intervals over prompts. The best was picked among all, so it flatters; last is what was learned."
    )
    body = table(head[skip:], [row[skip:] for row in rows])
    return f'<h2>Validation accuracy</h2>{body}<p class="soft">{text(note)}</p>'


def _curves(runs: Sequence[RecordedRun]) -> str:
    known = list(dict.fromkeys(key for run in runs for key in run.metric_keys()))
    charts = [(title, [key for each in keys for key in _members(each, known)]) for title, keys in CHARTS]
    shown = [_validation_chart(runs), *(_chart(title, keys, runs) for title, keys in charts if keys)]
    open_keys = {key for _, keys in charts for key in keys}
    rest = [key for key in known if key not in open_keys and not key.startswith("time/") and not _validates(key)]
    others = "".join(_chart(key, (key,), runs) for key in rest)
    section = f'<h2>Curves</h2><div class="charts">{"".join(shown)}</div>'
    if not "".join(shown):
        section = '<h2>Curves</h2><p class="soft">No step was recorded.</p>'
    return section + (details("Every other metric", f'<div class="charts">{others}</div>') if others else "")


def _members(key: str, known: Sequence[str]) -> list[str]:
    """The metrics that a key of ``CHARTS`` stands for."""
    return [each for each in known if each.startswith(key)] if key.endswith("/") else [key]


def _validation_chart(runs: Sequence[RecordedRun]) -> str:
    """The chart of accuracies: from samples with intervals; from metrics for a data source without samples."""
    series = []
    for name, run in zip(_names(runs), runs, strict=True):
        prefix = f"{name}: " if len(runs) > 1 else ""
        for source, validations in run.accuracies.items():
            points = [(float(each.step), each.mean) for each in validations]
            intervals = {float(each.step): each.interval for each in validations}
            series.append(Series(prefix + source, points, intervals))
        for key in run.metric_keys():
            source = key.removeprefix("val/").removesuffix("/accuracy")
            if _validates(key) and source not in run.accuracies:
                series.append(Series(prefix + source, run.values(key)))
    return line_chart("Validation accuracy", "share", series, whole=True)


def _chart(title: str, keys: Sequence[str], runs: Sequence[RecordedRun]) -> str:
    series = []
    for name, run in zip(_names(runs), runs, strict=True):
        for key in keys:
            if values := run.values(key):
                parts = [name] if len(runs) > 1 else []
                parts += [_label(key)] if len(keys) > 1 or not parts else []
                series.append(Series(": ".join(parts), values))
    row = _row(keys[0])
    return line_chart(title, "1" if row is None else row.unit, series, whole=title == ACCURACY)


def _seconds(run: RecordedRun) -> str:
    steps = [step for step, _ in run.values("time/step")]
    if not steps:
        return "<h2>Time</h2><p class='soft'>No times were recorded.</p>"
    seconds = {phase: dict(run.values(f"time/{phase}")) for phase in run.phases()}
    parts = [
        BarSeries(phase, list(PHASES).index(phase), [times.get(step) or 0.0 for step in steps])
        for phase, times in seconds.items()
    ]
    whole = dict(run.values("time/step"))
    named = [sum(part.values[k] for part in parts) for k in range(len(steps))]
    other = [max(0.0, (whole[step] or 0.0) - spent) for step, spent in zip(steps, named, strict=True)]
    parts.append(BarSeries("controller", NEUTRAL, other))
    total = sum(map(sum, (part.values for part in parts))) or 1.0
    rows = [
        [
            part.label,
            duration(sum(part.values)),
            f"{sum(part.values) / len(steps):.2f} s",
            f"{100 * sum(part.values) / total:.1f}%",
        ]
        for part in parts
    ]
    chart = stacked_bars("Seconds of each step", "s", steps, parts)
    shares = table(["phase", "in all", "a step", "share"], rows)
    return f'<h2>Time</h2><div class="charts">{chart}<figure>{shares}</figure></div>'


def _notes_and_warnings(run: RecordedRun) -> str:
    config = f"<pre>{text(run.config)}</pre>" if run.config else '<p class="soft">config.yaml is missing.</p>'
    rows = [[key, value] for key, value in _flat("", run.environment)]
    place = table([], rows) if rows else '<p class="soft">environment.json is missing.</p>'
    return "<h2>Notes and warnings</h2>" + details("Configuration", config) + details("Environment", place)


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """(dotted name, text) of every leaf of ``value``."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _flat(f"{prefix}.{key}" if prefix else str(key), item)]
    return [(prefix, " ".join(map(str, value)) if isinstance(value, list) else str(value))]


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """Names of the runs; whole paths if two directories have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _row(key: str) -> Metric | None:
    """The row of ``key``; None for a metric of another version."""
    try:
        return metric_of(key)
    except AssertionError:
        return None


def _validates(key: str) -> bool:
    row = _row(key)
    return row is not None and row.key == "val/{data_source}/accuracy"


def _label(key: str) -> str:
    """The short name of ``key``; of a part of the reward its name, of a member of another family the key itself."""
    if key.startswith(PARTS):
        return key.removeprefix(PARTS)
    row = _row(key)
    return key if row is None or row.key != key else row.short


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
