"""A command in a /tmp of its own: what it leaves there is not what others of this machine do meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# keep: a folder, perhaps in /tmp, that stays as it is.  list: a file in it, for the names that are left in /tmp.
_SCRIPT = """
keep=$1 list=$2; shift 2
mount --bind "$keep" /mnt && mount -t tmpfs tmpfs /tmp && mkdir -p "$keep" && mount --bind /mnt "$keep" || exit 125
"$@"
code=$?
ls -A /tmp >"$list"
exit $code
"""


@cache
def can_have_one() -> bool:
    """Whether this user may mount in a namespace of its own."""
    if shutil.which("unshare") is None or not os.path.isdir("/mnt"):
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, check=False
    )
    return tried.returncode == 0


def in_private_tmp(command: Sequence[str], keep: Path, names: Path) -> list[str]:
    """``command`` so that it sees of /tmp only ``keep``; it writes the names that are left there to ``names``."""
    return ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", str(keep), str(names), *command]
