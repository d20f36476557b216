"""The vision tower: transformers' own module, in the first model chunk, as ``chunk.vision``.

The module and its arithmetic are those of the published model.  It is built from a ``VisionConfig`` with random
numbers, which the tables' loading replaces, and is whole on every rank of the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mcore_rl.config.model import TowerKind, VisionConfig
from mcore_rl.ground.types import Picture

SEED = 1  # of the random numbers: tensor ranks hold copies, and must start from the same


def build_tower(vision: VisionConfig, out_hidden_size: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The tower with parameters of ``dtype``, on the CPU, or on ``device`` if that is meta.

    out_hidden_size: of the language model.  What is computed and not learned (frequencies) is float32.
    """
    with torch.device(init_device(device)), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        tower = _module(vision, out_hidden_size)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in tower.modules():
        if isinstance(module, nn.Embedding):  # as Megatron marks its own: no matrix of Muon's
            module.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    return tower


def init_device(device: torch.device) -> torch.device:
    """Where random numbers for ``device`` are made: the same ones for all devices."""
    return device if device.type == "meta" else torch.device("cpu")


def _module(vision: VisionConfig, out_hidden_size: int) -> nn.Module:
    sizes: dict[str, Any] = {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "num_heads": vision.num_heads,
        "intermediate_size": vision.ffn_hidden_size,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "out_hidden_size": out_hidden_size,
        "attn_implementation": "sdpa",
    }
    if vision.kind is TowerKind.qwen2_5_vl:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        windows: dict[str, Any] = {"window_size": vision.window_size, "fullatt_block_indexes": vision.full_blocks}
        return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**sizes, **windows))
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    learned: dict[str, Any] = {
        "num_position_embeddings": vision.num_positions,
        "deepstack_visual_indexes": vision.deepstack,
    }
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**sizes, **learned))


def block_numbers(tower: nn.Module) -> dict[str, int]:
    """The tower's own count of its blocks and of its features for further layers, by the modules' names."""
    return {
        f"{name}.{number}": number
        for name, modules in tower.named_children()
        if isinstance(modules, nn.ModuleList)
        for number in range(len(modules))
    }


def set_trained(tower: nn.Module, trained: bool, *, sums_over_tensor_ranks: bool) -> None:
    """Let ``tower`` learn, with its blocks recomputed in the backward pass, or freeze it.

    sums_over_tensor_ranks: each tensor rank has the gradient of its own pictures' features, as with sequence
    parallelism of its own rows; Megatron sums those of parameters with this mark (distributed/finalize_model_grads.py),
    for which it copies them all into one buffer: float32, as large as the tower, at the end of a step.
    """
    for parameter in tower.parameters():
        parameter.requires_grad_(trained)
        parameter.sequence_parallel = sums_over_tensor_ranks  # type: ignore[attr-defined]
    blocks: Any = tower.blocks
    for block in blocks if trained else ():
        # As gradient_checkpointing_enable sets them, which also warns of embeddings that a tower has not.
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def features_of(tower: nn.Module, vision: VisionConfig, pictures: Sequence[Picture], patches: Tensor) -> Tensor:
    """The features of ``pictures``, one behind another: [features, (1 + deepstack) * H], those for the embedding first.

    patches: uint8, of all pictures, on the device of ``tower``.
    """
    mean, std = (
        torch.tensor(numbers, dtype=torch.float32, device=patches.device).repeat_interleave(
            vision.temporal_patch_size * vision.patch_size**2
        )
        for numbers in (vision.pixel_mean, vision.pixel_std)
    )
    grids = tuple((1, image.height, image.width) for image in pictures)
    # Boundaries stay on the host: transformers' attention by SDPA reads them as numbers in every block.
    on_host = _host_inputs(grids, vision.merge_size, vision.window_size, vision.patch_size, isqrt(vision.num_positions))
    inputs = {name: tensor if name.startswith("cu_") else tensor.to(patches.device) for name, tensor in on_host.items()}
    out = tower((patches.float() / 255 - mean) / std, grid_thw=torch.tensor(grids), **inputs)
    return torch.cat([out.pooler_output, *(out.deepstack_features if vision.deepstack else ())], dim=-1)


@lru_cache(maxsize=64)
def _host_inputs(
    grids: tuple[tuple[int, int, int], ...], merge: int, window: int | None, patch: int, side: int
) -> dict[str, Tensor]:
    """What the tower would else make of the grids on the device, and wait for: positions, boundaries, windows."""
    from transformers import vision_utils

    grid_thw = torch.tensor(grids)
    made = {
        "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
    }
    if window is not None:
        order, boundaries = vision_utils.get_vision_window_index(grid_thw, merge, window, patch)
        made |= {"window_index": order, "cu_window_seqlens": boundaries}
    if side:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw, side, mode="bilinear", align_corners=True, spatial_merge_size=merge
        )
        made |= {"interp_indices": indices, "interp_weights": weights}
    return made
