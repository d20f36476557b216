"""Reading a checkpoint whose matrices are FP8 with one scale per block, as DeepSeek-V3 publishes its own.

Beside a matrix ``NAME`` of dtype F8_E4M3 stands ``NAME_scale_inv``, float32 or (Qwen3) bfloat16, one number per block
of ``block`` rows and columns (``quantization_config.weight_block_size`` in config.json, 128 by 128); blocks at the
edges may be cut off.  The weight is ``float32(NAME) * float32(scale)`` (``weight_dequant`` in DeepSeek-V3's
inference/kernel.py).  Tensors of other dtypes are read unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import SCALE_SUFFIX, HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorInfo, assert_part
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice

QUANTISED = torch.float8_e4m3fn
# Every FP8 number as float32.  Looking them up is five times as fast as torch 2.13's own conversion on a CPU.
FLOAT32_OF_BYTE = torch.arange(256, dtype=torch.uint8).view(QUANTISED).float()


class BlockFp8Checkpoint(HfCheckpoint):
    """A checkpoint that dequantises on reading; scales are not among ``tensors``.

    ``tensors`` and ``num_bytes`` describe the files: a quantised tensor has its stored dtype.
    """

    def __init__(self, checkpoint: HfCheckpoint, block: tuple[int, int]) -> None:
        """block: rows and columns of a block.

        Raises CheckpointError with every violation: an FP8 tensor that has no scales or is no matrix, scales without an
        FP8 tensor, scales of a dtype or shape that does not fit the blocks.
        """
        assert all(size > 0 for size in block), f"block={block} must be positive"
        everything = checkpoint.tensors
        self._scales = {name: info for name, info in everything.items() if name.endswith(SCALE_SUFFIX)}
        weights = {name: info for name, info in everything.items() if name not in self._scales}
        self._block = block
        problems = [problem for info in weights.values() for problem in self._weight_problems(info)]
        for name, info in self._scales.items():
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight not in weights or weights[weight].dtype != QUANTISED:
                actual = f"of dtype {weights[weight].dtype}" if weight in weights else "not there"
                expected = (
                    f"{info.file.name}: tensor {name} holds scales, but {weight} is {actual}; expected {QUANTISED}"
                )
                problems.append(f"{expected}. Download the checkpoint again")
        if problems:
            raise CheckpointError(str(checkpoint.directory), problems)
        super().__init__(checkpoint.directory, weights)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """As ``HfCheckpoint.read_into``; a quantised tensor is read as float32 and cast to the dtype of ``out``.

        Regions may begin and end inside blocks.  Memory: one row of blocks at a time.
        """
        info = self.tensors[name]
        if info.dtype != QUANTISED:
            super().read_into(name, region, out)
            return
        assert_part(name, info.shape, region, out)
        if 0 in region.shape:
            return
        (first, left), (num_rows, num_columns) = region
        height, width = self._block
        first_block = first // height
        num_block_rows = -(-(first + num_rows) // height) - first // height
        left_block = left // width
        num_block_columns = -(-(left + num_columns) // width) - left // width
        scales = torch.empty(num_block_rows, num_block_columns)
        scale_region = TensorSlice((first_block, left_block), tuple(scales.shape))
        self._read(self._scales[name + SCALE_SUFFIX], scale_region, scales)
        block_of_column = torch.arange(left, left + num_columns) // width - left_block

        staging = torch.empty(min(height, num_rows), num_columns, dtype=QUANTISED)
        for row_scales, begin in zip(scales, range(first_block * height, first + num_rows, height), strict=True):
            top = max(begin, first)
            bottom = min(begin + height, first + num_rows)
            stored = staging[: bottom - top]
            self._read(info, TensorSlice((top, left), tuple(stored.shape)), stored)
            out[top - first : bottom - first].copy_(_as_float32(stored).mul_(row_scales[block_of_column]))

    def read(self, name: str) -> Tensor:
        """All of tensor ``name`` as a new CPU tensor; float32 where it is quantised."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=torch.float32 if info.dtype == QUANTISED else info.dtype)
        self.read_into(name, TensorSlice.whole(info.shape), out)
        return out

    def _weight_problems(self, info: TensorInfo) -> list[str]:
        if info.dtype != QUANTISED:
            return []
        where = f"{info.file.name}: tensor {info.name}"
        again = "Download the checkpoint again"
        if len(info.shape) != 2:
            return [f"{where} is quantised and has shape {info.shape}; only matrices have blocks. {again}"]
        scale = self._scales.get(info.name + SCALE_SUFFIX)
        expected = tuple(-(-size // block) for size, block in zip(info.shape, self._block, strict=True))
        needed = (
            f"needs scales of dtype torch.float32 or torch.bfloat16 and shape {expected} for blocks of {self._block}"
        )
        if scale is None:
            return [f"{where} is {info.dtype} and {needed}; {info.name}{SCALE_SUFFIX} is not there. {again}"]
        if scale.shape != expected or scale.dtype not in (torch.float32, torch.bfloat16):
            return [
                f"{where} {needed}; found {scale.dtype} and {scale.shape}. {again}, or compare "
                "quantization_config.weight_block_size in config.json"
            ]
        return []


def _as_float32(stored: Tensor) -> Tensor:
    return torch.index_select(FLOAT32_OF_BYTE, 0, stored.view(torch.uint8).reshape(-1).int()).view(stored.shape)
