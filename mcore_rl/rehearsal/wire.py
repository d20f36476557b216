"""Bytes that a rank sends in a collective over n ranks, by the rings that NCCL's and RCCL's large messages take.

    all-reduce                  2 (n - 1) / n of the tensor
    all-gather, reduce-scatter  (n - 1) / n of the whole
    all-to-all                  what is not for itself: (n - 1) / n where the parts are equal
    broadcast, send             the tensor (a receiver sends nothing)

Trees and in-network reductions send fewer; protocols add a few per cent.
"""

from __future__ import annotations

from enum import Enum


class Collect(Enum):
    """A collective operation."""

    all_reduce = "all-reduce"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_to_all = "all-to-all"
    broadcast = "broadcast"
    send = "send"
    receive = "receive"
    barrier = "barrier"


# By what the names of torch's operations begin with (torch/csrc/distributed/c10d/Ops.cpp, 2.13).
NAMES = (
    ("allreduce", Collect.all_reduce),
    ("allgather", Collect.all_gather),
    ("_allgather", Collect.all_gather),
    ("reduce_scatter", Collect.reduce_scatter),
    ("_reduce_scatter", Collect.reduce_scatter),
    ("alltoall", Collect.all_to_all),
    ("broadcast", Collect.broadcast),
    ("send", Collect.send),
    ("recv", Collect.receive),
    ("barrier", Collect.barrier),
)


# By Megatron's descriptions (megatron/core/parallel_state.py, 0.16.1); the first that a description begins with.
GROUPS = (
    ("DATA_PARALLEL_GROUP", "dp"),
    ("INTRA_PARTIAL_DATA_PARALLEL_GROUP", "dp"),
    ("CONTEXT_PARALLEL_GROUP", "cp"),
    ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp and cp"),
    ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ("EMBEDDING_GROUP", "embedding"),
    ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
    ("EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
    ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep and etp"),
    ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
)


def group_name(description: str) -> str:
    """The axis of a process group, from its description; "world" if it has none of its own."""
    return next((name for begin, name in GROUPS if description.startswith(begin)), "world")


def collective(name: str) -> Collect | None:
    """The collective that torch's operation ``name`` is; None if it is none that is counted."""
    return next((each for begin, each in NAMES if name.startswith(begin)), None)


def wire_bytes(kind: Collect, payload: int, size: int) -> int:
    """Bytes that one of ``size`` ranks sends.  payload: of the whole tensor; of an all-to-all, what a rank gives."""
    if size <= 1 or kind in (Collect.receive, Collect.barrier):
        return 0
    if kind in (Collect.send, Collect.broadcast):
        return payload
    share = payload * (size - 1) // size
    return 2 * share if kind is Collect.all_reduce else share
