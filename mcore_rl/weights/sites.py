"""Where the ranks of both sides stand, as far as the way of the weights depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mcore_rl.ground.arrays import Int64Array

DIRECT = -1  # as a relay: none


@dataclass(frozen=True)
class Sites:
    """The nodes of all ranks, and the device that a rollout rank shares with a training rank.

    trainers: the node of each training rank.
    rollout: the node of each rollout rank.
    hosts: of each rollout rank, the training rank on its device (on a CPU: on its node), which receives for it; empty
        if the rollout ranks have devices of their own (``trainer.placement=separate``), and receive for themselves.
    """

    trainers: tuple[int, ...]
    rollout: tuple[int, ...]
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.hosts or len(self.hosts) == len(self.rollout), "each rollout rank has a host, or none has"
        for rank, host in enumerate(self.hosts):
            assert self.trainers[host] == self.rollout[rank], f"rollout rank {rank} and its host are on two nodes"

    @classmethod
    def colocated(cls, trainers: Sequence[int], num_rollout: int) -> Sites:
        """Rollout rank r shares the device of training rank r.  trainers: the node of each training rank."""
        return cls(tuple(trainers), tuple(trainers[:num_rollout]), tuple(range(num_rollout)))

    @property
    def num_nodes(self) -> int:
        """Nodes, as far as they are numbered."""
        return 1 + max(self.trainers + self.rollout)

    @property
    def members(self) -> int:
        """Ranks that send to one another: the training ranks, and rollout ranks that receive for themselves."""
        return len(self.trainers) + (0 if self.hosts else len(self.rollout))

    @cached_property
    def landing(self) -> Int64Array:
        """The member that receives for each rollout rank: int64 [rollout ranks]; members are training ranks first."""
        return np.array(self.hosts) if self.hosts else np.arange(len(self.trainers), self.members)

    @cached_property
    def nodes(self) -> Int64Array:
        """The node of each member: int64 [members]."""
        return np.array(self.trainers if self.hosts else self.trainers + self.rollout)
