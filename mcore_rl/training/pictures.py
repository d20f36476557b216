"""Features of pictures in the hidden states of a model: in the place of embeddings, and behind the first layers.

The tower stands in the first chunk.  The pictures of a microbatch are spread over the tensor and context ranks of the
first stage, which all need the features: each encodes its part, and the parts are gathered once.  So these ranks make
the tower faster instead of repeating it.

Invariant: which rank encodes a picture, and what is packed beside it, changes no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig, VisionConfig
from mcore_rl.ground.types import Picture
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.microbatch import Microbatch
from mcore_rl.training.sequences import Deepstack, PackedSequences
from mcore_rl.training.vision import features_of


def see_pictures(chunks: Sequence[GPTModel], model: ModelConfig, groups: ProcessGroups) -> PictureFeatures | None:
    """What puts features into the hidden states of ``chunks``; None: the model, or this rank's stage, has no tower."""
    first = chunks[0]
    if model.vision is None or not hasattr(first, "vision"):
        return None
    features = PictureFeatures(first.vision, model.vision, model.hidden_size, groups.device)
    first.embedding.register_forward_hook(features.into_embeddings)
    for layer in first.decoder.layers[: len(model.vision.deepstack)]:
        layer.register_forward_hook(features.behind_layer, with_kwargs=True)
    return features


def share_out(pictures: Sequence[Picture], num_ranks: int) -> list[list[Picture]]:
    """Which rank encodes which of ``pictures``: the largest first, each to the rank with the fewest patches so far."""
    shares: list[list[Picture]] = [[] for _ in range(num_ranks)]
    patches = [0] * num_ranks
    for picture in sorted(pictures, key=lambda each: (-each.num_patches, each.key)):
        rank = patches.index(min(patches))
        shares[rank].append(picture)
        patches[rank] += picture.num_patches
    return shares


class PictureFeatures:
    """The hooks of the first chunk, for the microbatch that was announced last."""

    def __init__(self, tower: nn.Module, vision: VisionConfig, hidden_size: int, device: torch.device) -> None:
        self.tower = tower
        self.vision = vision
        self.hidden_size = hidden_size
        self.device = device
        self.group = mpu.get_tensor_and_context_parallel_group()
        self._microbatch: Microbatch | None = None

    def announce(self, microbatch: Microbatch) -> None:
        """The next forward pass is of ``microbatch``."""
        if not torch.is_grad_enabled():  # else its layers may be computed once more
            self.forget()
        self._microbatch = microbatch

    def forget(self) -> None:
        """Lets go of the microbatch that was announced last, and of its features."""
        if self._microbatch is not None and self._microbatch.packed is not None:
            self._microbatch.packed.deepstack = None
        self._microbatch = None

    def into_embeddings(self, module: nn.Module, arguments: object, hidden: Tensor) -> Tensor:
        """See ``torch.nn.Module.register_forward_hook``.  hidden: [rows of this tensor rank, 1, H]."""
        microbatch = self._microbatch
        assert microbatch is not None, "a forward pass of a microbatch that was not announced"
        packed = microbatch.packed
        if packed is not None:
            packed.deepstack = None
        if not microbatch.pictures:
            return self._touched(hidden)
        assert packed is not None and microbatch.feature_N is not None, "pictures are packed"
        features = self._features(microbatch).to(hidden.dtype)
        feature_M = microbatch.feature_N[microbatch.router_rows_M]
        has_M = feature_M >= 0
        index_M = feature_M.clamp(min=0)
        own, *others = features.split(self.hidden_size, dim=-1)
        hidden = torch.where(has_M[:, None, None], own[index_M][:, None], hidden)
        if others:
            leaves = tuple(each.detach().requires_grad_(each.requires_grad) for each in others)
            packed.deepstack = Deepstack(leaves, index_M, has_M)
            if hidden.requires_grad or features.requires_grad:
                hidden = _Return.apply(hidden, packed, *others)  # type: ignore[no-untyped-call]
        return hidden

    def behind_layer(
        self, layer: Any, arguments: object, options: dict[str, Any], out: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """See ``torch.nn.Module.register_forward_hook``; runs once more where a layer is recomputed."""
        packed: PackedSequences | None = options["packed_seq_params"]
        deepstack = None if packed is None else packed.deepstack
        if deepstack is None:
            return out
        hidden, context = out
        features = deepstack.features[layer.layer_number - 1][deepstack.index_M]
        return hidden + features.masked_fill(~deepstack.has_M[:, None], 0)[:, None], context

    def _touched(self, hidden: Tensor) -> Tensor:
        """Add 0 times each tower parameter, so that every microbatch gives each a gradient.

        Megatron reduces a bucket of gradients when all its parameters have one, in every microbatch.
        """
        zero = self._zero()
        return hidden if zero is None else hidden + zero.to(hidden.dtype)

    def _zero(self) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        trained = [parameter for parameter in self.tower.parameters() if parameter.requires_grad]
        return sum(parameter.view(-1)[0] * 0 for parameter in trained) if trained else None  # type: ignore[return-value]

    def _features(self, microbatch: Microbatch) -> Tensor:
        """Of all pictures of ``microbatch``, in its order: [features, (1 + deepstack) * H]."""
        ranks = self.group.size()
        shares = share_out(microbatch.pictures, ranks) if ranks > 1 else [list(microbatch.pictures)]
        zero = self._zero()
        with torch.set_grad_enabled(zero is not None):
            features = self._encoded(shares[self.group.rank()], microbatch)
        if zero is not None:
            features = features + zero.to(features.dtype)
        if ranks == 1:
            return features
        most = max(sum(each.tokens for each in share) for share in shares)
        begins = dict[str, int]()
        for rank, share in enumerate(shares):
            begin = rank * most
            for picture in share:
                begins[picture.key] = begin
                begin += picture.tokens
        rows = torch.cat([torch.arange(each.tokens) + begins[each.key] for each in microbatch.pictures])
        gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            features, rows.to(self.device), most, self.group
        )
        return gathered

    def _encoded(self, pictures: Sequence[Picture], microbatch: Microbatch) -> Tensor:
        width = (1 + len(self.vision.deepstack)) * self.hidden_size
        if not pictures:
            return torch.zeros(0, width, dtype=next(self.tower.parameters()).dtype, device=self.device)
        patches = torch.from_numpy(np.concatenate([microbatch.patches[each.key] for each in pictures]))
        return features_of(self.tower, self.vision, pictures, patches.to(self.device))


class _Gather(torch.autograd.Function):
    """Rows of all ranks of ``group``, of which each pads its own to ``most``, in the order ``rows``.

    Backward sums over the ranks, each of which has a gradient of all rows, and keeps its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.group = group
        ctx.most = most
        ctx.num_rows = x.shape[0]
        padded = x.new_zeros(most, x.shape[1])
        padded[: x.shape[0]] = x
        joined = x.new_empty(group.size() * most, x.shape[1])
        dist.all_gather_into_tensor(joined, padded, group=group)
        return joined.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        joined = grad.new_zeros(ctx.group.size() * ctx.most, grad.shape[1])
        joined[rows] = grad
        own = grad.new_empty(ctx.most, grad.shape[1])
        dist.reduce_scatter_tensor(own, joined, group=ctx.group)
        return own[: ctx.num_rows], None, None, None


class _Return(torch.autograd.Function):
    """Passes ``hidden`` on; the gradients of ``features`` are what later layers left in the leaves of ``packed``.

    Backward lets go of these: all layers that read them are done.  A feature that a layer caught in a closure would be
    differentiated within each recomputed layer.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: PackedSequences, *features: Tensor) -> Tensor:
        ctx.packed = packed
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        leaves = ctx.packed.deepstack.features
        ctx.packed.deepstack = None
        returned = [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) if leaf.requires_grad else None
            for leaf in leaves
        ]
        return grad, None, *returned
