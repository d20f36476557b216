"""Drives the routers of an engine: announces microbatches, counts, records and replays choices, reports statistics.

Every sum here is over rows that exist once in the world: a router sees its own slice of a sequence (sequence and
context parallelism), of its own data-parallel sequences, in its own stage.  So a plain sum over the world is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.engine import MoeTrainConfig
from mcore_rl.config.model import MoeConfig
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.microbatch import NOWHERE, Microbatch
from mcore_rl.training.router import Purpose, RoutedMicrobatch, RouterState, routers_of
from mcore_rl.types import Denominators, TrainBatch


class Routing:
    """The routers of one engine on this rank.

    L: layers of the whole model; layers of other stages and dense layers stay zero.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        num_layers: int,
        moe: MoeConfig,
        terms: MoeTrainConfig,
        groups: ProcessGroups,
    ) -> None:
        self.groups, self.num_layers, self.top_k = groups, num_layers, moe.top_k
        self.routers = routers_of(models)
        layers = [router.layer_number - 1 for router in self.routers]  # none in a stage of dense layers
        self.layers = torch.tensor(layers, dtype=torch.int64, device=groups.device)
        self.expert_layers = [layer for layer in range(num_layers) if layer not in moe.dense_layers]
        self.state = RouterState(
            terms=terms,
            num_layers=len(self.routers),
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            split=groups.moe_tokens,
            device=groups.device,
        )
        for layer, router in enumerate(self.routers):
            router.connect(self.state, layer)
        self._batch: TrainBatch | None = None

    def begin(
        self, purpose: Purpose, batch: TrainBatch, *, denominators: Denominators | None = None, record: bool = False
    ) -> None:
        """Start a pass over ``batch``.  denominators: counts of the global batch, for ``Purpose.train`` only."""
        assert (purpose is Purpose.train) == (denominators is not None), "only training divides by the global counts"
        self.state.reset()
        self.state.purpose, self.state.record, self._batch = purpose, record, batch
        if denominators is not None:
            self.state.tokens, self.state.sequences = denominators.tokens, denominators.sequences
        for router in self.routers:
            router.forget_recompute()

    def announce(self, microbatch: Microbatch) -> None:
        """Tell the routers which microbatch comes next."""
        rows_M = microbatch.router_rows_M
        self.state.microbatch = RoutedMicrobatch(
            index=microbatch.index,
            sequence_M=microbatch.sequence_N[rows_M],
            lengths=microbatch.lengths,
            replay_MLK=self._replay(microbatch.sources_N[rows_M]),
        )

    def _replay(self, sources_M: Tensor) -> Tensor | None:
        assert self._batch is not None
        routing_TLK = self._batch.routing_TLK
        if routing_TLK is None:
            return None
        chosen_MLK = routing_TLK[sources_M.clamp(min=0)][:, self.layers]
        # Padding chooses the first experts: any K different ones do, nothing reads the result.
        padding_K = torch.arange(self.top_k, dtype=chosen_MLK.dtype, device=chosen_MLK.device)
        return torch.where((sources_M == NOWHERE)[:, None, None], padding_K, chosen_MLK)

    def keep_batch_counts(self) -> None:
        """After a ``count`` pass: give the routers the counts of the whole global batch.  Collective over the world."""
        self.state.batch_counts_LE = self._over_world(self.state.counts_LE)[self.layers]

    def choices(self, microbatches: Sequence[Microbatch], num_tokens: int) -> Tensor:
        """The recorded choices, [T, L, K] int16 on the CPU, the same on every peer.  Collective over the replica."""
        choices_TLK = torch.zeros(num_tokens, self.num_layers, self.top_k, dtype=torch.int32, device=self.groups.device)
        for microbatch in microbatches:
            sources_M = microbatch.sources_N[microbatch.router_rows_M]
            is_real_M = sources_M != NOWHERE
            recorded_MLK = self.state.recorded_MLK[microbatch.index].int()
            choices_TLK[sources_M[is_real_M][:, None], self.layers] = recorded_MLK[is_real_M]
        for group in (self.groups.tp, self.groups.cp, self.groups.pp):
            dist.all_reduce(choices_TLK, group=group)
        return choices_TLK.to(torch.int16).cpu()

    def metrics(self, denominators: Denominators) -> dict[str, float]:
        """Router statistics of the last pass over the whole global batch.  Collective over the world.

        load_max, load_min: the busiest and the idlest expert of any layer, as multiples of a fair share.
        load_entropy: entropy of the experts' shares, mean over layers, 1 when all are equal.  aux_loss, z_loss: sums
        over layers.  Dense layers do not count.
        """
        counts_LE = self._over_world(self.state.counts_LE)[self.expert_layers]
        losses_L2 = self._over_world(torch.stack([self.state.aux_L, self.state.z_L], dim=1))
        share_LE = counts_LE / (denominators.tokens * self.top_k)
        num_experts = counts_LE.shape[1]
        entropy_L = torch.special.entr(share_LE).sum(1) / torch.tensor(float(num_experts)).log()
        numbers = {
            "router/load_max": share_LE.max() * num_experts,
            "router/load_min": share_LE.min() * num_experts,
            "router/load_entropy": entropy_L.mean(),
            "router/aux_loss": losses_L2[:, 0].sum(),
            "router/z_loss": losses_L2[:, 1].sum(),
        }
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))  # read once

    def _over_world(self, local: Tensor) -> Tensor:
        whole = torch.zeros(self.num_layers, *local.shape[1:], device=local.device)
        whole[self.layers] = local
        dist.all_reduce(whole)
        return whole
