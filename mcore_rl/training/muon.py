"""Muon (kellerjordan.github.io/posts/muon): a matrix moves along its momentum, made orthogonal; all else by AdamW.

Embeddings, output projections, and what has one row or column are no matrices here.  A matrix is a tensor of Megatron's
as one process would have it: queries, keys and values of a layer are one, and so are gate and up.  Steps have the size
of AdamW's (arXiv:2502.16982, eq. 4), so that learning rate and weight decay mean the same for both.

Megatron's own needs the package emerging-optimizers, and no version of it shards every tensor as the distributed
optimizer does.  Here the momentum is the first moment that AdamW keeps of every tensor: checkpoints, offload and other
layouts know it.  AdamW steps with rate 0 over matrices afterwards, which brings that moment up to date; the second
moment, 4 bytes a parameter, is kept for nothing.

Invariant: the whole matrix is made orthogonal, gathered over data and tensor ranks, so that no result depends on the
layout.  Each rank that holds a part of it computes the whole, in float32; the other data ranks wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, ParamKey
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, by which singular values go to about 1 in NUM_STEPS
NUM_STEPS = 5
STEP_RMS = 0.2  # of an element of a step; arXiv:2502.16982, section 2.2: AdamW's lie between 0.2 and 0.4
TINY = 1e-30  # beside the norm of a gradient that is 0: an expert's that no token took
MARK = "is_matrix"  # the key of a parameter group


def orthogonal(matrix_MN: Tensor) -> Tensor:
    """The matrix with its singular vectors, and singular values between about 0.7 and 1.2.  float32."""
    a, b, c = COEFFICIENTS
    wide = matrix_MN.size(0) <= matrix_MN.size(1)
    x_MN = matrix_MN if wide else matrix_MN.T
    x_MN = x_MN / (x_MN.norm() + TINY)
    for _ in range(NUM_STEPS):
        gram_MM = x_MN @ x_MN.T
        x_MN = a * x_MN + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MN
    return x_MN if wide else x_MN.T


@dataclass(frozen=True, kw_only=True, eq=False)
class CutMatrix:
    """One matrix, of which this rank has a part.

    parameter: the part.  dim: that tensor ranks cut; None: each has the whole.  group: these ranks.
    """

    parameter: Tensor
    dim: int | None
    group: dist.ProcessGroup

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> CutMatrix | None:
        """The matrix of a parameter of Megatron's; None if it is no matrix."""
        if parameter.dim() != 2 or hasattr(parameter, "is_embedding_or_output_parameter"):
            return None
        is_expert = ".experts." in name
        group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
        marked: Any = parameter  # by Megatron
        is_cut = hasattr(marked, "tensor_model_parallel") and marked.tensor_model_parallel and group.size() > 1
        made = cls(parameter=parameter, dim=marked.partition_dim if is_cut else None, group=group)
        return made if min(made.shape) > 1 else None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        rows, columns = self.parameter.shape
        return (
            rows * (self.group.size() if self.dim == 0 else 1),
            columns * (self.group.size() if self.dim == 1 else 1),
        )

    def gather(self, part: Tensor) -> Tensor:
        """The whole of which this rank has ``part``.  Collective."""
        if self.dim is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, self.dim)

    def slice(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return whole if self.dim is None else whole.chunk(self.group.size(), self.dim)[self.group.rank()]


class Muon:
    """Moves matrices ahead of AdamW's step.

    chunks: the model.  parts: Megatron's optimizers, made with ``marked_groups``; they hold main weights and moments.
    """

    def __init__(self, chunks: Iterable[DistributedDataParallel], parts: Iterable[DistributedOptimizer]) -> None:
        named = [each for chunk in chunks for each in chunk.named_parameters() if each[1].requires_grad]
        matrices = [matrix for matrix in (CutMatrix.of(*each) for each in named) if matrix is not None]
        self._parts = [
            (part, [each for each in matrices if _of_experts(each.parameter) == _holds_experts(part)])
            for part in parts
            if not part.is_stub_optimizer  # of a rank that has no tensors of its kind
        ]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, momentum: float) -> None:
        """Moves the main weights by gradients that AdamW has not seen yet.  Collective over the world."""
        for part, matrices in self._parts:
            for matrix in matrices:
                _move(part, matrix, lr, weight_decay, momentum)


def marked_groups() -> dict[ParamKey, dict[str, bool]]:
    """Tells Megatron to put matrices into parameter groups of their own, which have ``MARK``."""
    predicate = ParamWithNamePredicate(name=MARK, fn=lambda parameter, name: CutMatrix.of(name, parameter) is not None)
    return {ParamKey(with_name_predicate=predicate): {MARK: True}}


def _move(part: DistributedOptimizer, matrix: CutMatrix, lr: float, weight_decay: float, momentum: float) -> None:
    parameter = matrix.parameter
    direction = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    place = part.model_param_group_index_map.get(parameter)  # None: other data ranks hold all of it
    if place is not None:
        main = part.optimizer.param_groups[place[0]]["params"][place[1]]
        held = part._get_model_param_range_map(parameter)["param"]
        direction[held.start : held.end] = _nesterov(main.grad, part.optimizer.state[main].get("exp_avg"), momentum)
    dist.all_reduce(direction, group=part.data_parallel_group)  # exact: each element is of one rank
    whole_MN = matrix.gather(direction.view_as(parameter))
    size = STEP_RMS * math.sqrt(max(whole_MN.shape))
    if place is not None:
        own = matrix.slice(orthogonal(whole_MN)).reshape(-1)[held.start : held.end]
        main.mul_(1 - lr * weight_decay).add_(own, alpha=-lr * size)


def _nesterov(gradient: Tensor, first_moment: Tensor | None, momentum: float) -> Tensor:
    """The direction of a step: between the gradient and its mean, which AdamW will have after this step."""
    before = torch.zeros_like(gradient) if first_moment is None else first_moment
    return before.lerp(gradient, 1 - momentum).lerp(gradient, 1 - momentum)


def _holds_experts(part: DistributedOptimizer) -> bool:
    return any(group["is_expert_parallel"] for group in part.param_groups)


def _of_experts(parameter: Tensor) -> bool:
    """Whether gradients are summed over expert-data ranks, as Megatron marks it."""
    return hasattr(parameter, "allreduce") and not parameter.allreduce
