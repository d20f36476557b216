"""What a role is trained with: a loss of one microbatch, and what a step's updates report of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.types import LossInputs, LossSums


@dataclass(frozen=True)
class UpdateSums:
    """What a loss said in the updates of one step.

    minibatches: of each optimizer step, the metrics that the loss summed over its trained tokens, and the routers'.
    trained: the trained tokens of each.
    """

    minibatches: Sequence[Mapping[str, float]]
    trained: Sequence[int]

    def mean(self, name: str, first: bool = False) -> float | None:
        """A metric per trained token; None where there is none.  first: of the first minibatch alone."""
        chosen = list(zip(self.minibatches, self.trained, strict=True))[: 1 if first else None]
        found = [(metrics[name], count) for metrics, count in chosen if name in metrics]
        return sum(value for value, _ in found) / max(1, sum(count for _, count in found)) if found else None

    def totals(self) -> dict[str, float]:
        """All metrics, over all minibatches."""
        names = {name for metrics in self.minibatches for name in metrics}
        return {name: sum(metrics.get(name, 0.0) for metrics in self.minibatches) for name in names}


class RoleLoss(ABC):
    """The loss of a trained role; made by the row's ``loss`` of its configuration, and sent to workers by pickle."""

    @property
    def with_entropy(self) -> bool:
        """Whether the engine must compute entropies with gradient."""
        return False

    @property
    def with_full_kl(self) -> bool:
        """Whether the engine must compute the exact KL to frozen weights in the role's processes."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums of this rank's rows; without a trained row a zero that is connected to the graph."""

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """What metrics.jsonl says of a step: each metric of the loss under its own name, per trained token."""
        names = sorted(name for name in sums.totals() if not name.startswith("router/"))
        return {name: value for name in names if (value := sums.mean(name)) is not None}
