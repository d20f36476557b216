"""An engine on several nodes: what its process on each of them must know, in the words of vLLM's ``ParallelConfig``.

vLLM's own multiprocessing executor spans the nodes (``nnodes`` and ``node_rank``, v1/executor/multiproc_executor.py,
0.32).  The process on node 0 runs the engine; that on each other node only the workers, or the cores of replicas, that
are there ("headless", ``headless_engine.py``).  An engine on one node is node 0 of 1.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes of an engine on several nodes find one another; all of it is on node 0.

    host: its address, of the interface that the cluster uses.
    port: of a key-value store (torch's TCPStore) that is there already, for the ranks.
    rpc_port: a port that is free, for the cores of replicas on other nodes.
    """

    host: str
    port: int
    rpc_port: int


@dataclass(frozen=True, kw_only=True)
class EngineNode:
    """One of the nodes that an engine is on.

    nnodes, node_rank: how many they are, and which of them this is.
    address: this node's, at which the others reach it.
    meeting: None for an engine on one node.
    """

    nnodes: int = 1
    node_rank: int = 0
    address: str = ""
    meeting: Meeting | None = None

    def arguments(self) -> dict[str, object]:
        """Those of vLLM's ``AsyncEngineArgs`` that depend on the node."""
        arguments: dict[str, object] = dict(nnodes=self.nnodes, node_rank=self.node_rank)
        if self.meeting is not None:
            arguments |= dict(master_addr=self.meeting.host, master_port=self.meeting.port)
            arguments |= dict(data_parallel_rpc_port=self.meeting.rpc_port)
        return arguments

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that tie vLLM's sockets to the interface of ``address``; none for an engine on one node.

        environ: what the process inherits; an interface that is chosen there stays.
        """
        if self.meeting is None:
            return {}
        variables = {
            # vLLM's message queues listen there; by itself vLLM takes the way to the internet (network_utils.get_ip).
            "VLLM_HOST_IP": self.address,
            # The store exists.  Else the first rank would make one, which torch lets listen at every address
            # (_create_c10d_store in distributed/rendezvous.py).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        interface = interface_of(self.address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in environ:
            # By itself gloo takes the address of the host's name, which often is a loopback address.
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables


ONE_NODE = EngineNode()


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has ``address``; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None


def free_port(host: str) -> int:
    """A port of ``host``, an address of this machine, at which nothing listens now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
