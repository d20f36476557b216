"""The loggers mlflow, swanlab and trackio: services that keep runs by project and name.

Each is told the same: the configuration, the metrics of each step under their own names, and the first samples of each
validation as text.  A resumed run goes on as the same run of the service, where the service can.  Where a service is,
and who one is there, is its own affair: MLFLOW_TRACKING_URI, SWANLAB_MODE, ``swanlab login``, TRACKIO_DIR.
"""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.secrets import redact
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.samples import Rows

MAX_PARAMS, MAX_PARAM = 100, 6000  # parameters in a batch and characters of one that mlflow takes
NO_METRIC_NAME = re.compile(r"[^\w\-. /:]")  # what mlflow takes in no name of a metric


class ServiceSink(ABC):
    """A run of a service.

    resumed: go on with the run that this run directory has there.  Raises whatever the service raises.
    """

    name: str

    def __init__(self, run_dir: Path, trainer: TrainerConfig, config: Mapping[str, Any], resumed: bool) -> None:
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._num_shown = trainer.log_val_generations
        self._id_file = logs / f"{self.name}_id"
        before = self._id_file.read_text(encoding="utf-8").strip() if resumed and self._id_file.is_file() else None
        sys.argv[1:] = redact(sys.argv[1:])  # which services write down
        project, title = redact(trainer.project_name), redact(trainer.experiment_name)
        self._id: str | None = self._start(logs, project, title, dict(config), before)

    @abstractmethod
    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        """Begins a run, or goes on with the one whose id is ``before``; its id."""

    @abstractmethod
    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the numbers of a step."""

    @abstractmethod
    def _show(self, step: int, texts: Sequence[str]) -> None:
        """Sends samples, each as Markdown."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's metrics under their own names."""
        if self._id is not None:  # only now, so that a start that fails leaves the id of the run before
            with replaced(self._id_file) as new:
                new.write_text(self._id + "\n", encoding="utf-8")
            self._id = None
        self._log(step, metrics)

    def samples(self, step: int, kind: str, rows: Rows) -> None:
        """Log the first validation samples as text."""
        if kind == "validation" and (shown := list(rows()[: self._num_shown])):
            self._show(step, [_markdown(row) for row in shown])

    def now(self, text: str, done: float | None, total: float | None) -> None:  # noqa: B027 - nothing is right for all
        """Does nothing: services show steps."""

    @abstractmethod
    def close(self) -> None:
        """Wait until everything is sent."""


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
            self._run = before
            self._client.update_run(before, status="RUNNING")
            return before
        known = self._client.get_experiment_by_name(project)
        place = (logs.resolve() / "mlflow").as_uri() if here else None
        experiment = known.experiment_id if known else self._client.create_experiment(project, artifact_location=place)
        self._run = str(self._client.create_run(experiment, run_name=title).info.run_id)
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in _leaves(config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS], synchronous=True)
        return self._run

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        sent = [self._metric(NO_METRIC_NAME.sub("_", key), value, now, step) for key, value in metrics.items()]
        self._sending = self._client.log_batch(self._run, metrics=sent, synchronous=False)

    def _show(self, step: int, texts: Sequence[str]) -> None:
        self._client.log_text(self._run, "\n\n---\n\n".join(texts), f"validation/step_{step}.md")

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

        self._swanlab: Any = swanlab
        where = logs / "swanlab"
        where.mkdir(exist_ok=True)
        self._swanlab.init(project=project, experiment_name=title, config=config, logdir=str(where))
        return title

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def _show(self, step: int, texts: Sequence[str]) -> None:
        self._swanlab.log({"validation/samples": [self._swanlab.Text(text) for text in texts]}, step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._swanlab.finish()


class TrackioSink(ServiceSink):
    """A run of the project ``trainer.project_name``, in trackio's folder of this machine or the Space it is told."""

    name = "trackio"

    def _start(self, logs: Path, project: str, title: str, config: dict[str, Any], before: str | None) -> str:
        import trackio

        self._trackio: Any = trackio
        resume = "allow" if before is not None else "never"
        self._trackio.init(project=project, name=before or title, config=config, resume=resume, embed=False)
        return before or title

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def _show(self, step: int, texts: Sequence[str]) -> None:
        text = self._trackio.Markdown("\n\n---\n\n".join(texts))
        self._trackio.log({"validation/samples": text}, step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._trackio.finish()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _markdown(row: Mapping[str, Any]) -> str:
    """Each field under its name, unchanged."""
    return "\n\n".join(f"**{name}**\n\n```text\n{value}\n```" for name, value in row.items())
