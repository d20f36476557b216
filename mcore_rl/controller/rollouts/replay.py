"""``trainer.replay``: gives each step the rollouts that another run recorded, in the order in which it trained them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_rl.controller.rollouts.drawn_file import DrawnFileError, RowOf
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.rollouts.recording import RECORD, read_record, record_file
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.errors import CheckpointError


class ReplaySource:
    """The recorded rollouts of one step after the other, as ``RolloutSource``.

    recorded: the run directory that has them.  row_of: the prompts of the training files.
    sampler: is moved to the place in the data that the other run had after each step.
    """

    def __init__(self, recorded: Path, row_of: RowOf, sampler: PromptSampler) -> None:
        self._recorded, self._row_of, self._sampler = recorded, row_of, sampler

    async def __aenter__(self) -> ReplaySource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def place(self) -> dict[str, Any]:
        """The sampler's state after the last step's rollouts."""
        return self._sampler.state_dict()

    @property
    def kept(self) -> KeptDraws:
        """Nothing but the place: what is recorded need not be kept."""
        return KeptDraws(place=self.place)

    def return_to(self, kept: KeptDraws) -> None:
        """Goes back to ``kept``."""
        self._sampler.load_state_dict(kept.place)

    def resume(self, kept: KeptDraws, version: int) -> None:
        """Does nothing: rollouts come from the record."""

    async def next(self, step: int) -> RolloutBatch:
        """The rollouts of ``step``.  CheckpointError: they cannot be read."""
        try:
            batch, place = await asyncio.to_thread(read_record, self._recorded, step, self._row_of)
        except DrawnFileError as error:
            path = record_file(self._recorded, step).relative_to(self._recorded)
            remedy = "Restore it; steps before it were replayed, and their last checkpoint stays"
            raise CheckpointError(str(self._recorded / RECORD), [f"{path.name} {error}. {remedy}"]) from error
        self._sampler.load_state_dict(place)
        return batch

    async def take_back(self) -> None:
        """Nothing is drawn."""

    async def settle(self, preemption: Preemption) -> None:
        """Nothing is drawn."""
