"""``mcore-rl prepare tiny-model``, from a checkout of the repository: the same code."""

from __future__ import annotations

import sys

from mcore_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "tiny-model", *sys.argv[1:]]))
