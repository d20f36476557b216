"""The Weights & Biases logger.  wandb itself handles offline mode, keys and hosts (WANDB_MODE, ``wandb login``)."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.secrets import redact
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.messages import warn
from mcore_rl.tracking.samples import Rows

# Seconds that wandb's server has to answer: at the start, and at the end of the run for what is not sent yet.  wandb's
# own limits are 90, and none.
INIT_S, FINISH_S = 30.0, 600.0


class WandbSink:
    """A wandb run, of ``trainer.project_name`` and ``trainer.experiment_name``; its files go to ``logs/wandb``.

    Where its server does not answer, the run is recorded offline, with a warning.

    resumed: continue the wandb run of this run directory.  Raises whatever else wandb raises.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, trainer: TrainerConfig, config: Mapping[str, Any], resumed: bool) -> None:
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._num_shown = trainer.log_val_generations
        logs = run_dir / "logs"
        self._id: str | None
        self._id_file, self._id = logs / "wandb_id", _run_id(logs / "wandb_id", resumed)
        sys.argv[1:] = redact(sys.argv[1:])  # wandb writes them down (wandb_settings.py, 0.31, _args)
        start = partial(
            wandb.init,
            project=redact(trainer.project_name),
            name=redact(trainer.experiment_name),
            config=dict(config),
            dir=str(logs),
            id=self._id,
            resume="allow",
            # console: wandb must not capture the live line.  disable_git: git would get all secrets of this process;
            # environment.json has the commit of this package.
            settings=wandb.Settings(console="off", disable_git=True, init_timeout=INIT_S, finish_timeout=FINISH_S),
        )
        try:
            self._run: Any = start()
        except wandb.errors.CommError as error:
            if isinstance(error, wandb.errors.AuthenticationError):
                raise
            why = redact(str(error).splitlines()[0])
            remedy = f"The run goes on offline; send it later: wandb sync {logs}/wandb/offline-run-*"
            warn(f"wandb: its server does not answer ({why}). {remedy}")
            wandb.teardown()  # its service takes the id for used
            self._run = start(mode="offline")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's metrics under their own names."""
        if self._id is not None:  # only now, so that a start that fails leaves the id of the run before
            with replaced(self._id_file) as new:
                new.write_text(self._id + "\n", encoding="utf-8")
            self._id = None
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, kind: str, rows: Rows) -> None:
        """Log a table of the first validation samples."""
        if kind != "validation" or not (shown := list(rows()[: self._num_shown])):
            return
        columns = list(dict.fromkeys(name for row in shown for name in row))
        table = self._wandb.Table(columns=columns, data=[[_cell(row.get(name)) for name in columns] for row in shown])
        self._run.log({"validation/samples": table}, step=step)

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Does nothing: wandb shows steps."""

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    return uuid.uuid4().hex[:12]


def _cell(value: Any) -> Any:
    """``value`` as a number or text: a column of wandb's table has one type."""
    return value if isinstance(value, int | float | None) else str(value)
