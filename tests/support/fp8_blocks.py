"""A model's checkpoint with its projections in fp8 blocks of 128 by 128, as DeepSeek and Qwen publish theirs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import checkpoints

IN_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
PROJECTION = re.compile(r"(_proj|\.w[123])\.weight$")


def write_in_fp8(directory: Path, scales: torch.dtype) -> dict[str, Tensor]:
    """Writes the checkpoint in ``directory`` anew, in fp8; gives the numbers they stand for, in float32."""
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in checkpoints.tensors(directory).items():
        if PROJECTION.search(key):
            blocks = [-(-size // 128) for size in tensor.shape]
            scale = (torch.rand(blocks) * 0.01 + 0.001).to(scales)
            spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: tensor.shape[0], : tensor.shape[1]]
            stored[key] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale
            plain[key] = stored[key].float() * spread
        else:
            stored[key] = tensor.bfloat16()
            plain[key] = stored[key].float()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    checkpoints.edit_config(directory, quantization_config=IN_BLOCKS)
    return plain
