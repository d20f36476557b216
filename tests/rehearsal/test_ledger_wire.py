"""Bytes on the wire, by hand; the operations of torch by name."""

from __future__ import annotations

import pytest

from mcore_rl.rehearsal.ledger import Collect, collective, wire_bytes


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        (Collect.all_reduce, 4, 1200),
        (Collect.all_gather, 4, 600),
        (Collect.reduce_scatter, 2, 400),
        (Collect.all_to_all, 8, 700),
        (Collect.broadcast, 4, 800),
        (Collect.send, 4, 800),
        (Collect.receive, 4, 0),
        (Collect.barrier, 4, 0),
        (Collect.all_reduce, 1, 0),
        (Collect.send, 1, 0),
    ],
)
def test_what_a_rank_sends(kind: Collect, size: int, sent: int) -> None:
    assert wire_bytes(kind, 800, size) == sent


def test_every_operation_of_torchs_is_known_or_is_none() -> None:
    import torch.distributed  # noqa: F401  # declares them

    names = {
        "allreduce_": Collect.all_reduce, "allreduce_coalesced_": Collect.all_reduce,
        "_allgather_base_": Collect.all_gather, "allgather_into_tensor_coalesced_": Collect.all_gather,
        "_reduce_scatter_base_": Collect.reduce_scatter, "reduce_scatter_tensor_coalesced_": Collect.reduce_scatter,
        "alltoall_base_": Collect.all_to_all, "send": Collect.send, "recv_": Collect.receive,
        "broadcast_": Collect.broadcast, "monitored_barrier_": None,
    }  # fmt: skip
    for name, kind in names.items():
        assert hasattr(__import__("torch").ops.c10d, name), f"torch has no {name}"
        assert collective(name) is kind
