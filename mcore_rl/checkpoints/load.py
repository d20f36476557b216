"""Hugging Face to Megatron: a rank reads the ranges that it needs of a checkpoint straight into its parameters.

Every rank first checks all names and shapes of the checkpoint against the table, so that a configuration of another
model, a lost expert or a left-over layer is an error and not a wrong model.  There is no communication: every rank
reads for itself, and holds no more than its parameters and one window of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.not_a_number import NanCheck
from mcore_rl.checkpoints.safetensors import TensorInfo, windows_of
from mcore_rl.checkpoints.stacked import stored_tensors, unstacked
from mcore_rl.config.role import Head
from mcore_rl.families.blocks import EMBEDDING_TENSOR, HF_LAYER, VALUE_HEAD
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.binding import Bound, bind
from mcore_rl.weights.table import Piece, Table
from mcore_rl.weights.views import view_of

OUTPUT = "lm_head.weight"
# The rotary frequencies are computed, not learned; transformers before 4.32 saved them all the same.
COMPUTED = (HF_LAYER + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
MANY = 8  # so many equal faults are listed one by one; more are counted
Fault = tuple[str, str, str]  # the file, the tensor's name, and what is wrong with it
MISMATCH = "The HF config does not match the tensors: give the config.json of these weights, or download both again"


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module],
    checkpoint: HfCheckpoint,
    table: Table,
    rank: int,
) -> None:
    """Write this rank's part of ``checkpoint`` into ``chunks``, in place, cast where dtypes differ.

    Rows that pad the vocabulary become zero.  A tensor that the checkpoint may lack (a value head) keeps its value.
    For an engine:
    ``engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=rank))``.

    Raises WeightMapError if modules and table disagree, CheckpointError as ``check_checkpoint`` does, if a file cannot
    be read to its end, and with every tensor of which this rank's part holds NaN.
    """
    bound = bind(chunks, table, rank)
    check_checkpoint(checkpoint, table)
    checkpoint = unstacked(checkpoint, table)
    wanted = []
    for each in bound:
        pieces = table.pieces(each.local)
        if all(piece.hf in checkpoint.tensors for piece in pieces):
            _zero_padding(each, table)
            wanted += [(checkpoint.tensors[piece.hf], piece, each.tensor) for piece in pieces]
    check = NanCheck()
    for _, piece, tensor in sorted(wanted, key=_place_in_files):
        out = view_of(tensor.detach(), piece.local_region)
        checkpoint.read_into(piece.hf, piece.hf_region, out)
        check.see(piece.hf, out)
    if problems := check.problems():
        raise CheckpointError(str(checkpoint.directory), problems)


def _place_in_files(wanted: tuple[TensorInfo, Piece, Tensor]) -> tuple[str, int, tuple[int, ...]]:
    # Disks like to be read in order.
    info, piece, _ = wanted
    return info.file.name, info.begin, piece.hf_start


def _zero_padding(bound: Bound, table: Table) -> None:
    shard = table.shard(bound.local)
    dim = bound.local.rule.dim
    if shard.held < shard.size:
        bound.tensor.detach().narrow(dim, shard.held, shard.size - shard.held).zero_()


def check_checkpoint(checkpoint: HfCheckpoint, table: Table) -> None:
    """Check that the tensors of ``checkpoint`` are those of the table's model.

    Raises CheckpointError with every violation: a tensor that is missing, unexpected, of another shape, or not of a
    floating-point dtype; tied embeddings beside an output projection that differs from them.  Faults that differ in the
    layer or the expert alone are counted; where the files have nothing of whole layers, that is the only violation.
    """
    problems = list(_absent_layers(checkpoint, table))
    if not problems:
        problems = _counted([*_missing_or_misshapen(checkpoint, table), *_unexpected(checkpoint, table)])
    if problems:
        raise CheckpointError(str(checkpoint.directory), problems)


def _absent_layers(checkpoint: HfCheckpoint, table: Table) -> Iterator[str]:
    """A line on the layers of which the files have nothing.  It names no tensor: there may be millions."""
    layer = re.compile(_pattern(HF_LAYER) + ".+")
    held = {int(match.group(1)) for match in map(layer.fullmatch, checkpoint.stored) if match is not None}
    wanted = range(table.model.num_layers)
    absent = [number for number in wanted if number not in held] if held else []
    if absent:
        names = f"tensors {HF_LAYER.format(l=absent[0])}*"
        others = f" (and those of {len(absent) - 1} other layers, up to {absent[-1]})" if len(absent) > 1 else ""
        yield f"{names}{others}: config.json says {len(wanted)} layers, and each of these is missing. {MISMATCH}"


def _counted(faults: Iterable[Fault]) -> list[str]:
    """``faults`` as lines; where more than ``MANY`` differ in numbers within the name alone, one line counts them."""
    alike: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((re.sub(r"\d+", "0", fault[1]), fault[2]), []).append(fault)
    lines = []
    for same in alike.values():
        file, name, what = same[0]
        if len(same) > MANY:
            lines.append(f"{file}tensor {name} and {len(same) - 1} more like it, up to {same[-1][1]}{what}")
        else:
            lines += [f"{file}tensor {name}{what}" for file, name, what in same]
    return lines


def _missing_or_misshapen(checkpoint: HfCheckpoint, table: Table) -> Iterator[Fault]:
    for name, wanted in stored_tensors(table, checkpoint).items():
        info = checkpoint.stored.get(name)
        if info is None:
            if not wanted.absent_ok:
                yield "", name, f" of shape {wanted.shape} is missing. {MISMATCH}"
        elif info.shape != wanted.shape:
            difference = f"expected shape {wanted.shape} by config.json and found {info.shape}"
            yield f"{info.file.name}: ", name, f": {difference}. {MISMATCH}"
        elif not info.dtype.is_floating_point:
            remedy = "Integers are a quantised format that is not read here: give the unquantised checkpoint"
            yield f"{info.file.name}: ", name, f": expected floating-point numbers and found {info.dtype}. {remedy}"


def _unexpected(checkpoint: HfCheckpoint, table: Table) -> Iterator[Fault]:
    known = stored_tensors(table, checkpoint)
    may_stand = [re.compile(_pattern(name)) for name in (*table.family.ignored, *COMPUTED, *_other_heads(table))]
    layer = re.compile(_pattern(HF_LAYER) + ".+")
    for name, info in checkpoint.stored.items():
        if name in known or any(pattern.fullmatch(name) for pattern in may_stand):
            continue
        if table.model.tie_output and name == OUTPUT:
            yield from _wrong_tie(checkpoint, info)
            continue
        match = layer.fullmatch(name)
        beyond = match is not None and int(match.group(1)) >= table.model.num_layers
        if not (beyond and table.family.extra_layers):
            why = f"config.json says {table.model.num_layers} layers" if beyond else f"{table.family.name} has none"
            what = f" of shape {info.shape} has no place in the model: {why}. {MISMATCH}"
            yield f"{info.file.name}: ", name, what


def _pattern(template: str) -> str:
    """A regular expression for a Hugging Face name with ``{l}`` and ``{e}``."""
    return re.sub(r"\\\{[le]\\\}", r"(\\d+)", re.escape(template))


def _other_heads(table: Table) -> Iterable[str]:
    """The output projection in a checkpoint from which a model with another head starts: that model has none."""
    if table.head is Head.lm:
        return ()
    rules = (rule for rule in table.family.weights if rule.name == VALUE_HEAD.name and rule.only(table.model))
    return {tensor.name for rule in rules for tensor in rule.hf} - table.hf_tensors.keys()


def _wrong_tie(checkpoint: HfCheckpoint, output: TensorInfo) -> Iterator[Fault]:
    """Some tools also write the tied projection; it must equal the embedding, or this is another model."""
    embedding = checkpoint.tensors.get(EMBEDDING_TENSOR.name)
    if embedding is None:
        return  # ``_missing_or_misshapen`` reports it
    if (embedding.shape, embedding.dtype) != (output.shape, output.dtype) or not _equal(checkpoint, embedding, output):
        difference = f"config.json says tie_word_embeddings=true, and this is not equal to {EMBEDDING_TENSOR.name}"
        yield f"{output.file.name}: ", OUTPUT, f": {difference}. Write tie_word_embeddings=false. {MISMATCH}"


def _equal(checkpoint: HfCheckpoint, one: TensorInfo, other: TensorInfo) -> bool:
    for window in windows_of(one):
        parts = [torch.empty(window.shape, dtype=one.dtype) for _ in range(2)]
        for info, part in zip((one, other), parts, strict=True):
            checkpoint.read_into(info.name, window, part)
        if not torch.equal(*(part.view(torch.uint8) for part in parts)):
            return False
    return True
