"""Ray whose workers, and whose engines, are forked from the servers of ``forked``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.runtime import cluster
from tests.support import fast_python
from tests.support.forked import ENGINE_SERVER, RANK_SERVERS


@contextmanager
def forked_ray(directory: Path) -> Iterator[None]:
    """Whatever Ray this process starts meanwhile gets its workers from the servers.  directory: for a small file."""
    for server in (*RANK_SERVERS, ENGINE_SERVER):  # all import at once
        server.ensure_running()
    program, ranks = directory / "python", [each.address for each in RANK_SERVERS]
    fast_python.write_program(program, {fast_python.WORKER: ranks, fast_python.ENGINE: [ENGINE_SERVER.address]})
    connect = cluster._connect

    def connect_forking(config: RayInitConfig, folder: Path, stack: ExitStack) -> None:
        with mock.patch.object(sys, "executable", str(program)):
            connect(config, folder, stack)

    with mock.patch.object(cluster, "_connect", connect_forking):
        yield
