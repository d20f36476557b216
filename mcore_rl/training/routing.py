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
from mcore_rl.ground.types import Denominators, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.microbatch import NOWHERE, Microbatch
from mcore_rl.training.router import Purpose, RoutedMicrobatch, RouterState, routers_of


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
        self.groups = groups
        self.num_layers = num_layers
        self.top_k = moe.top_k
        self.choice_dtype = torch.uint8 if moe.choice_bytes == 1 else torch.int16
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
            choice_dtype=self.choice_dtype,
        )
        for layer, router in enumerate(self.routers):
            router.connect(self.state, layer)
        self._routing_TLK: Tensor | None = None
        self._unrouted_T: Tensor | None = None

    def begin(
        self,
        purpose: Purpose,
        batch: TrainBatch,
        *,
        denominators: Denominators | None = None,
        record: bool = False,
        replay: bool = True,
    ) -> None:
        """Start a pass over ``batch``.

        denominators: counts of the global batch, for ``Purpose.train`` only.  record: keep the choices.  replay: those
        that ``batch`` has.
        """
        assert (purpose is Purpose.train) == (denominators is not None), "only training divides by the global counts"
        self.state.reset()
        self.state.purpose = purpose
        self.state.record = record
        self._routing_TLK, self._unrouted_T = (batch.routing_TLK, batch.unrouted_T) if replay else (None, None)
        if denominators is not None:
            self.state.tokens = denominators.tokens
            self.state.sequences = denominators.sequences
        for router in self.routers:
            router.forget_recompute()

    def announce(self, microbatch: Microbatch) -> None:
        """Tell the routers which microbatch comes next."""
        rows_M = microbatch.router_rows_M
        replay_MLK, free_M = self._replay(microbatch.sources_N[rows_M])
        shared = microbatch.shared
        self.state.microbatch = RoutedMicrobatch(
            index=microbatch.index,
            sequence_M=(microbatch.sequence_N if shared is None else shared.run_N)[rows_M],
            lengths=microbatch.lengths,
            replay_MLK=replay_MLK,
            free_M=free_M,
            counts_M=None if shared is None else shared.counts_N[rows_M],
            parts_SR=None if shared is None else shared.parts_SR,
        )

    def _replay(self, sources_M: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(choices for the rows that read these tokens, rows that choose freely); None where the batch has no choices.

        Padding chooses freely, as in a pass that records: a replay has that pass's rows for each expert, and its bits.
        """
        if self._routing_TLK is None:
            return None, None
        places_M = sources_M.clamp(min=0)
        free_M = sources_M == NOWHERE
        if self._unrouted_T is not None:
            free_M = free_M | self._unrouted_T[places_M]
        return self._routing_TLK[places_M][:, self.layers], free_M

    def keep_batch_counts(self) -> None:
        """After a ``count`` pass: give the routers the counts of the whole global batch.  Collective over the world."""
        self.state.batch_counts_LE = self._over_world(self.state.counts_LE)[self.layers]

    def choices(self, microbatches: Sequence[Microbatch], num_tokens: int) -> Tensor:
        """The recorded choices, [T, L, K] on the CPU, the same on every peer.  Collective over the replica."""
        # Peers add: of each choice all but one have 0.  NCCL adds bytes and int32, but not int16.
        dtype = torch.uint8 if self.choice_dtype is torch.uint8 else torch.int32
        choices_TLK = torch.zeros(num_tokens, self.num_layers, self.top_k, dtype=dtype, device=self.groups.device)
        for microbatch in microbatches:
            sources_M = microbatch.sources_N[microbatch.router_rows_M]
            is_real_M = sources_M != NOWHERE
            recorded_MLK = self.state.recorded_MLK[microbatch.index].to(dtype)
            choices_TLK[sources_M[is_real_M][:, None], self.layers] = recorded_MLK[is_real_M]
        for group in (self.groups.tp, self.groups.cp, self.groups.pp):
            dist.all_reduce(choices_TLK, group=group)
        for shared in (microbatch.shared for microbatch in microbatches):
            if shared is not None:
                choices_TLK[shared.to_C] = choices_TLK[shared.from_C]
        return choices_TLK.to(self.choice_dtype).cpu()

    def metrics(self, denominators: Denominators) -> dict[str, float]:
        """Router statistics of the last pass over the whole global batch.  Collective over the world.

        A token of a shared prompt counts once for each sequence that begins with it.

        load_max, load_min: the busiest and the idlest expert of any layer, as multiples of a fair share.
        load_entropy: entropy of the experts' shares, mean over layers, 1 when all are equal.  aux_loss, z_loss: sums
        over layers.  difference: of the replayed choices, the share that the router would not have made; only where the
        pass replays.  Dense layers do not count.
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
        if self._routing_TLK is not None:
            num_replayed, num_differing = self._over_world(self.state.replayed_L2).sum(0)
            numbers["router/difference"] = num_differing / num_replayed.clamp(min=1)
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))  # read once

    def _over_world(self, local: Tensor) -> Tensor:
        whole = torch.zeros(self.num_layers, *local.shape[1:], device=local.device)
        whole[self.layers] = local
        dist.all_reduce(whole)
        return whole
