"""Prints what this node of a Slurm job has and sees, as a line of JSON: ``python -m mcore_rl.runtime.node_facts``.

``launch/slurm/train.sbatch`` runs it on every node, before anything else; ``nodes.py`` checks what it prints.  A
problem of the node is reported as a fact, not as an error.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl import __version__
from mcore_rl.config.engine import Device
from mcore_rl.errors import McoreRLError
from mcore_rl.parallel.device import detect, num_cores, ray_environment
from mcore_rl.parallel.device_details import driver_version
from mcore_rl.runtime.nodes import Facts

POLL_S = 0.5
PATIENCE_S = 10.0  # how long a shared file system may take to show a new file


def facts_here(node: str, device: Device, marker: Path, listen: str | None) -> Facts:
    """The facts of this machine.

    node: its name in Slurm.  device: the kind of accelerators that the job wants.  marker: a file that the first node
    wrote into the run directory.  listen: HOST:PORT at which Ray's head will listen here; None on the other nodes.
    """
    locked, files = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    known: dict[str, Any] = dict(node=node, host=socket.gethostname(), sees_run=_appears(marker))
    known |= dict(locked_bytes=locked, open_files=files)
    try:
        platform = detect(device)
    except McoreRLError as error:
        return Facts(**known, error=str(error))
    return Facts(
        **known,
        version=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        num_cores=num_cores(),
        num_devices=platform.num_devices if platform.is_accelerator else 0,
        device_name=platform.device_name if platform.is_accelerator else "",
        driver=driver_version(platform.kind),
        environment=ray_environment(platform.kind),
        port_taken="" if listen is None else _taken(listen),
    )


def _appears(marker: Path) -> bool:
    """Whether ``marker`` exists, or appears within ``PATIENCE_S``."""
    until = time.monotonic() + PATIENCE_S
    while not marker.is_file():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _taken(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        return f"{listen}: {os.strerror(error.errno) if error.errno else error}"
    return ""


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m mcore_rl.runtime.node_facts", description=__doc__.split("\n")[0])
    top.add_argument("--node", required=True, help="its name to Slurm")
    top.add_argument("--device", type=Device, required=True, metavar="|".join(each.value for each in Device))
    top.add_argument("--marker", type=Path, required=True, help="a file that the first node has just written")
    top.add_argument("--head", required=True, help="name of the node of Ray's head")
    top.add_argument("--listen", required=True, help="HOST:PORT of Ray's head")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints this node's facts as one line of JSON."""
    chosen = _parser().parse_args(arguments)
    listen = chosen.listen if chosen.node == chosen.head else None
    facts = facts_here(chosen.node, chosen.device, chosen.marker, listen)
    Console().print(json.dumps(asdict(facts)), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
