"""The curves of a report, of one run or of several over one another.

All charts have the same steps on their horizontal axes, so that a page can be read down a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from mcore_rl.config.role_table import ROLES
from mcore_rl.tracking.charts import MAX_BINS, MIN_SMOOTHED, Series, line_chart, window
from mcore_rl.tracking.metrics import Metric, is_metric, metric_of
from mcore_rl.tracking.page import LIGHT, details, text
from mcore_rl.tracking.run_files import RecordedRun

AHEAD = ("Staleness", "Groups drawn ahead")  # charts that say nothing of a run that draws and trains in turns
ACCURACY = "Accuracy on training prompts"
PARTS = "reward/part/"
HoursOfSteps = Mapping[float, float]  # step -> hours
IN_STEPS = "Hours that steps took: without start-up, and without what a run did twice because it had to begin again."
OVER_HOURS = ", over hours"
# Titles of the charts that are shown over hours, too.
CLOCKED = ("Loss, per trained token", "Loss of preferences", "Loss of scores", "Reward", ACCURACY)
# Title and keys of the charts that are always open; the other metrics have charts in a fold below.  A key that ends in
# a slash is every metric that begins so.
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss, per trained token", ("sft/loss", "sft/val_loss")),
    ("Loss of preferences", ("prefer/loss", "prefer/val_loss")),
    ("Pairs whose preferred answer has the higher reward", ("prefer/accuracy", "prefer/val_accuracy")),
    ("Rewards of preferences", ("prefer/chosen_reward", "prefer/rejected_reward", "prefer/margin")),
    ("Log-prob of an answer", ("prefer/chosen_logprob", "prefer/rejected_logprob")),
    ("Loss of scores", ("reward/loss", "reward/val_loss")),
    ("Pairs or outcomes that scores tell", ("reward/train_accuracy", "reward/val_accuracy")),
    ("Expected calibration error", ("reward/val_ece",)),
    ("Correlation of scores and labels", ("reward/val_correlation",)),
    ("Scores", ("reward/chosen_score", "reward/rejected_score", "reward/margin", "reward/score")),
    ("Reward", ("reward/mean",)),
    ("Parts of the reward", (PARTS,)),
    (ACCURACY, ("reward/accuracy",)),
    ("Response length", ("response/length_mean", "response/length_max")),
    ("Responses cut off", ("response/clip_share",)),
    ("Turns of an agent", ("agent/turns_mean", "agent/turns_max")),
    ("Calls of tools", ("agent/calls_mean",)),
    ("Calls that failed, and tokens that are trained", ("agent/failed_call_share", "agent/trained_share")),
    ("Seconds in tools, and idle engines", ("agent/tool_s_mean", "agent/engines_idle_s")),
    ("Why agents' episodes end", ("agent/end/",)),
    ("KL to the reference, per token", ("kl/loss",)),
    ("KL to the reference, per response", ("kl/reward",)),
    ("Divergence from the teacher, per token", ("distill/reverse_kl", "distill/forward_kl", "distill/jensen_shannon")),
    (
        "Divergence from each teacher, per token",
        ("distill/reverse_kl/", "distill/forward_kl/", "distill/jensen_shannon/"),
    ),
    ("KL of the update, per token", ("actor/kl_k3",)),
    ("Entropy", ("actor/entropy",)),
    ("Log-prob difference, trainer and sampler", ("rollout/logprob_diff_mean",)),
    ("Replayed choices of experts that differ", ("router/difference",)),
    ("Idle time", ("perf/engines_idle_share", "perf/trainer_idle_share")),
    ("Staleness", ("rollout/staleness_mean", "rollout/staleness_max")),
    ("Groups drawn ahead", ("rollout/buffer", "rollout/under_way")),
    ("Gradient norm", tuple(f"{role.name}/grad_norm" for role in ROLES.values() if role.trains)),
    ("Learning rate", tuple(f"{role.name}/lr" for role in ROLES.values() if role.trains)),
    ("Clipped tokens", ("actor/clip_fraction_low", "actor/clip_fraction_high", "actor/clip_fraction_dual")),
    ("Process reward model", ("process_reward/accuracy", "process_reward/pair_accuracy")),
    ("Explained variance of the critic", ("value/explained_variance",)),
    ("Throughput", ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s")),
    ("Model FLOPs utilisation", ("perf/mfu", "perf/mfu_logprobs")),
    ("The controller's machine", ("perf/host_cpu_share", "perf/host_memory_share")),
    ("Memory, of a host and of a device", ("perf/memory_host_gib", "perf/memory_device_gib")),
    ("TFLOP/s of a device", ("perf/tflops_per_device", "perf/tflops_per_device_logprobs")),
)


def curves(runs: Sequence[RecordedRun]) -> str:
    """The section's HTML: the charts of ``CHARTS``, and those of all other metrics in a fold."""
    known = list(dict.fromkeys(key for run in runs for key in run.metric_keys()))
    charts = [(title, [key for each in keys for key in _members(each, known)]) for title, keys in CHARTS]
    charts = [(title, keys) for title, keys in charts if title not in AHEAD or any(_is_any(key, runs) for key in keys)]
    shown = [_validation_chart(runs), *(_chart(title, keys, runs) for title, keys in charts if keys)]
    open_keys = {key for _, keys in charts for key in keys}
    rest = [key for key in known if key not in open_keys and not key.startswith("time/") and not _validates(key)]
    others = "".join(_chart(key, (key,), runs) for key in rest)
    section = f'<h2>Curves</h2><p class="soft">{text(_legend(runs))}</p><div class="charts">{"".join(shown)}</div>'
    if not "".join(shown):
        section = '<h2>Curves</h2><p class="soft">No step was recorded.</p>'
    clocked = _by_the_clock(runs)
    section += (
        details("By the clock", f'<p class="soft">{IN_STEPS}</p><div class="charts">{clocked}</div>') if clocked else ""
    )
    return section + (details("Every other metric", f'<div class="charts">{others}</div>') if others else "")


def _by_the_clock(runs: Sequence[RecordedRun]) -> str:
    """The charts of what is learned, over the hours that it took."""
    clocks = [_hours_of(run) for run in runs]
    known = {key for run in runs for key in run.metric_keys()}
    charts = [(title, [key for key in keys if key in known]) for title, keys in CHARTS if title in CLOCKED]
    return _validation_chart(runs, clocks) + "".join(
        _chart(title, keys, runs, clocks) for title, keys in charts if keys
    )


def _hours_of(run: RecordedRun) -> dict[float, float]:
    """Step -> hours in steps until its end."""
    steps = run.values("time/step")
    hours = accumulate((seconds or 0.0) / 3600 for _, seconds in steps)
    return {0.0: 0.0} | {float(step): hour for (step, _), hour in zip(steps, hours, strict=True)}


def _timed(series: Series, clock: HoursOfSteps) -> Series:
    """``series`` by hours in the place of steps."""
    points = [(clock[step], value) for step, value in series.points if step in clock]
    intervals = {clock[step]: interval for step, interval in series.intervals.items() if step in clock}
    return replace(series, points=points, intervals=intervals)


def _is_any(key: str, runs: Sequence[RecordedRun]) -> bool:
    """Whether ``key`` was ever other than 0."""
    return any(value for run in runs for _, value in run.values(key))


def _colour(run: int, line: int, num_runs: int) -> int | None:
    """Of a run the same in every chart, and of its further lines in a chart the tints of that hue."""
    return None if num_runs == 1 else run % len(LIGHT) + line * len(LIGHT)


def _members(key: str, known: Sequence[str]) -> list[str]:
    """The metrics that a key of ``CHARTS`` stands for."""
    return [each for each in known if each.startswith(key)] if key.endswith("/") else [key]


def _validation_chart(runs: Sequence[RecordedRun], clocks: Sequence[HoursOfSteps] = ()) -> str:
    """The chart of accuracies: from samples with intervals; from metrics for a data source without samples.

    clocks: of each run, for a chart by hours.
    """
    series = []
    for at, (name, run) in enumerate(zip(names_of(runs), runs, strict=True)):
        prefix = f"{name}: " if len(runs) > 1 else ""
        of_run = list[Series]()
        for source, validations in run.accuracies.items():
            points = [(float(each.step), each.mean) for each in validations]
            intervals = {float(each.step): each.interval for each in validations}
            of_run.append(Series(prefix + source, points, intervals))
        for key in run.metric_keys():
            source = key.removeprefix("val/").removesuffix("/accuracy")
            if _validates(key) and source not in run.accuracies:
                of_run.append(Series(prefix + source, run.values(key)))
        of_run = [replace(each, colour=_colour(at, line, len(runs))) for line, each in enumerate(of_run)]
        series += [_timed(each, clocks[at]) for each in of_run] if clocks else of_run
    title = f"Validation accuracy{OVER_HOURS if clocks else ''}"
    return line_chart(title, "share", series, whole=True, steps=_ends(runs, clocks), hours=bool(clocks))


def _chart(title: str, keys: Sequence[str], runs: Sequence[RecordedRun], clocks: Sequence[HoursOfSteps] = ()) -> str:
    series = []
    row = _row(keys[0])
    smooth = row is None or row.reduction != "last"  # what is set, as a rate is, has no noise
    for at, (name, run) in enumerate(zip(names_of(runs), runs, strict=True)):
        for line, key in enumerate(keys):
            if values := run.values(key):
                parts = [name] if len(runs) > 1 else []
                parts += [_label(key)] if len(keys) > 1 or not parts else []
                colour = _colour(at, line, len(runs))
                one = Series(": ".join(parts), values, smooth=smooth, colour=colour)
                series.append(_timed(one, clocks[at]) if clocks else one)
    note = row.help if row is not None and len(keys) == 1 else ""
    unit = "1" if row is None else row.unit
    whole = title == ACCURACY
    title += OVER_HOURS if clocks else ""
    return line_chart(title, unit, series, whole=whole, steps=_ends(runs, clocks), hours=bool(clocks), note=note)


def _legend(runs: Sequence[RecordedRun]) -> str:
    """What thin and thick lines are."""
    count = max((len(run.steps) for run in runs), default=0)
    if count < MIN_SMOOTHED:
        return ""
    behind = "Thin: every step." if count <= MAX_BINS else "Bands: from the lowest value to the highest."
    return f"{behind} Thick: the mean of the {window(count)} steps around each, near ones counting more."


def _ends(runs: Sequence[RecordedRun], clocks: Sequence[HoursOfSteps]) -> tuple[float, float]:
    """The first and the last step that any run has, or from 0 to the hours of the longest run."""
    if clocks:
        return 0.0, max((hour for clock in clocks for hour in clock.values()), default=0.0)
    steps = [row["step"] for run in runs for row in run.steps]
    return (min(steps), max(steps)) if steps else (0, 0)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Names of ``runs``; whole paths if two directories have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _row(key: str) -> Metric | None:
    """The row of ``key``; None for a metric of another version."""
    return metric_of(key) if is_metric(key) else None


def _validates(key: str) -> bool:
    row = _row(key)
    return row is not None and row.key == "val/{data_source}/accuracy"


def _label(key: str) -> str:
    """The short name of ``key``; of a part of the reward its name, of a member of another family the key itself."""
    if key.startswith(PARTS):
        return key.removeprefix(PARTS)
    row = _row(key)
    return key if row is None or row.key != key else row.short
