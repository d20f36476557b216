"""Opens the weights of a model as they were published: plain, or in fp8 blocks or mxfp4, which reading dequantises.

config.json says what the files hold; ``families.registry`` refuses what it says of any other quantisation.  Here the
files themselves are held against it, because some tools quantise and do not say so there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from mcore_rl.checkpoints.block_fp8 import BlockFp8Checkpoint
from mcore_rl.checkpoints.hf_directory import SCALE_SUFFIX, HfCheckpoint
from mcore_rl.checkpoints.mxfp4 import BLOCKS, SCALES, Mxfp4Checkpoint
from mcore_rl.checkpoints.rest import open_files
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import UNQUANTISED, model_of
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.json_text import read_json

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
PROCESSOR = "preprocessor_config.json"
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt says how it quantised, beside config.json or in its place
# The ends of tensors' names -> who writes them.
_WRITERS = {
    (".qweight", ".qzeros", ".g_idx"): "GPTQ or AWQ",
    (".weight_packed", ".weight_shape", ".weight_zero_point"): "compressed-tensors",
    (".absmax", ".quant_map", ".SCB"): "bitsandbytes",
    (".weight_scale", ".weight_scale_2", ".input_scale"): "ModelOpt or compressed-tensors",
}


def open_weights(directory: Path, *, pictures: bool = False) -> HfCheckpoint:
    """The weights of the Hugging Face model in ``directory``, to be read as plain numbers.

    Of a multimodal checkpoint those of its text part, by the names of the text model; with ``pictures`` of the whole.

    Raises CheckpointError as ``read_config``, ``HfCheckpoint.open`` and the two readers do, and in one line where files
    are quantised in a way that config.json does not say or that is not read.
    """
    if not directory.is_dir():
        HfCheckpoint.open(directory)  # says what is wrong and what to do
    quantization = text_config(read_config(directory)).get("quantization_config") or {}
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if quantization and method != "mxfp4" and not (method == "fp8" and block):  # as model_of says it at more length
        raise CheckpointError(str(directory), [f"weights quantised by {method} are not read. {UNQUANTISED}"])
    checkpoint = open_files(directory, pictures=pictures)
    problems = list(_surprises(directory, checkpoint, method))
    if pictures:
        problems += _other_pixels(directory)
    if problems:
        raise CheckpointError(str(directory), problems)
    if method == "mxfp4":
        return Mxfp4Checkpoint(checkpoint)
    if block:
        return BlockFp8Checkpoint(checkpoint, tuple(block))
    return checkpoint


def _other_pixels(directory: Path) -> Iterator[str]:
    """A line for each number by which the checkpoint's processor normalises pixels otherwise than its tower here."""
    path = directory / PROCESSOR
    vision = model_of(read_config(directory), pictures=True)[1].vision
    assert vision is not None, "model_of refuses a model without a tower"
    if not path.is_file():
        return
    try:
        written = read_json(path.read_bytes())
    except ValueError as error:
        yield f"{PROCESSOR}: is not JSON ({error}). Download it again"
        return
    for name, ours in (("image_mean", vision.pixel_mean), ("image_std", vision.pixel_std)):
        if isinstance(written, dict) and written.get(name, ours) != ours:
            remedy = f"Write {ours} there if the tower was trained so"
            yield f"{PROCESSOR}: {name} is {written[name]}, and pixels are normalised by {ours} here. {remedy}"


def _surprises(directory: Path, checkpoint: HfCheckpoint, method: str | None) -> Iterator[str]:
    """Quantised tensors that ``method``, config.json's, does not account for: a line for each kind."""
    if method is None and (directory / MODELOPT).exists():
        yield f"{MODELOPT}: ModelOpt quantised these weights, which is not read here. {UNQUANTISED}"
        return
    names = checkpoint.tensors.keys()
    for ends, writer in _WRITERS.items():
        if foreign := [name for name in names if name.endswith(ends)]:
            problem = f"{len(foreign)} tensors, the first {foreign[0]}, are of {writer}, which is not read here"
            yield f"{problem}. {UNQUANTISED}"
            return
    if method is not None:
        return  # its reader names what is missing or wrong
    fp8 = [name for name, info in checkpoint.tensors.items() if info.dtype in FP8]
    if bare := [name for name in fp8 if name + SCALE_SUFFIX not in names]:
        problem = f"{len(bare)} tensors, the first {bare[0]}, are fp8 without the scales of their blocks"
        yield f"{problem} ({bare[0]}{SCALE_SUFFIX}). {UNQUANTISED}"
    elif fp8:
        problem = f"{len(fp8)} tensors, the first {fp8[0]}, are fp8 in blocks, and config.json does not say so"
        yield f"{problem}. Restore its quantization_config, with quant_method and weight_block_size"
    elif blocks := [name for name in names if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in names]:
        problem = f"{len(blocks)} tensors, the first {blocks[0]}, are in mxfp4, and config.json does not say so"
        yield f"{problem}. Restore its quantization_config, with quant_method=mxfp4"
