"""The TensorBoard logger: event files in ``logs/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.tracking.samples import Rows


class TensorboardSink:
    """Writes one event file.  first_step: of this process; TensorBoard hides older files' events from there on."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, trainer: TrainerConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._num_shown = trainer.log_val_generations
        self._new_writer: Any = partial(
            SummaryWriter, log_dir=str(run_dir / "logs" / "tensorboard"), purge_step=first_step or None
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

    def samples(self, step: int, kind: str, rows: Rows) -> None:
        """Write the first validation samples as text."""
        if kind != "validation":
            return
        for number, row in enumerate(rows()[: self._num_shown]):
            markdown = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in row.items())
            self._writer.add_text(f"validation/sample_{number}", markdown, step)
        self._writer.flush()

    def now(self, text: str, done: float | None, total: float | None) -> None:
        """Does nothing: TensorBoard shows steps."""

    def close(self) -> None:
        """Close the event file."""
        if "_writer" in self.__dict__:
            self._writer.close()


def _indented(value: Any) -> str:
    """``value`` indented, so that Markdown shows it unchanged."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
