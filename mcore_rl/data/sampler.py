"""Draws the next prompts: indices, epoch after epoch, in an order that a seed decides and a checkpoint continues.

No prompt is dropped: a batch that an epoch cannot fill takes the rest of the epoch and goes on into the next.  It still
holds no prompt twice, because two groups of one prompt in a batch would be one group of twice the size.

What was drawn and not trained is given back in a state (``state_with``), and drawn before anything else.

Invariant: within an epoch every index is drawn exactly once and again only if it was given back, and after
``load_state_dict`` the sampler draws the same indices as the saved one would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any


class PromptSampler:
    """Draws from ``num_prompts`` prompts, in file order or, with ``shuffle``, in a new order each epoch.

    An epoch sorts the prompts by random numbers of PCG64, seeded with (seed, epoch): numpy promises these numbers for
    all its versions, and does not promise its shuffles.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        assert num_prompts >= 1, f"num_prompts={num_prompts} must be positive"
        assert seed >= 0, f"seed={seed} must not be negative"
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self._position = 0  # in the order of this epoch
        self._again: list[tuple[int, int]] = []  # (epoch, index) that were given back
        self._begin_epoch(0, carried=[], fresh=0)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; the next prompt is of this one if any of it is left."""
        return self._epoch

    def batches_per_epoch(self, batch_size: int, key: str = "data.train_batch_size") -> int:
        """Full batches in an epoch; the rest goes into the next epoch's first batch.

        key: of ``batch_size`` in the configuration.  ConfigError: there are fewer prompts than ``batch_size``.
        """
        assert batch_size >= 1, f"batch_size={batch_size} must be positive"
        if batch_size > self.num_prompts:
            problem = f"is more than the {self.num_prompts} prompts that there are"
            remedy = f"Write {self.num_prompts} or less, or name more files"
            raise ConfigError([Violation(key, batch_size, problem, remedy)])
        return self.num_prompts // batch_size

    @property
    def drawn(self) -> list[int]:
        """The indices of the current epoch that were drawn, in this order, and not given back."""
        indices: list[int] = self._order[: self._position].tolist()
        again = {index for epoch, index in self._again if epoch == self._epoch}
        return [index for index in indices if index not in again]

    @property
    def num_drawn(self) -> int:
        """How many indices of all epochs were drawn and not given back."""
        return self._epoch * self.num_prompts + self._position - len(self._again)

    def next(self, count: int) -> list[int]:
        """The next ``count`` indices, at most ``num_prompts``; no two alike but where some were given back."""
        return [index for _, index in self.next_of_epochs(count)]

    def next_of_epochs(self, count: int) -> list[tuple[int, int]]:
        """As ``next``, each index with the number of the epoch that it is drawn in: (epoch, index)."""
        assert 1 <= count <= self.num_prompts, f"count={count} must lie in [1, {self.num_prompts}]"
        again = self._again[:count]
        self._again = self._again[count:]
        return again + self._fresh_places(count - len(again))

    def _fresh_places(self, count: int) -> list[tuple[int, int]]:
        indices: list[int] = self._order[self._position : self._position + count].tolist()
        places = [(self._epoch, index) for index in indices]
        self._position += len(indices)
        if len(indices) < count:
            self._begin_epoch(self._epoch + 1, carried=indices, fresh=count - len(indices))
            self._position = count - len(indices)
            places += [(self._epoch, index) for index in self._order[: self._position].tolist()]
        return places

    def state_with(self, returned: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """As ``state_dict``, of a sampler to which the places ``returned``, (epoch, index), were given back."""
        return self.state_dict() | {"again": [list(each) for each in (*returned, *self._again)]}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers, at most a batch of indices, and those that were given back."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "carried": list(self._carried),
            "fresh": self._fresh,
            "again": [list(each) for each in self._again],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was saved.

        ConfigError: it was saved with another number of prompts, seed or shuffle, so its position has no meaning here.
        """
        settings = (
            ("data.train_files", "num_prompts", "prompts", self.num_prompts),
            ("data.seed", "seed", "as the seed", self.seed),
            ("data.shuffle", "shuffle", "as shuffle", self.shuffle),
        )
        refuse_if_any(
            [
                Violation(
                    key,
                    f"{here} {what}" if name == "num_prompts" else here,
                    f"the checkpoint was made with {state[name]} {what}, and its place in the data has no meaning here",
                    "Give the data settings that it was made with, or write trainer.resume_mode=off",
                )
                for key, name, what, here in settings
                if state[name] != here
            ]
        )
        self._begin_epoch(state["epoch"], carried=list(state["carried"]), fresh=state["fresh"])
        self._position = state["position"]
        self._again = [(epoch, index) for epoch, index in state.get("again", ())]

    def _begin_epoch(self, epoch: int, carried: list[int], fresh: int) -> None:
        """carried: indices that the current batch took from the last epoch; this epoch's first ``fresh`` avoid them."""
        order = np.arange(self.num_prompts)
        if self.shuffle:
            numbers = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_prompts)
            order = np.argsort(numbers, kind="stable")
        if carried:
            free = ~np.isin(order, carried)
            opening = np.flatnonzero(free)[:fresh]
            order = np.concatenate([order[opening], np.delete(order, opening)])
        self._order = order
        self._epoch = epoch
        self._position = 0
        self._carried = carried
        self._fresh = fresh
