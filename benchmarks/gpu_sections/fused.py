"""Norms and rotations of the local layers, forward and backward: one kernel each against what PyTorch and Megatron run.

Shapes are those of Llama 3.2 1B (2,048 wide; 32 query heads of 64) and, with norms of heads, of Qwen3 (128).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.gpu_sections.section import GB, Bench, Fact, Facts, guarded
from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.training.model import transformer_config
from mcore_rl.training.norm import RMSNorm
from mcore_rl.training.one_kernel import compiles
from mcore_rl.training.rotation import rotate
from tests.support import engines, models

ROWS = 8_192
EPSILON = 1e-5
LEAST_MOVES = 5  # of each element: forward reads and writes one, backward reads two and writes one
TOLERANCE = 2e-2  # bfloat16, relative: the kernels round as the operations do, and sum in another order
Function = Callable[[Tensor], Tensor]


def facts(bench: Bench) -> Facts:
    """Each function in bfloat16."""
    bench.rank.init_process_group(bench.platform)
    rows = 64 if bench.tiny else ROWS
    yield from guarded("norm, hidden states", of_norm(bench, "norm, hidden states", (rows, 1, 2_048)))
    yield from guarded("norm, heads", of_norm(bench, "norm, heads", (rows, 1, 16, 128)))
    yield from guarded("rotation", of_rotation(bench, (rows, 1, 32, 64)))


def local_layers() -> TransformerConfig:
    """Megatron's configuration of them; sizes do not matter here."""
    return transformer_config(models.dense(), ParallelConfig(), engines.config(), LayerSpec.local)


def of_norm(bench: Bench, what: str, shape: tuple[int, ...]) -> Facts:
    """The quotient's kernel and then the product's, and ours."""
    norm = RMSNorm(local_layers(), shape[-1], EPSILON).to(bench.device, torch.bfloat16)

    def plain(x: Tensor) -> Tensor:
        return norm.weight * F.rms_norm(x, (shape[-1],), eps=EPSILON)

    yield against(bench, what, shape, plain, norm, norm.weight)


def of_rotation(bench: Bench, shape: tuple[int, ...]) -> Facts:
    """Megatron's, which makes cosines and sines each time, and ours, which is given them."""
    config = local_layers()
    angles = torch.randn(shape[0], 1, 1, shape[-1] // 2, device=bench.device)
    cos, sin = (turn.to(torch.bfloat16) for turn in (angles.cos(), angles.sin()))
    both = angles.repeat(1, 1, 1, 2)
    group = torch.distributed.group.WORLD

    def plain(x: Tensor) -> Tensor:
        out: Tensor = apply_rotary_pos_emb(x, both, config, cp_group=group)
        return out

    yield against(bench, "rotation", shape, plain, lambda x: rotate(x, cos, sin))


def against(bench: Bench, what: str, shape: tuple[int, ...], plain: Function, ours: Function, *weights: Tensor) -> Fact:
    """Seconds of both, and how far outputs and gradients are apart."""
    x, grad = (torch.randn(shape, device=bench.device).to(torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def passes(function: Function) -> tuple[Tensor, Tensor]:
        out = function(x)
        return out.detach(), *torch.autograd.grad(out, (x, *weights), grad)

    slow, fast = (bench.seconds(lambda f=function: passes(f)) for function in (plain, ours))  # type: ignore[misc]
    pairs = zip(passes(ours), passes(plain), strict=True)
    error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)
    one = compiles(x)
    rate = LEAST_MOVES * x.nbytes / fast / GB
    beside = f"{slow / fast:.2f} times as fast as {1e3 * slow:.3g} ms; {rate:,.0f} GB/s of what must be moved"
    beside += f"; relative error {error:.1e}" + ("" if one else "; nothing is compiled here")
    is_right = error < TOLERANCE and (one or not bench.platform.is_accelerator)
    return Fact(what=f"{what} {shape}, forward and backward", value=1e3 * fast, unit="ms", beside=beside, ok=is_right)
