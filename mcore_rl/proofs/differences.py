"""What of a Hugging Face checkpoint a process holds otherwise than the files say: element by element, tensor by tensor.

For a report on a few processes of one machine that all see the directory; after every weight update of a run it is the
fingerprints that are compared (``fingerprint``), which need no files.
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
    """Of ``pieces``, those that ``held`` has otherwise than the files, cast to its dtype.

    held: a local tensor, on any device.  Pieces of tensors that the checkpoint may lack are left out.
    """
    found: Differences = {}
    for piece in pieces:
        if piece.hf not in checkpoint.tensors:
            continue
        expected = torch.empty(piece.shape, dtype=held.dtype)
        checkpoint.read_into(piece.hf, piece.hf_region, expected)
        here = view_of(held, piece.local_region).cpu()
        if not torch.equal(here, expected):
            largest = float((here.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max())
            found[piece.hf] = max(largest, found.get(piece.hf, 0.0))
    return found


@torch.no_grad()
def module_differences(
    chunks: Sequence[torch.nn.Module], table: Table, rank: int, checkpoint: HfCheckpoint
) -> Differences:
    """What the Megatron model ``chunks`` of ``rank`` hold otherwise than ``checkpoint``, copies and replicas too.

    Raises WeightMapError where modules and table do not agree.
    """
    bound = bind(chunks, table, rank)
    return worst(piece_differences(each.tensor, table.pieces(each.local), checkpoint) for each in bound)


def worst(found: Iterable[Mapping[str, float]]) -> Differences:
    """Of several processes or tensors together: each name with its largest difference."""
    together: Differences = {}
    for differences in found:
        for name, largest in differences.items():
            together[name] = max(largest, together.get(name, 0.0))
    return together
