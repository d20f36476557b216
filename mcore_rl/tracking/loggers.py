"""The loggers of ``trainer.logger``: a row each, with a remedy where it cannot start.

Services (wandb, mlflow, swanlab, trackio) keep runs by project and name.  Each is told the same: the configuration, the
metrics of each step under their own names, and the first samples of each validation.  A resumed run goes on as the same
run of the service, where the service can.  Where a service is, and who one is there, is its own affair: WANDB_MODE,
``wandb login``, MLFLOW_TRACKING_URI, SWANLAB_MODE, ``swanlab login``, TRACKIO_DIR.  A logger's package is imported when
it starts, since that takes seconds.
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_rl.config.names import leaf_values
from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.ground.errors import Violation, pip_line
from mcore_rl.ground.secrets import redact
from mcore_rl.tracking.atomic import write_whole
from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.lanes import Lane, StepLanes
from mcore_rl.tracking.messages import warn
from mcore_rl.tracking.samples import Kind, Rows
from mcore_rl.tracking.schedule import ScheduledStep

MAX_PARAMS = 100  # in a batch that mlflow takes
MAX_PARAM = 6000  # characters of one
NO_METRIC_NAME = re.compile(r"[^\w\-. /:]")  # what mlflow takes in no name of a metric
# Seconds that wandb's server has to answer: at the start, and at the end of the run for what is not sent yet.  wandb's
# own limits are 90, and none.
INIT_S = 30.0
FINISH_S = 600.0


class Sink:
    """A destination of the tracker, which ignores what it has no method of its own for.

    name: for warnings.  Every method may raise anything.
    """

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; see ``Tracker.log``."""

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Record samples; see ``Tracker.samples``."""

    def timeline(self, step: int, spans: Sequence[PhaseSpan], lanes: StepLanes | None) -> None:
        """Record when phases were open; see ``Tracker.timeline``."""

    def schedule(self, step: ScheduledStep) -> None:
        """Record which groups a step trained."""

    def watch(self, lanes: Sequence[Lane]) -> None:
        """Show what the engines of ``lanes`` do."""

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Show the current activity; see ``Tracker.now``."""

    def close(self) -> None:
        """Finish; no other call follows."""


@dataclass(frozen=True)
class LoggerStart:
    """What a logger begins with.  config: without secrets.  resumed_step: None for a fresh run."""

    run_dir: Path
    trainer: TrainerConfig
    config: Mapping[str, Any]
    resumed_step: int | None


class TensorboardSink(Sink):
    """Writes one event file in ``logs/tensorboard``, which hides older files' events from its first step on."""

    name = "tensorboard"

    def __init__(self, start: LoggerStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._num_shown = start.trainer.log_val_generations
        hidden = None if start.resumed_step is None else start.resumed_step + 1
        self._new_writer: Any = partial(
            SummaryWriter, log_dir=str(start.run_dir / "logs" / "tensorboard"), purge_step=hidden
        )

    @cached_property
    def _writer(self) -> Any:
        """Made for the first step, since its file hides what others have written."""
        return self._new_writer()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's metrics under their own names."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Write the first validation samples as text."""
        if kind != "validation":
            return
        for number, row in enumerate(rows()[: self._num_shown]):
            markdown = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in row.items())
            self._writer.add_text(f"validation/sample_{number}", markdown, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if "_writer" in self.__dict__:
            self._writer.close()


class ServiceSink(Sink, ABC):
    """A run of a service.  Raises whatever the service raises.  _service: what logs and finishes it."""

    _service: Any

    def __init__(self, start: LoggerStart) -> None:
        trainer = start.trainer
        logs = start.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._num_shown = trainer.log_val_generations
        self._id_file = logs / f"{self.name}_id"
        resumed = start.resumed_step is not None and self._id_file.is_file()
        before = self._id_file.read_text(encoding="utf-8").strip() if resumed else None
        sys.argv[1:] = redact(sys.argv[1:])  # which services write down
        project = redact(trainer.project_name)
        title = redact(trainer.experiment_name)
        self._id: str | None = self._start(logs, project, title, dict(start.config), before)

    @abstractmethod
    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        """Begins a run, or goes on with the one whose id is ``before``; its id."""

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the numbers of a step."""
        self._service.log(dict(metrics), step=step)

    @abstractmethod
    def _show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends samples: prompts, responses and scores."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's metrics under their own names."""
        if self._id is not None:  # only now, so that a start that fails leaves the id of the run before
            write_whole(self._id_file, self._id + "\n")
            self._id = None
        self._log(step, metrics)

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Log the first validation samples, but for where files of pictures lie on this machine."""
        if kind != "validation":
            return
        shown = [{name: value for name, value in row.items() if name != "images"} for row in rows()[: self._num_shown]]
        if shown:
            self._show(step, shown)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._service.finish()


class WandbSink(ServiceSink):
    """A run of the project ``trainer.project_name``; its files are in ``logs/wandb``.

    Where wandb's server does not answer, the run is recorded offline, with a warning.
    """

    name = "wandb"

    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        import wandb

        self._wandb: Any = wandb
        named = before or uuid.uuid4().hex[:12]
        start = partial(
            wandb.init,
            project=project,
            name=title,
            config=config,
            dir=str(logs),
            id=named,
            resume="allow",
            # console: wandb must not capture the live line.  disable_git: git would get all secrets of this process;
            # environment.json has the commit of this package.
            settings=wandb.Settings(console="off", disable_git=True, init_timeout=INIT_S, finish_timeout=FINISH_S),
        )
        try:
            self._service = start()
        except wandb.errors.CommError as error:
            if isinstance(error, wandb.errors.AuthenticationError):
                raise
            why = redact(str(error).splitlines()[0])
            remedy = f"The run goes on offline; send it later: wandb sync {logs}/wandb/offline-run-*"
            warn(f"wandb: its server does not answer ({why}). {remedy}")
            wandb.teardown()  # its service takes the id for used
            self._service = start(mode="offline")
        return named

    def _show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._wandb.Table(columns=columns, data=[[_cell(row.get(name)) for name in columns] for row in rows])
        self._service.log({"validation/samples": table}, step=step)


class MlflowSink(ServiceSink):
    """A run of the experiment ``trainer.project_name``.  Without MLFLOW_TRACKING_URI it is in ``logs/mlflow.db``.

    Metrics are sent by a thread of mlflow's; samples are text artifacts.
    """

    name = "mlflow"

    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._sending: Any = None
        here = not mlflow.environment_variables.MLFLOW_TRACKING_URI.is_set()
        self._client: Any = mlflow.MlflowClient(f"sqlite:///{logs.resolve()}/mlflow.db" if here else None)
        if before is not None:
            self._run: str = before
            self._client.update_run(before, status="RUNNING")
            return before
        known = self._client.get_experiment_by_name(project)
        place = (logs.resolve() / "mlflow").as_uri() if here else None
        experiment = known.experiment_id if known else self._client.create_experiment(project, artifact_location=place)
        self._run = str(self._client.create_run(experiment, run_name=title).info.run_id)
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in leaf_values(config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS], synchronous=True)
        return self._run

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        sent = [self._metric(NO_METRIC_NAME.sub("_", key), value, now, step) for key, value in metrics.items()]
        self._sending = self._client.log_batch(self._run, metrics=sent, synchronous=False)

    def _show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_text(self._run, "\n\n---\n\n".join(map(_markdown, rows)), f"validation/step_{step}.md")

    def close(self) -> None:
        """Wait for the last numbers, which are sent in order, and end the run."""
        try:
            if self._sending is not None:
                self._sending.wait()
        finally:
            self._client.set_terminated(self._run)


class SwanlabSink(ServiceSink):
    """An experiment of the project ``trainer.project_name``; its files are in ``logs/swanlab``.

    swanlab 0.6, which this package's versions allow, cannot go on with an experiment: a resumed run is one more.
    """

    name = "swanlab"

    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        import swanlab

        self._service = swanlab
        where = logs / "swanlab"
        where.mkdir(exist_ok=True)
        swanlab.init(project=project, experiment_name=title, config=config, logdir=str(where))
        return title

    def _show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._service.log({"validation/samples": [self._service.Text(_markdown(row)) for row in rows]}, step=step)


class TrackioSink(ServiceSink):
    """A run of the project ``trainer.project_name``, in trackio's folder of this machine or the Space it is told."""

    name = "trackio"

    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        import trackio

        self._service = trackio
        resume = "allow" if before is not None else "never"
        trackio.init(project=project, name=before or title, config=config, resume=resume, embed=False)
        return before or title

    def _show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = self._service.Markdown("\n\n---\n\n".join(map(_markdown, rows)))
        self._service.log({"validation/samples": text}, step=step)


@dataclass(frozen=True)
class LoggerRow:
    """make: starts it.  remedy: where it cannot start, besides leaving it out."""

    make: Callable[[LoggerStart], Sink]
    remedy: str


# Besides the console, which the tracker makes last, so that no other prints into its line.  Each needs the package of
# its name.
LOGGERS = {
    Logger.wandb: LoggerRow(WandbSink, "Run `wandb login` or set WANDB_MODE=offline"),
    Logger.tensorboard: LoggerRow(TensorboardSink, "Run `pip install tensorboard`"),
    Logger.mlflow: LoggerRow(MlflowSink, "Set MLFLOW_TRACKING_URI to a server that answers, or unset it"),
    Logger.swanlab: LoggerRow(SwanlabSink, "Run `swanlab login` or set SWANLAB_MODE=local"),
    Logger.trackio: LoggerRow(TrackioSink, "Set TRACKIO_DIR to a folder that can be written"),
}


def absent_loggers(loggers: Sequence[Logger]) -> list[Violation]:
    """A violation for each of ``loggers`` whose package is not installed; imports none of them."""
    return [
        Violation(
            "trainer.logger",
            logger.value,
            f"the package {logger.value} is not installed",
            f"Run `{_how_to_install(logger)}`, or leave {logger.value} out of trainer.logger",
        )
        for logger in LOGGERS
        if logger in loggers and find_spec(logger.value) is None
    ]


def _how_to_install(logger: Logger) -> str:
    if logger in (Logger.wandb, Logger.tensorboard):  # dependencies, which somebody has removed
        return f"pip install {logger.value}"
    return pip_line(logger.value)


def _markdown(row: Mapping[str, Any]) -> str:
    """Each field under its name, unchanged."""
    return "\n\n".join(f"**{name}**\n\n```text\n{value}\n```" for name, value in row.items())


def _indented(value: Any) -> str:
    """``value`` indented, so that Markdown shows it unchanged."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())


def _cell(value: Any) -> Any:
    """``value`` as a number or text: a column of wandb's table has one type."""
    return value if isinstance(value, int | float | None) else str(value)
