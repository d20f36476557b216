"""An engine on several nodes: what vLLM's own configuration makes of our arguments, for accelerators that are not here.

By vLLM's own platforms (tests/support/vllm_platforms.py), of which each node has two devices.
"""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.rollout import parse_rollout_layout

pytestmark = pytest.mark.tier("ci")
PER_NODE = 2


@pytest.mark.parametrize("layout", ["tp=2", "tp=4", "tp=2,dp=2,ep=4", "tp=4,dp=2,ep=8", "tp=1,dp=4,ep=4"])
def test_every_rank_is_on_one_node_and_every_replica_has_one_core(vllm_says: dict[str, Any], layout: str) -> None:
    parts, sizes = vllm_says["nodes"][layout], parse_rollout_layout(layout)
    assert len(parts) == max(1, sizes.engine_size // PER_NODE)
    ranks, cores = [], []
    for node, part in enumerate(parts):
        assert (part["nnodes"], part["node_rank"]) == (len(parts), node)
        assert part["executor"] == "MultiprocExecutor" and part["extension"].endswith("SyncReceiver")
        for local in range(part["data_parallel_size_local"]):
            replica = part["data_parallel_rank"] + local
            first = part["node_rank_within_dp"] * part["local_world_size"]
            ranks += [replica * sizes.tp + first + rank for rank in range(part["local_world_size"])]
            cores += [replica] if part["node_rank_within_dp"] == 0 else []
    assert ranks == list(range(sizes.engine_size)), "in the order of the nodes, which is that of the weights' plan"
    assert cores == list(range(sizes.engine_dp)), "where vLLM runs a core, and elsewhere only workers"


def test_all_nodes_meet_at_the_first(vllm_says: dict[str, Any]) -> None:
    for layout, parts in vllm_says["nodes"].items():
        if len(parts) > 1:
            assert {part["ranks_meet"] for part in parts} == {"10.0.0.1:4711"}, layout
        if len(parts) > 1 and parse_rollout_layout(layout).engine_dp > 1:
            assert {part["cores_meet"] for part in parts} == {"10.0.0.1:4712"}, layout
