"""The tracker: one object that records metrics, samples and progress of a run.

It writes to the run directory and to the loggers of ``trainer.logger``; none of them gets the value of a secret (see
``secrets``).  A logger that cannot start ends the run before it begins, because the user asked for it.  One that fails
later, as a disk or a network may, causes one warning, because hours of training are worth more than a curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.ground.secrets import redact, redact_settings
from mcore_rl.hub.names import with_names
from mcore_rl.tracking.clock import TIMELINE, PhaseSpan, TimelineFile
from mcore_rl.tracking.console import ConsoleSink
from mcore_rl.tracking.jsonl import MetricsFile
from mcore_rl.tracking.lanes import LANES, Lane, LanesFile, StepLanes
from mcore_rl.tracking.loggers import LOGGERS, LoggerStart, Sink, absent_loggers
from mcore_rl.tracking.messages import warn
from mcore_rl.tracking.metrics import metric_of
from mcore_rl.tracking.run_directory import plain, prepare
from mcore_rl.tracking.samples import Kind, Rows, write_samples
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledStep, ScheduleFile

MAX_UNSENT = 8  # files of samples, which hold the responses of a step each
Samples = tuple[int, Kind, Rows]


class RunDirectorySink(Sink):
    """Writes metrics.jsonl, timeline.jsonl, lanes.jsonl, schedule.jsonl, rollouts/ and validation/.

    keep: existing records up to this step stay.

    A thread makes and writes samples, because those of a large step take seconds.  It writes at most one file at a
    time; the next call raises its error.

    What does not fit on the disk is kept and written with the next: all lines, and the last ``MAX_UNSENT`` files of
    samples.
    """

    name = "run directory"

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._run_dir = run_dir
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", keep)
        self._timeline = TimelineFile(run_dir / TIMELINE, keep)
        self._lanes = LanesFile(run_dir / LANES, keep)
        self._schedule = ScheduleFile(run_dir / SCHEDULE, keep)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._unsent = list[Samples]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        self._metrics.write(step, metrics)

    def timeline(self, step: int, spans: Sequence[PhaseSpan], lanes: StepLanes | None) -> None:
        """Append a line to timeline.jsonl, and one to lanes.jsonl."""
        try:
            self._timeline.write(step, spans)
        finally:
            if lanes is not None:
                self._lanes.write(step, lanes)

    def schedule(self, step: ScheduledStep) -> None:
        """Append a line to schedule.jsonl."""
        self._schedule.write(step)

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Start writing the step's file."""
        try:
            self._finish_writing()
        finally:
            self._writing = self._writer.submit(self._write_samples, [*self._unsent[-MAX_UNSENT:], (step, kind, rows)])

    def close(self) -> None:
        """Wait until everything is written.  OSError: something was not, and is lost."""
        with ExitStack() as closing:
            for file in (self._metrics, self._timeline, self._lanes, self._schedule):
                closing.callback(file.close)
            self._writer.shutdown()
            try:
                with suppress(OSError):  # what it did not write is unsent
                    self._finish_writing()
            finally:
                self._write_samples(self._unsent)

    def _write_samples(self, files: Sequence[Samples]) -> None:
        """Writes ``files``; those that the disk has no room for are unsent."""
        left = [*files]
        while left:
            step, kind, rows = left[0]
            try:
                write_samples(self._run_dir, step, kind, rows())
            except OSError:
                self._unsent = left[-MAX_UNSENT:]
                raise
            except BaseException:
                self._unsent = left[1:]
                raise
            left = left[1:]
        self._unsent = []

    def _finish_writing(self) -> None:
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()


def _records(
    run_dir: Path, config: Mapping[str, Any], total_steps: int, resumed_step: int | None, devices: Mapping[str, Any]
) -> RunDirectorySink:
    try:
        prepare(run_dir, config, total_steps, resumed_step, devices)
        return RunDirectorySink(run_dir, -1 if resumed_step is None else resumed_step)
    except OSError as error:
        remedy = "Give a directory that can be written"
        violation = Violation("trainer.default_local_dir", run_dir, f"cannot be written: {error}", remedy)
        raise ConfigError([violation]) from error


class Tracker:
    """Records a run: ``with Tracker.open(...) as tracker:``; leaving the block closes it and restores the terminal."""

    def __init__(
        self, sinks: Sequence[Sink], last_step: int = -1, records: Callable[[], RunDirectorySink] | None = None
    ) -> None:
        self._sinks = tuple(sinks)
        self._records = records
        self._failed = set[str]()  # names of sinks
        self._last_step = last_step

    @classmethod
    def open(
        cls,
        run_dir: Path | str,
        trainer: TrainerConfig,
        config: Mapping[str, Any],
        total_steps: int,
        console: Console | None = None,
        *,
        resumed_step: int | None = None,
        devices: Mapping[str, Any] | None = None,
        begin: bool = True,
    ) -> Tracker:
        """Create the run directory and start the loggers.

        config: the composed configuration; may hold enums and dataclasses.  total_steps: of the whole run.  console:
        instead of standard output.  resumed_step: the step whose checkpoint the run continues; records of later steps
        are dropped.  None: a fresh run; records of another run are moved to ``earlier/N``.  devices: the workers'
        hardware, for environment.json.  begin: False: nothing that is in the directory changes before ``begin``.
        Raises ConfigError with every violation: the directory cannot be written, a logger cannot start.
        """
        run_dir = Path(run_dir)
        keep = -1 if resumed_step is None else resumed_step
        values = redact_settings(with_names(plain(config)))
        opening = LoggerStart(run_dir, trainer, values, resumed_step)
        sinks: list[Sink] = []
        violations = absent_loggers(trainer.logger)
        absent = [each.value for each in violations]
        records = partial(_records, run_dir, values, total_steps, resumed_step, devices or {})
        if begin:
            sinks.append(records())
        for logger, row in LOGGERS.items():
            if logger not in trainer.logger or logger.value in absent:
                continue
            try:
                sinks.append(row.make(opening))
            except Exception as error:  # noqa: BLE001 - third parties raise anything; report it with the remedy
                problem = f"cannot start: {type(error).__name__}: {str(error).strip() or 'no message'}"
                remedy = f"{row.remedy}, or leave {logger.value} out of trainer.logger"
                violations.append(Violation("trainer.logger", logger.value, problem, remedy))
        if trainer.prometheus.port is not None:
            from mcore_rl.tracking.prometheus_sink import PrometheusSink

            try:
                sinks.append(PrometheusSink(run_dir, trainer, resumed_step or 0, total_steps))
            except ConfigError as error:
                violations += error.violations
            except OSError as error:
                where = f"{trainer.prometheus.host}:{trainer.prometheus.port}"
                problem = f"nothing can listen at {where}: {error.strerror or error}"
                remedy = "Write another port or trainer.prometheus.host, or leave it out"
                violations.append(Violation("trainer.prometheus.port", trainer.prometheus.port, problem, remedy))
        if Logger.console in trainer.logger and not violations:  # last, so that no other prints into its line
            sinks.append(ConsoleSink(console or Console(), total_steps))
        if violations:
            cls(sinks).close()
        refuse_if_any(violations)
        return cls(sinks, keep, None if begin else records)

    def begin(self) -> None:
        """Begin to record, where ``open`` did not.  Raises ConfigError: the directory cannot be written."""
        assert self._records is not None, "it has begun"
        self._sinks = (self._records(), *self._sinks)
        self._records = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, once a step, validation included; keys are in ``metrics.METRICS``.

        Step 0 is validation before training.  AssertionError: an unknown key, or a step that does not rise.
        """
        for key in metrics:
            metric_of(key)
        assert step > self._last_step, f"step {step} is logged after step {self._last_step}: one call a step"
        self._last_step = step
        numbers = {key: float(value) for key, value in metrics.items()}
        self._tell(lambda sink: sink.log(step, numbers))

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Write samples of one step to ``{kind}/step_N.parquet``; before or after its ``log``.

        Loggers show the first ``trainer.log_val_generations`` of validation.  rows: called in a thread while the run
        goes on; the caller must not change the data that it reads.
        """
        shown = cache(lambda: redact(rows()))
        self._tell(lambda sink: sink.samples(step, kind, shown))

    def timeline(self, step: int, spans: Sequence[PhaseSpan], lanes: StepLanes | None = None) -> None:
        """Record when the phases of one step were open, and what engines did; only the run directory has it."""
        self._tell(lambda sink: sink.timeline(step, spans, lanes))

    def watch(self, lanes: Sequence[Lane]) -> None:
        """Show in the live line what the engines of ``lanes`` do."""
        self._tell(lambda sink: sink.watch(lanes))

    def schedule(self, step: ScheduledStep) -> None:
        """Record which groups a step trained; only the run directory has it."""
        self._tell(lambda sink: sink.schedule(step))

    def now(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show the current activity in the live line.  done, total: its progress, in any unit."""
        self._tell(lambda sink: sink.now(text, done, total))

    def close(self) -> None:
        """Close every sink, even if one fails; idempotent."""
        sinks = self._sinks
        self._sinks = ()
        self._tell(lambda sink: sink.close(), sinks[::-1], last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, what: Callable[[Sink], None], sinks: Sequence[Sink] | None = None, *, last: bool = False) -> None:
        """Does ``what`` with each sink.  last: there is no further try."""
        for sink in self._sinks if sinks is None else sinks:
            try:
                what(sink)
            except Exception as error:  # noqa: BLE001 - third parties raise anything, and the run goes on
                message = f"{type(error).__name__}: {error}"
                if last:
                    warn(f"{sink.name}: {message}. What it has not written is lost")
                elif sink.name not in self._failed:
                    self._failed.add(sink.name)
                    warn(f"{sink.name}: {message}. The run goes on, and tries again; this is said once")
