"""The terminal: a live line of what is happening now, and a table row per step; plain lines if it is no terminal.

Without a live line, lines say what happens until the first step is trained, since that may take minutes.

Only terminals get control characters, so that a log file of a batch system can be read and searched.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mcore_rl.tracking.lanes import Lane
from mcore_rl.tracking.loggers import Sink
from mcore_rl.tracking.metrics import metric_of

# Header, width, and metric keys: the column shows the first key that is present.
Columns = tuple[tuple[str, int, tuple[str, ...]], ...]
COLUMNS: Columns = (
    ("reward", 8, ("reward/mean",)),
    ("acc", 6, ("reward/accuracy",)),
    ("val", 6, ("val/{data_source}/accuracy",)),
    ("length", 7, ("response/length_mean",)),
    ("entropy", 7, ("actor/entropy",)),
    ("KL", 8, ("kl/loss", "kl/reward", "actor/kl_k3")),  # to the reference if there is one, else of the update
    ("grad", 8, ("actor/grad_norm",)),
    ("logp diff", 9, ("rollout/logprob_diff_mean",)),
    ("tok/s", 7, ("perf/generated_tokens_per_s",)),
    ("MFU", 5, ("perf/mfu",)),
    ("seconds", 7, ("time/step",)),
)
# Of runs whose engines have devices of their own, beside those above.
APART_COLUMNS: Columns = (
    ("stale", 5, ("rollout/staleness_max",)),
    ("buffer", 6, ("rollout/buffer",)),
    ("eng idle", 8, ("perf/engines_idle_share",)),
    ("trn idle", 8, ("perf/trainer_idle_share",)),
)
APART = "perf/engines_idle_share"
UPDATE_COLUMNS: Columns = (
    ("grad", 8, ("actor/grad_norm",)),
    ("lr", 8, ("actor/lr",)),
    ("tok/s", 7, ("perf/trained_tokens_per_s",)),
    ("MFU", 5, ("perf/mfu",)),
    ("seconds", 7, ("time/step",)),
)
SUPERVISED_COLUMNS: Columns = (
    ("loss", 8, ("sft/loss",)),
    ("val loss", 8, ("sft/val_loss",)),
    *UPDATE_COLUMNS,
)
PREFERENCE_COLUMNS: Columns = (
    ("loss", 8, ("prefer/loss",)),
    ("acc", 6, ("prefer/accuracy",)),
    ("margin", 8, ("prefer/margin",)),
    ("val loss", 8, ("prefer/val_loss",)),
    ("val", 6, ("prefer/val_accuracy",)),
    *UPDATE_COLUMNS,
)
SCORE_COLUMNS: Columns = (
    ("loss", 8, ("reward/loss",)),
    ("acc", 6, ("reward/train_accuracy",)),
    ("margin", 8, ("reward/margin",)),
    ("val loss", 8, ("reward/val_loss",)),
    ("val", 6, ("reward/val_accuracy",)),
    ("val ECE", 7, ("reward/val_ece",)),
    *UPDATE_COLUMNS,
)
# Of runs without rollouts, by what some of their metrics begin with.
OFFLINE_COLUMNS = (
    (("sft/",), SUPERVISED_COLUMNS),
    (("prefer/",), PREFERENCE_COLUMNS),
    (("reward/loss", "reward/val_"), SCORE_COLUMNS),
)
IDLE = (("engines", APART), ("trainer", "perf/trainer_idle_share"))
AHEAD = (("buffer", "rollout/buffer"), ("staleness", "rollout/staleness_max"))
# What a narrow terminal does without, the first named first; metrics.jsonl has all of it.
LEFT_OUT = (
    "MFU",
    "logp diff",
    "grad",
    "lr",
    "entropy",
    "length",
    "buffer",
    "stale",
    "tok/s",
    "trn idle",
    "eng idle",
    "KL",
    "acc",
    "val ECE",
    "val",
    "val loss",
    "seconds",
)
ROWS_PER_HEADER = 25
EVERY_S = 30.0  # between two lines of one activity, where there is no live line
Cell = tuple[str, int, str]  # head, width, text


class ConsoleSink(Sink):
    """Writes rows and the live line to ``console``.  now: seconds from any start."""

    name = "console"

    def __init__(self, console: Console, total_steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._line = LiveLine(total_steps, now)
        self._now = now
        self._begun = now()
        self._told: dict[str, float] = {}  # when each activity was last told of, where there is no live line
        self._trains = False  # a step is trained
        self._width = max(4, 2 * len(str(total_steps)) + 1)
        self._rows = 0
        self._heads: list[str] = []  # of the row before
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self._line, console=console, refresh_per_second=4, transient=True)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's row."""
        self._line.finished(step, metrics)
        self._trains |= step > 0
        kinds = (each for marks, each in OFFLINE_COLUMNS if any(key.startswith(marks) for key in metrics))
        columns = next(kinds, COLUMNS)
        cells = _cells(columns, metrics)
        if APART in metrics:
            cells += [cell for cell in _cells(APART_COLUMNS, metrics) if cell[2]]
        if self._live is None:
            words = [f"step {self._of_all(step)}", *(f"{h} {text}" for h, _, text in cells if text)]
            self._console.print(Text(" | ".join(words)), soft_wrap=True)
            return
        cells = _fitting(cells, self._console.width - self._width)
        heads = [head for head, _, _ in cells]
        before = self._heads
        self._heads = heads
        if self._rows % ROWS_PER_HEADER == 0 or heads != before:
            header = " ".join(["step".rjust(self._width), *(h.rjust(width) for h, width, _ in cells)])
            self._console.print(Text(header, style="bold"), no_wrap=True, crop=True)
        row = " ".join([self._of_all(step).rjust(self._width), *(t.rjust(w) for _, w, t in cells)])
        self._console.print(Text(row), no_wrap=True, crop=True)
        self._rows += 1

    def _of_all(self, step: int) -> str:
        """``3/80``; the step alone in a run that only validates, which has none of its own."""
        return f"{step}/{self._line.total_steps}" if self._line.total_steps else str(step)

    def watch(self, lanes: Sequence[Lane]) -> None:
        """Show in the live line what the engines of ``lanes`` do."""
        self._line.lanes = lanes

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Change the live line; without one, and before the first step, print it now and then."""
        self._line.now(text, done, total)
        now = self._now()
        if self._live is None and not self._trains and now - self._told.get(text, -math.inf) >= EVERY_S:
            self._told[text] = now
            self._console.print(Text(f"{duration(now - self._begun)}: {self._line.words()}"), soft_wrap=True)

    def close(self) -> None:
        """Stop the live line and restore the terminal."""
        if self._live is not None:
            self._live.stop()


class LiveLine:
    """The live line: step, current activity, its progress, the time left of it and of the run, and the engines.

    lanes: of the engines, whose states it counts.
    """

    def __init__(self, total_steps: int, now: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self._now = now
        self._spinner = Spinner("dots")
        self._begun = self._since = now()
        self._text = "starting"
        self._done: float | None = None
        self._total: float | None = None
        self._done_first = 0.0
        self._steps: list[int] = []
        self._last: Mapping[str, float] = {}
        self.lanes: Sequence[Lane] = ()

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the end of ``step``.  The first call starts the clock, so that the start-up does not count."""
        self._last = metrics
        if not self._steps:
            self._begun = self._now()
        self._steps.append(step)

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Set the current activity; see ``Tracker.now``."""
        if text != self._text or (done or 0.0) < (self._done or 0.0):
            self._since = self._now()
            self._done_first = done or 0.0
        self._text = text
        self._done = done
        self._total = total

    def words(self) -> str:
        """The line without the spinner."""
        step = min(self._steps[-1] + 1, self.total_steps) if self._steps else None
        words = [] if step is None else [f"step {step}/{self.total_steps}"]
        words.append(f"{self._text}{self._progress()}")
        if (left := self._run_left()) is not None:
            words.append(f"run: {duration(left)} left")
        if self.lanes:
            words.append(self._engines())
        if APART in self._last:
            words.append(self._idle())
        return " · ".join(words)

    def _engines(self) -> str:
        """How many engines do what, now."""
        states = Counter("idle" if lane.state is None else lane.state.value for lane in self.lanes)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return f"engine{'s' * (len(self.lanes) > 1)}: {counts}"

    def _idle(self) -> str:
        """What stood idle in the last step, and how much was drawn ahead of it."""
        shares = [f"{name} {self._last[key]:.0%}" for name, key in IDLE if key in self._last]
        ahead = [f"{name} {self._last[key]:.0f}" for name, key in AHEAD if key in self._last]
        return ", ".join(["idle " + " and ".join(shares), *ahead])

    def __rich__(self) -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(self._spinner, Text(self.words(), no_wrap=True, overflow="ellipsis"))
        return line

    def _progress(self) -> str:
        elapsed = self._now() - self._since
        if self._done is None or not self._total:
            return f" {duration(elapsed)}" if elapsed >= 1 else ""
        text = f" {self._done:,.0f}/{self._total:,.0f}"
        gained = self._done - self._done_first
        if gained > 0 and self._done < self._total:
            text += f", {duration(elapsed / gained * (self._total - self._done))} left"
        return text

    def _run_left(self) -> float | None:
        if len(self._steps) < 2:
            return None
        a_step = (self._now() - self._begun) / max(self._steps[-1] - self._steps[0], 1)
        return a_step * max(self.total_steps - self._steps[-1], 0)


def duration(seconds: float) -> str:
    """A duration as text: ``4 s``, ``3:20 min``, ``1:03:20 h``."""
    whole = int(max(seconds, 0) + 0.5)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def spent(seconds: float) -> str:
    """A duration as ``duration`` has it; below ten seconds with two digits: ``0.34 s``, ``4.0 s``."""
    if not 0 < seconds < 9.95:
        return duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2g} s"


def number(value: float | None, unit: str = "") -> str:
    """``value`` as text of at most 8 characters and three decimals; a share in percent; None as "nan"."""
    if value is None or not math.isfinite(value):
        return "nan" if value is None or math.isnan(value) else ("inf" if value > 0 else "-inf")
    if unit == "share":
        return f"{100 * value:.1f}%"
    size = abs(value)
    if size >= 1e5:
        divisor, suffix = next(((d, s) for d, s in ((1e9, "G"), (1e6, "M")) if size >= d), (1e3, "k"))
        return f"{value / divisor:.1f}{suffix}" if size < 1e12 else f"{value:.1e}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.01 or size == 0 else f"{value:.1e}"


def _fitting(cells: Sequence[Cell], width: int) -> list[Cell]:
    """Those of ``cells`` for which there is room, each with a space before it: without the first of ``LEFT_OUT``."""
    for without in range(len(LEFT_OUT) + 1):
        fitting = [cell for cell in cells if cell[0] not in LEFT_OUT[:without]]
        if sum(size + 1 for _, size, _ in fitting) <= width:
            break
    return fitting


def _cells(columns: Columns, metrics: Mapping[str, float]) -> list[Cell]:
    return [(header, width, _cell(keys, metrics)) for header, width, keys in columns]


def _cell(keys: Sequence[str], metrics: Mapping[str, float]) -> str:
    """The number of the first of ``keys`` that is present, as text; for a family the mean of its members; else ""."""
    for key in keys:
        values = [value for name, value in metrics.items() if metric_of(name).key == key]
        if values:
            return number(sum(values) / len(values), metric_of(key).unit)
    return ""
