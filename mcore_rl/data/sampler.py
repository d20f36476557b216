"""Draws the next prompts: indices, epoch after epoch, in an order that a seed decides and a checkpoint continues.

No prompt is dropped: a batch that an epoch cannot fill takes the rest of the epoch and goes on into the next.  It still
holds no prompt twice, because two groups of one prompt in a batch would be one group of twice the size.

Invariant: within an epoch every index is drawn exactly once, and after ``load_state_dict`` the sampler draws the same
indices as the saved one would have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.errors import ConfigError, Violation, refuse_if_any


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

    def next(self, count: int) -> list[int]:
        """The next ``count`` indices, no two alike; at most ``num_prompts`` (see ``batches_per_epoch``)."""
        assert 1 <= count <= self.num_prompts, f"count={count} must lie in [1, {self.num_prompts}]"
        drawn: list[int] = self._order[self._position : self._position + count].tolist()
        self._position += len(drawn)
        if len(drawn) < count:
            self._begin_epoch(self._epoch + 1, carried=list(drawn), fresh=count - len(drawn))
            self._position = count - len(drawn)
            drawn += self._order[: self._position].tolist()
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers, and at most a batch of indices."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "carried": list(self._carried),
            "fresh": self._fresh,
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
        self._order, self._epoch, self._position = order, epoch, 0
        self._carried, self._fresh = carried, fresh
