"""vLLM's process groups without processes: what a rank asks of them while its model is built and loaded.

Used where vLLM runs alone, in the process of ``VllmProcess``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class VllmLayout:
    """The layout as vLLM's arguments; global rank = data-parallel rank * tp + tensor-parallel rank.

    latent_attention: whether MLA runs as such.  ranks: the global ranks to build.
    """

    tp: int
    dp: int
    expert_parallel: bool
    latent_attention: bool
    ranks: tuple[int, ...]


class _Peers:
    """Stands in for a ProcessGroup while models are built, which only ask for its rank and size."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.index = list(ranks), list(ranks).index(rank)

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return len(self.ranks)


@contextmanager
def standing_as(rank: int, layout: VllmLayout) -> Iterator[None]:
    """While active, vLLM's groups are those that ``initialize_model_parallel`` would make on ``rank``, without peers.

    vllm/distributed/parallel_state.py, 0.32: all ranks are laid out as data parallel x tensor parallel, and expert
    parallelism spans both.  Building and loading a model only reads sizes and ranks of groups.
    """
    from vllm import envs
    from vllm.distributed import parallel_state

    def group(ranks: Sequence[int]) -> Any:
        coordinator = object.__new__(parallel_state.GroupCoordinator)  # its own __init__ would wait for the peers
        coordinator.rank, coordinator.ranks, coordinator.world_size = rank, list(ranks), len(ranks)
        coordinator.rank_in_group = coordinator.ranks.index(rank)
        coordinator.device_group = coordinator.cpu_group = _Peers(ranks, rank)
        coordinator.device = torch.device("cpu")
        return coordinator

    everyone = range(layout.tp * layout.dp)
    first = rank // layout.tp * layout.tp
    groups = dict.fromkeys(("_PP", "_PCP", "_DCP"), group([rank]))
    groups |= dict.fromkeys(("_TP", "_ETP"), group(range(first, first + layout.tp)))
    groups |= dict.fromkeys(("_WORLD", "_EP"), group(everyone))
    groups["_DP"] = group(everyone[rank % layout.tp :: layout.tp])
    wanted = [(parallel_state, name, value) for name, value in groups.items()]
    wanted.append((envs, "VLLM_MLA_DISABLE", not layout.latent_attention))
    before = [(module, name, getattr(module, name)) for module, name, _ in wanted]
    try:
        for module, name, value in wanted:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
