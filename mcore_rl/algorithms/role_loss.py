"""The interface of a role's loss: the loss of one microbatch, and the metrics of a step's updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.ground.types import LossInputs, LossSums


@dataclass(frozen=True)
class UpdateSums:
    """The metrics of a loss in the updates of one step.

    minibatches: for each optimizer step, the loss's metrics, summed over its trained tokens, and the routers' metrics.
    trained: the number of trained tokens of each optimizer step.
    maxima: for each optimizer step, the loss's maxima over its trained tokens.
    """

    minibatches: Sequence[Mapping[str, float]]
    trained: Sequence[int]
    maxima: Sequence[Mapping[str, float]] = ()

    def mean(self, name: str, first: bool = False) -> float | None:
        """A metric per trained token; None if no minibatch has it.  first: of the first minibatch alone."""
        chosen = list(zip(self.minibatches, self.trained, strict=True))[: 1 if first else None]
        pairs = [(metrics[name], count) for metrics, count in chosen if name in metrics]
        return sum(value for value, _ in pairs) / max(1, sum(count for _, count in pairs)) if pairs else None

    def largest(self, name: str) -> float | None:
        """The largest of a maximum over all minibatches; None if no minibatch has it."""
        return max((each[name] for each in self.maxima if name in each), default=None)

    def totals(self) -> dict[str, float]:
        """The sum of each metric over all minibatches."""
        names = {name for metrics in self.minibatches for name in metrics}
        return {name: sum(metrics.get(name, 0.0) for metrics in self.minibatches) for name in names}


class RoleLoss(ABC):
    """The loss of a trained role.  The role's ``loss`` makes it from its configuration; workers receive it pickled."""

    @property
    def with_entropy(self) -> bool:
        """Whether the engine must compute entropies with gradient."""
        return False

    @property
    def with_full_kl(self) -> bool:
        """Whether the engine must compute the exact KL to frozen weights in the role's processes."""
        return False

    @property
    def distill(self) -> DistillConfig | None:
        """The divergence from a teacher that the engine must compute; None: none."""
        return None

    @property
    def with_pairs(self) -> bool:
        """Whether it looks at both sequences of a pair."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's rows; without a trained row, a zero that is connected to the graph."""

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """The metrics of a step for metrics.jsonl: by default those of the loss, per trained token, and maxima."""
        names = sorted(name for name in sums.totals() if not name.startswith("router/"))
        largest = {name: sums.largest(name) for name in sorted({name for each in sums.maxima for name in each})}
        named = {name: sums.mean(name) for name in names} | largest
        return {name: value for name, value in named.items() if value is not None}
