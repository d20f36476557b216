"""What page-locked host memory takes, by torch's rule, and the setting under which it takes what was asked for.

By itself torch (ATen/core/CachingHostAllocator.h, 2.13) rounds every block up to a power of two, 8.5 GiB to 16, and
keeps it when it is freed.  Blocks above ``pinned_max_cached_size_mb`` are not rounded, and given back when they are
freed.  Training processes set that (``pinned.keep_large_blocks_exact``) and make few large blocks
(``pinned.side_by_side``).  Below it, what comes and goes in every step is still kept: to pin a GiB takes a good part of
a second.  Rollout engines are started with a lower one (``pinned.settings_of_a_new_process``): a sleep that keeps
weights, which a save needs, pins each of vLLM's segments by itself, and its memory is wanted back afterwards.

Not ``pinned_max_round_threshold_mb``: torch 2.13 files such a block under the power of two above it, and then gives
8.5 GiB to who asks for 15.  tests/accelerators/test_pinned.py runs torch's own code for all of this.

Nothing here loads torch: the planner counts with it.
"""

from __future__ import annotations

KEY = "pinned_max_cached_size_mb"
MAX_CACHED_BYTES = 256 << 20
ENGINE_MAX_CACHED_BYTES = 1 << 20
ALIGNMENT = 64  # bytes, of what lies side by side in a block


def block_bytes(num_bytes: int) -> int:
    """What a block of ``num_bytes`` takes under our setting."""
    return num_bytes if num_bytes > MAX_CACHED_BYTES or num_bytes == 0 else 1 << (num_bytes - 1).bit_length()


def aligned(num_bytes: int) -> int:
    """``num_bytes``, and the gap to the next that lies in the same block."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def with_setting(settings: str, max_cached_bytes: int = MAX_CACHED_BYTES) -> str:
    """Settings of torch's allocators, as ``PYTORCH_ALLOC_CONF`` has them, with ours: torch forgets what is left out."""
    others = [field for field in settings.split(",") if field and not field.startswith(f"{KEY}:")]
    return ",".join([*others, f"{KEY}:{max_cached_bytes >> 20}"])
