"""Compares the weights that a process holds with the files of a Hugging Face checkpoint, element by element.

For reports on a few processes of one machine that all see the directory.  A run compares fingerprints instead
(``weights/fingerprint.py``), after every weight update and without files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.weights.binding import bind
from mcore_rl.weights.table import Piece, Table
from mcore_rl.weights.views import view_of

Differences = dict[str, float]  # Hugging Face name -> largest absolute difference of an element; inf where one is NaN


@torch.no_grad()
def piece_differences(held: Tensor, pieces: Iterable[Piece], checkpoint: HfCheckpoint) -> Differences:
    """The differences between ``held`` and the files, cast to its dtype, over ``pieces``; empty if they are equal.

    held: a local tensor, on any device.  Pieces of tensors that the checkpoint does not have are skipped.
    """
    differences: Differences = {}
    for piece in pieces:
        if piece.hf not in checkpoint.tensors:
            continue
        expected = torch.empty(piece.shape, dtype=held.dtype)
        checkpoint.read_into(piece.hf, piece.hf_region, expected)
        _note(differences, piece.hf, view_of(held, piece.local_region).cpu(), expected)
    return differences


def region_differences(held: Tensor, expected: Tensor, pieces: Iterable[Piece]) -> Differences:
    """The differences between two local tensors on the CPU, over ``pieces``."""
    differences: Differences = {}
    for piece in pieces:
        here, there = (view_of(each, piece.local_region) for each in (held, expected))
        _note(differences, piece.hf, here, there)
    return differences


def _note(differences: Differences, name: str, held: Tensor, expected: Tensor) -> None:
    if not torch.equal(held, expected):
        largest = float((held.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max())
        differences[name] = max(largest, differences.get(name, 0.0))


@torch.no_grad()
def module_differences(
    chunks: Sequence[torch.nn.Module], table: Table, rank: int, checkpoint: HfCheckpoint
) -> Differences:
    """The differences between the Megatron model ``chunks`` of ``rank`` and ``checkpoint``, copies and replicas too.

    Raises WeightMapError if modules and table disagree.
    """
    bound = bind(chunks, table, rank)
    return worst(piece_differences(each.tensor, table.pieces(each.local), checkpoint) for each in bound)


def worst(reports: Iterable[Mapping[str, float]]) -> Differences:
    """Merges the differences of several processes or tensors: each name with its largest difference."""
    together: Differences = {}
    for differences in reports:
        for name, largest in differences.items():
            together[name] = max(largest, together.get(name, 0.0))
    return together
