"""Starts Ray on this machine, or joins a running cluster."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.parallel.device import num_cores
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.runtime.ray_watch import children, joined_ray, own_ray
from mcore_rl.tracking.secrets import secret_names

KNOCK_S = 10.0  # the time limit for a head node to accept a connection


@contextmanager
def ray_cluster(config: RayInitConfig, remedy: Callable[[], str] = lambda: "Begin again.") -> Iterator[None]:
    """Connects to Ray; on exit, writes its timeline and stops what it started here.

    If Ray's head or this machine's raylet dies meanwhile, the program ends at once with ``os.EX_TEMPFAIL`` and one
    message, which ends with ``remedy``.

    ``config.num_cpus=None`` is the number of cores that this process may use, which may be fewer than the machine has,
    as under Slurm.

    Raises ConfigError if no cluster answers at ``config.address``.
    """
    with ExitStack() as stack:
        if not ray.is_initialized():
            before, on_sigterm = children(), signal.getsignal(signal.SIGTERM)
            _connect(config)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler ends the program, with exit code 15
            stack.enter_context(own_ray(before, remedy) if config.address is None else joined_ray(remedy))
        try:
            yield
        finally:
            if config.timeline_json_file is not None:
                Path(config.timeline_json_file).parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(config.timeline_json_file)


def _connect(config: RayInitConfig) -> None:
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is None:
        cpus = num_cores() if config.num_cpus is None else config.num_cpus
        # Ray's processes, and so all workers, start without secrets, except those that Ray itself reads.
        hidden = {name for name in secret_names() if not name.startswith("RAY_")}
        with inherited_environment(dict.fromkeys(hidden)):
            ray.init(address="local", num_cpus=cpus, **options)  # "local": never a cluster that others run here
        return
    try:
        _knock(config.address)
        ray.init(address=config.address, **options)
    except (OSError, ValueError) as error:
        problem = f"no Ray cluster answers there: {str(error).splitlines()[0]}"
        remedy = "Start one with ray start --head, or leave ray_init.address out to start one here"
        raise ConfigError([Violation("ray_init.address", config.address, problem, remedy)]) from error


def _knock(address: str) -> None:
    """Raises OSError or ValueError at once if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in address:  # neither "auto" nor a URL of Ray's client
        socket.create_connection((host, int(port)), KNOCK_S).close()


def meeting_host(config: RayInitConfig) -> str:
    """Where the run's own store listens: at the loopback if Ray was started here, else where other nodes reach it."""
    return "127.0.0.1" if config.address is None else this_host()


def this_host() -> str:
    """The address at which other nodes of the cluster reach this machine."""
    return str(ray.util.get_node_ip_address())
