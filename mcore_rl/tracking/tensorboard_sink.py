"""TensorBoard event files in ``logs/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.tracking.samples import Rows


class TensorboardSink:
    """One event file.  first_step: of this process; events from there on in older files are not shown any more."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, trainer: TrainerConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds, and only for those who ask for it

        self._num_shown = trainer.log_val_generations
        self._writer: Any = SummaryWriter(log_dir=str(run_dir / "logs" / "tensorboard"), purge_step=first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step's metrics under their own names."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, kind: str, rows: Rows) -> None:
        """The first validation samples as text."""
        if kind != "validation":
            return
        for number, row in enumerate(rows()[: self._num_shown]):
            said = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in row.items())
            self._writer.add_text(f"validation/sample_{number}", said, step)
        self._writer.flush()

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Nothing: TensorBoard is told of steps."""

    def close(self) -> None:
        """No more events."""
        self._writer.close()


def _indented(value: Any) -> str:
    """Markdown shows it as it is."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
