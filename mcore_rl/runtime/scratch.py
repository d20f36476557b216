"""A private folder for what the processes of a run need while it lives, and no longer.

Ray's session and its token, the sockets and stores of vLLM's processes, the folders that libraries make when they are
imported: without it they lie in /tmp, and stay there when their process is killed.  It is not in the run directory: a
socket's path has at most 107 bytes, and shared file systems hold no sockets.

Invariant: nobody but the user can enter it, and it is gone when the program has ended, however that happens.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.processes.guarding import guard_beside

PREFIX = "mcore-rl-"
MAX_BASE = 20  # characters of the folder above: Ray's sockets are 85 further down
GRACE_S = 8.0  # for processes of a killed program: other guards end them meanwhile, and they may write until then


_open: list[Path] = []  # this program's folder, while there is one


@contextmanager
def scratch() -> Iterator[Path]:
    """The folder, which is also where this program and all that it starts put temporary files (TMPDIR).

    Within it, it is the same folder again.  A program without HOME gets the user's: else wandb's service looks for its
    cache in /tmp.
    """
    if _open:
        yield _open[0]
        return
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base if len(base) <= MAX_BASE else "/tmp"))  # of mode 0700
    with guard_beside(grace_s=GRACE_S, folder=str(folder)):
        before = tempfile.tempdir
        home = os.path.expanduser("~")  # HOME, or what the system says of the user; "~" if it says nothing
        own = {"TMPDIR": str(folder), "HOME": home if os.path.isabs(home) else str(folder)}
        try:
            with inherited_environment(own):
                tempfile.tempdir = None  # Python has read TMPDIR already
                _open.append(folder)
                yield folder
        finally:
            _open.clear()
            tempfile.tempdir = before
            shutil.rmtree(folder, ignore_errors=True)
