"""What a program may try against other processes, files and the machine, one attack at a time
(``benchmarks/attacks.py``).

Each is tried by a process that nobody confines first, to show that it is one, and then by a confined one; with all that
this kernel has, and with no more of Landlock than each of its versions has, as on older kernels.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.attacks import ATTACKS, ground, read
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards import confinement
from mcore_rl.rewards.confinement import libraries, run_confined, weaknesses
from tests.support.skips import KERNEL

CONFIG = CodeConfig(timeout_s=60.0, memory_mib=512, output_kib=64)
pytestmark = pytest.mark.skipif(bool(weaknesses()), reason=KERNEL + "; ".join(weaknesses()))
SECRET = "sk-the-value-of-a-key"


@pytest.fixture(scope="module")
def unconfined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What happens without confinement, in an environment with a key."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("free")
        field = ground(folder / "place", folder, stack)
        answer = subprocess.run(
            [sys.executable, "-c", field.program],
            stdout=subprocess.PIPE,
            env={**os.environ, "SOME_API_KEY": SECRET},
            check=True,
            text=True,
            timeout=120,
        )
        field.spare.touch()
    return read(answer.stdout)


@pytest.fixture(
    scope="module", params=[99, 1, 2, 3, 4, 5, 6], ids=lambda abi: "this Landlock" if abi == 99 else f"Landlock {abi}"
)
def confined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The same in confinement; and that the ground is as it was."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_KEY", SECRET)
        folder = tmp_path_factory.mktemp("confined")
        library = tmp_path_factory.mktemp("library")
        others = libraries()
        patch.setattr(confinement, "libraries", lambda: (*others, str(library)))
        field = ground(folder / "place", library, stack)
        before = field.state()
        outcome = run_confined(field.program, CONFIG, landlock_abi=request.param)
        assert field.state() == before
        assert field.spare.read_text() == "spare = 1\n"
        for server in field.servers:
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(1) if server.type is socket.SOCK_DGRAM else server.accept()
        assert SECRET not in outcome.stdout
        yield read(outcome.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused(name: str, unconfined: dict[str, str], confined: dict[str, str]) -> None:
    assert confined[name] != "DONE"
    if unconfined[name] != "DONE":
        pytest.skip(f"{KERNEL}this machine refuses it to everybody: {unconfined[name]}")
