"""The loggers of ``trainer.logger``: a row each, with the package that it needs and a remedy where it cannot start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.errors import Violation, pip_line
from mcore_rl.tracking.samples import Kind, Rows


class Sink(Protocol):
    """A destination of the tracker.  name: for warnings.  Every method may raise anything."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; see ``Tracker.log``."""

    def samples(self, step: int, kind: Kind, rows: Rows) -> None:
        """Record samples; see ``Tracker.samples``."""

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

    @property
    def resumed(self) -> bool:
        """Whether an earlier run goes on."""
        return self.resumed_step is not None


@dataclass(frozen=True)
class LoggerRow:
    """make: starts it.  module: that must be importable; what is installed with this package needs none.

    remedy: where it cannot start, besides leaving it out.
    """

    make: Callable[[LoggerStart], Sink]
    module: str
    remedy: str


def _wandb(opening: LoggerStart) -> Sink:
    from mcore_rl.tracking.wandb_sink import WandbSink

    return WandbSink(opening.run_dir, opening.trainer, opening.config, opening.resumed)


def _tensorboard(opening: LoggerStart) -> Sink:
    from mcore_rl.tracking.tensorboard_sink import TensorboardSink

    first = 0 if opening.resumed_step is None else opening.resumed_step + 1
    return TensorboardSink(opening.run_dir, opening.trainer, first)


def _mlflow(opening: LoggerStart) -> Sink:
    from mcore_rl.tracking.service_sinks import MlflowSink

    return MlflowSink(opening.run_dir, opening.trainer, opening.config, opening.resumed)


def _swanlab(opening: LoggerStart) -> Sink:
    from mcore_rl.tracking.service_sinks import SwanlabSink

    return SwanlabSink(opening.run_dir, opening.trainer, opening.config, opening.resumed)


def _trackio(opening: LoggerStart) -> Sink:
    from mcore_rl.tracking.service_sinks import TrackioSink

    return TrackioSink(opening.run_dir, opening.trainer, opening.config, opening.resumed)


# Besides the console, which the tracker makes last, so that no other prints into its line.
LOGGERS = {
    Logger.wandb: LoggerRow(_wandb, "wandb", "Run `wandb login` or set WANDB_MODE=offline"),
    Logger.tensorboard: LoggerRow(_tensorboard, "tensorboard", "Run `pip install tensorboard`"),
    Logger.mlflow: LoggerRow(_mlflow, "mlflow", "Set MLFLOW_TRACKING_URI to a server that answers, or unset it"),
    Logger.swanlab: LoggerRow(_swanlab, "swanlab", "Run `swanlab login` or set SWANLAB_MODE=local"),
    Logger.trackio: LoggerRow(_trackio, "trackio", "Set TRACKIO_DIR to a folder that can be written"),
}


def absent_loggers(loggers: Sequence[Logger]) -> list[Violation]:
    """A violation for each of ``loggers`` whose package is not installed; imports none of them."""
    return [
        Violation(
            "trainer.logger",
            logger.value,
            f"the package {row.module} is not installed",
            f"Run `{_how_to_install(logger)}`, or leave {logger.value} out of trainer.logger",
        )
        for logger, row in LOGGERS.items()
        if logger in loggers and find_spec(row.module) is None
    ]


def _how_to_install(logger: Logger) -> str:
    if logger in (Logger.wandb, Logger.tensorboard):  # dependencies, which somebody has removed
        return f"pip install {logger.value}"
    return pip_line(logger.value)
