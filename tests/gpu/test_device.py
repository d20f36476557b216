"""The figures that the device layer reports, read while memory is really taken and given back."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.ground.errors import DeviceError
from mcore_rl.parallel.device import (
    Platform,
    banner,
    device_of,
    empty_cache,
    memory,
    pinned_empty_like,
    reset_peak_memory,
    set_device,
    synchronize,
)
from mcore_rl.parallel.device_details import device_uuids, pinned_bytes

BLOCK_BYTES = 256 * 2**20
SLACK_BYTES = 64 * 2**20  # what else a process may take or give back meanwhile; an allocator rounds to 2 MiB


def test_banner_names_the_device(platform: Platform) -> None:
    line = banner(platform)
    print(line)
    assert "\n" not in line
    for part in (platform.kind.value, platform.device_name, platform.backend_name, torch.__version__):
        assert part in line


def test_memory_follows_what_is_taken_and_given_back(platform: Platform) -> None:
    device = set_device(platform, 0)
    torch.ones(1, device=device)  # the first use of a device takes memory of its own
    synchronize(platform)
    empty_cache(platform)
    reset_peak_memory(platform)
    before = memory(platform)
    block = torch.ones(BLOCK_BYTES, dtype=torch.uint8, device=device)
    synchronize(platform)
    during = memory(platform)
    del block
    empty_cache(platform)
    after = memory(platform)

    assert during.allocated_bytes - before.allocated_bytes == pytest.approx(BLOCK_BYTES, abs=SLACK_BYTES)
    assert during.reserved_bytes >= during.allocated_bytes
    assert after.allocated_bytes == pytest.approx(before.allocated_bytes, abs=SLACK_BYTES)
    assert after.peak_bytes == pytest.approx(during.allocated_bytes, abs=SLACK_BYTES)
    assert 0 < during.free_bytes < during.total_bytes
    if platform.is_accelerator:  # other processes take the memory of a host while we look
        assert before.free_bytes - during.free_bytes == pytest.approx(BLOCK_BYTES, abs=SLACK_BYTES)
        assert during.total_bytes == pytest.approx(platform.memory_total_bytes, rel=0.02)


def test_host_tensors_are_page_locked_where_copies_gain_by_it(platform: Platform) -> None:
    device = set_device(platform, 0)
    source = torch.arange(10, device=device)
    kept = pinned_empty_like(platform, source)
    assert kept.device.type == "cpu"
    assert kept.is_pinned() == platform.is_accelerator
    kept.copy_(source, non_blocking=True)
    synchronize(platform)
    assert kept.tolist() == list(range(10))


def test_what_page_locking_takes_is_known(platform: Platform) -> None:
    device = set_device(platform, 0)
    like = torch.empty(200 * 2**20 + 1, dtype=torch.uint8, device=device)
    before = pinned_bytes(platform)
    kept = pinned_empty_like(platform, like)
    taken = pinned_bytes(platform) - before
    assert taken >= kept.nbytes if platform.is_accelerator else taken == 0


def test_uuids_tell_the_devices_apart(platform: Platform) -> None:
    uuids = device_uuids(platform)
    assert len(set(uuids)) == (platform.num_devices if platform.is_accelerator else 0) and all(uuids)


def test_a_local_rank_beyond_the_devices_is_refused(platform: Platform) -> None:
    assert device_of(platform, 0).type == platform.device_type
    if platform.is_accelerator:
        with pytest.raises(DeviceError, match="has no device of its own"):
            device_of(platform, platform.num_devices)
