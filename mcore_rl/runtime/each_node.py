"""Runs a function once on every node of a Ray cluster that is there already, with all accelerators of the node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared so

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.ground.errors import ConfigError, Violation, WorkerError
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.runtime.cluster import on_node, ray_cluster, this_host

T = TypeVar("T")

ANSWER_S = 30.0  # beyond the limit of the function itself


@contextmanager
def store_at(host: str) -> Iterator[int]:
    """The port of a torch store at ``host`` alone, for vLLM, which takes no other kind; it asks nobody for a secret."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=60),
    )
    try:
        yield port
    finally:
        del store


def on_each_node(
    function: Callable[..., T],
    address: str,
    num_nodes: int,
    platform: Platform,
    args: tuple[Any, ...],
    limit_s: float,
    *,
    with_store: bool = False,
) -> dict[str, T | WorkerError]:
    """Name of the node -> ``function(node, num_nodes, *args[, store], limit_s)`` on it, all at the same time.

    address: of the cluster's head, or ``auto``.  platform: of every node; its accelerators are asked for as a whole.
    with_store: pass the access to a store that all of them reach.
    A node that fails, or gives no answer in ``limit_s``, has a WorkerError with its name in place of the result.
    Raises ConfigError if the cluster has fewer nodes.
    """
    with ray_cluster(RayInitConfig(address=address)):
        alive = sorted((each for each in ray.nodes() if each["Alive"]), key=lambda each: str(each["NodeName"]))
        if len(alive) < num_nodes:
            problem = f"the Ray cluster at {address} has {len(alive)} nodes"
            raise ConfigError(
                [Violation("--nodes", num_nodes, problem, "Start Ray on more (docs/ray.md), or ask for fewer")]
            )
        chosen = alive[:num_nodes]
        with StoreServer(this_host()) as store:
            more = (store.access,) if with_store else ()
            num_gpus = platform.num_devices if platform.is_accelerator else 0
            tasks = [on_node(function, each["NodeID"], num_gpus=num_gpus, max_retries=0) for each in chosen]
            calls = {
                task.remote(index, num_nodes, *args, *more, limit_s): str(each["NodeName"])
                for index, (task, each) in enumerate(zip(tasks, chosen, strict=True))
            }
            return _answers(calls, limit_s)


def _answers(calls: dict[Any, str], limit_s: float) -> dict[str, Any]:
    done, missing = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s + ANSWER_S)
    for call in missing:
        ray.cancel(call, force=True)
    answers: dict[str, Any] = {
        calls[call]: WorkerError(f"{calls[call]} gave no answer within {limit_s + ANSWER_S:g} s") for call in missing
    }
    for call in done:
        try:
            answers[calls[call]] = ray.get(call)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            answers[calls[call]] = WorkerError(f"{calls[call]}: {cause}")
    return answers
