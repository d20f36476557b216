"""Reading a checkpoint whose experts are in mxfp4, as OpenAI publishes gpt-oss (OCP Microscaling Formats, version 1.0).

In place of a stack ``NAME`` of matrices stand two tensors of bytes: ``NAME_blocks`` [experts, outputs, blocks, 16],
with two numbers of four bits in a byte, the first in its lower half, and ``NAME_scales`` [experts, outputs, blocks]:
the exponent of each block of 32 neighbouring inputs, plus 127.  A weight is its number times two to its exponent,
which bfloat16 holds exactly.  Reading gives ``NAME`` as [experts, inputs, outputs] in bfloat16, as transformers does
(``convert_moe_packed_tensors`` in integrations/mxfp4.py, 5.19), region by region.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorInfo, assert_part
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice

BLOCKS = "_blocks"
SCALES = "_scales"
BLOCK = 32  # inputs that share a scale
BIAS = 127
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Mxfp4Checkpoint(HfCheckpoint):
    """A checkpoint that dequantises on reading; blocks and scales are not among ``tensors``."""

    def __init__(self, files: HfCheckpoint) -> None:
        """Raises CheckpointError with every violation: blocks without scales or the other way round, of another shape.

        files: ``close`` closes them.
        """
        self.files = files
        problems = list[str]()
        made = dict[str, TensorInfo]()
        for name, info in files.tensors.items():
            for end, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
                if name.endswith(end) and name.removesuffix(end) + other not in files.tensors:
                    problems.append(f"tensor {name} stands without {name.removesuffix(end)}{other}")
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in files.tensors:
                plain = name.removesuffix(BLOCKS)
                problems += self._problems(info, files.tensors[plain + SCALES])
                shape = (info.shape[0], info.shape[2] * BLOCK, info.shape[1]) if len(info.shape) == 4 else info.shape
                made[plain] = TensorInfo(plain, torch.bfloat16, shape, info.file, info.begin, info.end)
        if problems:
            again = "Download the checkpoint again"
            raise CheckpointError(str(files.directory), [f"{problem}. {again}" for problem in problems])
        taken = {name + end for name in made for end in (BLOCKS, SCALES)}
        others = {name: info for name, info in files.tensors.items() if name not in taken}
        super().__init__(files.directory, others | made)
        self._made = made

    @staticmethod
    def _problems(blocks: TensorInfo, scales: TensorInfo) -> Iterator[str]:
        sound = len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and scales.shape == blocks.shape[:3]
        if not sound or {blocks.dtype, scales.dtype} != {torch.uint8}:
            actual = f"{blocks.dtype} {blocks.shape} with scales {scales.dtype} {scales.shape}"
            yield f"tensor {blocks.name}: expected bytes [experts, outputs, blocks, 16] and scales; found {actual}"

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """As ``HfCheckpoint.read_into``.  Memory: four times the bytes of the region."""
        if name not in self._made:
            self.files.read_into(name, region, out)
            return
        assert_part(name, self.tensors[name].shape, region, out)
        if 0 in region.shape:
            return
        (expert, first_in, first_out), (experts, inputs, outputs) = region
        first = first_in // BLOCK
        last = -(-(first_in + inputs) // BLOCK)
        scales = torch.empty(experts, outputs, last - first, dtype=torch.uint8)
        place = TensorSlice((expert, first_out, first), tuple(scales.shape))
        self.files.read_into(name + SCALES, place, scales)
        blocks = torch.empty(*scales.shape, BLOCK // 2, dtype=torch.uint8)
        place = TensorSlice((*place.start, 0), tuple(blocks.shape))
        self.files.read_into(name + BLOCKS, place, blocks)
        skipped = first_in - first * BLOCK
        out.copy_(dequantised(blocks, scales)[..., skipped : skipped + inputs].transpose(-1, -2))

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self.files.close()


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., blocks * 32] from bytes [..., blocks, 16] and [..., blocks]."""
    pairs = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(NUMBERS[pairs.int()], scales.int().unsqueeze(-1) - BIAS)
    return numbers.bfloat16().flatten(-2)
