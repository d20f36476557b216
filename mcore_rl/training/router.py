"""The router of a mixture-of-experts layer: Megatron's, with losses, statistics and replay that hold in any layout.

It chooses experts as transformers does (qwen2_moe, mixtral, deepseek_v3), not as Megatron does: Megatron ranks a group
of experts by the sum of its best ``top_k // top_k_groups`` (transformer/moe/moe_utils.py:554), where DeepSeek-V3 takes
the best two and DeepSeek-V2 the best, and it always renormalises sigmoids.

Megatron computes auxiliary losses over one microbatch of one rank, so their gradients depend on the microbatch size, DP
and CP.  Here every loss is a sum over this rank's tokens divided by counts of the whole global batch, which are known
before the first forward (``RouterState``).  Deliberately absent: token dropping, capacity factors, Sinkhorn, jitter.

A router must know which microbatch it sees, also when the backward pass recomputes it.  ``RouterState.microbatch``
is set before every forward; a forward that will be recomputed queues it, and the recomputation takes it from the
queue: a pipeline schedule runs the backward passes of a model chunk in the order of its forward passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.config.engine import AuxLoss, MoeTrainConfig

TINY = 1e-20  # keeps a sum of scores that all vanish from dividing by 0; transformers' and Megatron's


class Purpose(Enum):
    """The purpose of the current forward passes: ``train`` attaches losses, ``count`` fills batch counts."""

    score = "score"
    count = "count"
    train = "train"


@dataclass(frozen=True, kw_only=True)
class RoutedMicrobatch:
    """A microbatch as routers see it.  M: the rows of this rank's routers.

    sequence_M: index in the microbatch of a row's sequence, -1 for padding.  lengths: tokens of each sequence.
    replay_MLK: expert choices to repeat, for this rank's layers with experts; None to choose freely.
    free_M: bool, rows that choose freely in spite of it: padding, and tokens without a recorded choice.
    counts_M, parts_SR: where rows are shared, as in ``SharedRows``; ``sequence_M`` is then of runs.
    """

    index: int
    sequence_M: Tensor
    lengths: tuple[int, ...]
    replay_MLK: Tensor | None = None
    free_M: Tensor | None = None
    counts_M: Tensor | None = None
    parts_SR: Tensor | None = None

    @property
    def weight_M(self) -> Tensor:
        """How many sequences a row is of; bool where that is 1 or, for padding, 0."""
        return self.sequence_M >= 0 if self.counts_M is None else self.counts_M


@dataclass(kw_only=True)
class RouterState:
    """The state that the routers of one engine share.  L: layers with experts on this rank, in forward order.

    terms: coefficients.  split: the ranks over which a sequence's tokens are split at the router.  tokens, sequences:
    counts of the whole global batch.  batch_counts_LE: (token, choice) pairs of each expert in the whole global batch;
    only for ``AuxLoss.batch``.
    counts_LE, aux_L, z_L: sums over this rank's real tokens since ``reset``; aux and z include their coefficients.
    replayed_L2: replayed choices, and those of them that the router would not have made; sums as above.
    recorded_MLK: the choices of each microbatch by its index, while ``record`` is set, in ``choice_dtype``.
    """

    terms: MoeTrainConfig
    num_layers: int
    num_experts: int
    top_k: int
    split: dist.ProcessGroup
    device: torch.device
    choice_dtype: torch.dtype
    purpose: Purpose = Purpose.score
    tokens: int = 1
    sequences: int = 1
    record: bool = False
    microbatch: RoutedMicrobatch | None = None
    batch_counts_LE: Tensor | None = None
    counts_LE: Tensor = field(init=False)
    aux_L: Tensor = field(init=False)
    z_L: Tensor = field(init=False)
    replayed_L2: Tensor = field(init=False)
    recorded_MLK: dict[int, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the sums and records of earlier passes."""
        self.counts_LE = torch.zeros(self.num_layers, self.num_experts, device=self.device)
        self.aux_L = torch.zeros(self.num_layers, device=self.device)
        self.z_L = torch.zeros(self.num_layers, device=self.device)
        self.replayed_L2 = torch.zeros(self.num_layers, 2, device=self.device)
        self.recorded_MLK = {}

    def record_choices(self, layer: int, microbatch: RoutedMicrobatch, choices_MK: Tensor) -> None:
        """Keep one layer's choices of one microbatch."""
        if microbatch.index not in self.recorded_MLK:
            shape = (choices_MK.shape[0], self.num_layers, self.top_k)
            self.recorded_MLK[microbatch.index] = torch.zeros(shape, dtype=self.choice_dtype, device=self.device)
        self.recorded_MLK[microbatch.index][:, layer] = choices_MK.to(self.choice_dtype)

    def count_replayed(self, layer: int, weight_M: Tensor, replayed_MK: Tensor, own_MK: Tensor) -> None:
        """Add one layer's replayed choices, and how many of them are not among the router's own.

        weight_M: how often a row counts.  own_MK: what the router would have chosen.
        """
        is_own_MK = (replayed_MK[:, :, None] == own_MK[:, None, :]).any(-1)
        differing = (~is_own_MK * weight_M[:, None]).sum()
        self.replayed_L2[layer] += torch.stack([weight_M.sum() * self.top_k, differing])


class Router(TopKRouter):
    """Top-k router; before the first forward, ``connect`` gives it the engine's ``RouterState`` and its layer there.

    expert_bias: Megatron's buffer, float32 [E], or None.  It influences the choice of experts and not their weights,
    comes from the checkpoint and goes back to it, and stays fixed in training.
    """

    state: RouterState
    layer: int

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        assert not is_mtp_layer, "no layer that predicts further tokens is built"
        super().__init__(config=config, pg_collection=pg_collection)
        self._awaiting_recompute: deque[RoutedMicrobatch] = deque()

    def connect(self, state: RouterState, layer: int) -> None:
        """Join ``state`` as its layer number ``layer``."""
        self.state = state
        self.layer = layer

    def forget_recompute(self) -> None:
        """Drop what a failed step left in the queue."""
        self._awaiting_recompute.clear()

    def gating(self, input: Tensor) -> Tensor:
        """Router logits [s / tp, b, E]."""
        # Sigmoids in float32, all else in the dtype of the weights, as transformers does; Megatron's own function is a
        # NameError without Transformer Engine (transformer/moe/moe_utils.py:1192, 0.16.1), which 0.19.2 has mended.
        if self.config.moe_router_dtype == "fp32":
            assert self.bias is None, "no router of sigmoids or of latent attention has a bias of its logits"
            return torch.nn.functional.linear(input.float(), self.weight.float())
        return torch.nn.functional.linear(input, self.weight, self.bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts.  logits: [s / tp, b, E].  Returns (probabilities [M, E], routing map [M, E] bool)."""
        recomputing = torch._C._current_graph_task_id() != -1  # autograd is running: this forward is a recomputation
        microbatch = self._current_microbatch(recomputing)
        logits_ME = logits.view(-1, self.config.num_moe_experts)
        attach = self.state.purpose is Purpose.train and torch.is_grad_enabled()

        scores_ME = self._scores(logits_ME)
        choices_MK = own_MK = self._own_choices(scores_ME.detach())
        if microbatch.replay_MLK is not None:
            assert microbatch.free_M is not None, "who replays also says which rows choose freely"
            choices_MK = torch.where(microbatch.free_M[:, None], own_MK, microbatch.replay_MLK[:, self.layer].long())
        weights_MK = self._weights(scores_ME, choices_MK)
        probs_ME = torch.zeros_like(logits_ME).scatter(1, choices_MK, weights_MK.to(logits_ME.dtype))
        map_ME = torch.zeros_like(logits_ME, dtype=torch.bool).scatter(1, choices_MK, True)
        if not recomputing:
            self.state.counts_LE[self.layer] += (map_ME * microbatch.weight_M[:, None]).sum(0)
            if self.state.record:
                self.state.record_choices(self.layer, microbatch, choices_MK)
            if microbatch.free_M is not None:
                self.state.count_replayed(self.layer, ~microbatch.free_M * microbatch.weight_M, choices_MK, own_MK)
        if attach:
            logits_ME = logits_ME.float()
            probs_ME = self._attach_aux_loss(probs_ME, logits_ME, map_ME, microbatch)
            probs_ME = self._attach_z_loss(probs_ME, logits_ME, microbatch.weight_M)
        return probs_ME, map_ME

    def _current_microbatch(self, recomputing: bool) -> RoutedMicrobatch:
        if recomputing:
            return self._awaiting_recompute.popleft()
        assert self.state.microbatch is not None, "no microbatch was announced to the routers"
        if self.state.purpose is Purpose.train and not torch.is_grad_enabled():
            self._awaiting_recompute.append(self.state.microbatch)
        return self.state.microbatch

    def _scores(self, logits_ME: Tensor) -> Tensor:
        """The score of each expert, float32: a sigmoid each, or a softmax over all."""
        logits_ME = logits_ME.float()
        return torch.sigmoid(logits_ME) if self.score_function == "sigmoid" else torch.softmax(logits_ME, dim=-1)

    def _own_choices(self, ranked_ME: Tensor) -> Tensor:
        """The K best experts of each row by score, [M, K] int64, best first."""
        config = self.config
        if self.expert_bias is not None:
            ranked_ME = ranked_ME + self.expert_bias
        if config.moe_router_group_topk is not None:
            ranked_ME = within_best_groups(
                ranked_ME,
                config.moe_router_num_groups,
                config.moe_router_group_topk,
                num_best=1 if self.expert_bias is None else 2,
            )
        return ranked_ME.topk(self.topk).indices

    def _weights(self, scores_ME: Tensor, choices_MK: Tensor) -> Tensor:
        """The weights of the chosen experts, [M, K] float32, from the current scores: replayed ones have gradients."""
        weights_MK = scores_ME.gather(1, choices_MK)
        if not self.config.moe_router_pre_softmax:
            weights_MK = weights_MK / (weights_MK.sum(dim=-1, keepdim=True) + TINY)
        return weights_MK * self.config.moe_router_topk_scaling_factor

    def _attach_aux_loss(
        self, probs_ME: Tensor, logits_ME: Tensor, map_ME: Tensor, microbatch: RoutedMicrobatch
    ) -> Tensor:
        """Load balance: ``coeff * E/K * sum_e f_e P_e``; f: share of choices, P: mean router probability.

        Sigmoids s_e are made probabilities by ``s_e / (sum_e s_e + 1e-20)``, as Megatron (moe_utils.py:784) and
        DeepSeek (arXiv:2412.19437, eq. 19) do.
        f has no gradient, so this rank's share of the loss is linear in its own tokens' probabilities.
        """
        state = self.state
        if state.terms.aux_loss is AuxLoss.none:
            return probs_ME
        scores_ME = self._scores(logits_ME)
        if self.score_function == "sigmoid":
            scores_ME = scores_ME / (scores_ME.sum(dim=-1, keepdim=True) + TINY)
        scale = state.terms.aux_loss_coeff * state.num_experts / state.top_k
        if state.terms.aux_loss is AuxLoss.batch:
            assert state.batch_counts_LE is not None, "the batch-wide loss needs a counting pass first"
            weights_E = state.batch_counts_LE[self.layer] / state.tokens
            loss = scale * ((scores_ME * microbatch.weight_M[:, None]) @ weights_E).sum() / state.tokens
        else:
            num_sequences = max(len(microbatch.lengths), 1)
            member_M = microbatch.sequence_M.clamp(min=0)
            is_real_M1 = (microbatch.sequence_M >= 0)[:, None]
            parts_SR = microbatch.parts_SR
            num_runs = num_sequences if parts_SR is None else parts_SR.shape[1]
            counts_SE = torch.zeros(num_runs, state.num_experts, device=probs_ME.device)
            counts_SE.index_add_(0, member_M, (map_ME & is_real_M1).float())
            dist.all_reduce(counts_SE, group=state.split)
            if parts_SR is not None:
                counts_SE = parts_SR @ counts_SE
            lengths_S1 = torch.tensor(microbatch.lengths or (1,), device=probs_ME.device)[:, None]
            weights_SE = counts_SE / lengths_S1**2
            if parts_SR is not None:  # a row of a trunk is in the loss of each of its sequences
                weights_SE = parts_SR.T @ weights_SE
            loss = scale * (scores_ME * is_real_M1 * weights_SE[member_M]).sum() / state.sequences
        self.state.aux_L[self.layer] += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs_ME, loss)

    def _attach_z_loss(self, probs_ME: Tensor, logits_ME: Tensor, weight_M: Tensor) -> Tensor:
        """Router z-loss, the mean over tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv:2202.08906, eq. 5)."""
        coeff = self.state.terms.z_loss_coeff
        if coeff == 0:
            return probs_ME
        loss = coeff * (torch.logsumexp(logits_ME, dim=-1).square() * weight_M).sum() / self.state.tokens
        self.state.z_L[self.layer] += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs_ME, loss)


def within_best_groups(ranked_ME: Tensor, num_groups: int, num_kept: int, *, num_best: int) -> Tensor:
    """``ranked_ME`` with -inf outside of each token's ``num_kept`` best groups of neighbouring experts.

    The score of a group is the sum of its ``num_best`` best: two of biased scores (arXiv:2412.19437, section 2.1.2),
    else one (arXiv:2405.04434, section 2.2.2); vLLM decides so too (fused_moe's ``grouped_topk``).
    """
    grouped_MGE = ranked_ME.unflatten(1, (num_groups, -1))
    kept_MK = grouped_MGE.topk(num_best).values.sum(-1).topk(num_kept).indices
    is_out_MG = torch.ones_like(grouped_MGE[..., 0], dtype=torch.bool).scatter(1, kept_MK, False)
    return grouped_MGE.masked_fill(is_out_MG[..., None], float("-inf")).flatten(1)


def routers_of(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """The routers of a rank's model chunks in the order of the forward pass."""
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    return sorted(routers, key=lambda router: router.layer_number)
