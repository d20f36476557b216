"""What is read of torch's accelerator side, with a torch that answers as if there were two devices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.device_details import device_uuids, pinned_bytes

CPU = detect(Device.cpu)
TWO = replace(CPU, kind=Device.cuda, device_type="cuda", num_devices=2)


def test_uuids_are_in_the_order_of_ordinals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    assert device_uuids(TWO) == ("uuid-0", "uuid-1")
    assert device_uuids(CPU) == ()


def test_page_locked_bytes_are_those_that_the_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"allocated_bytes.current": 2**20, "active_bytes.current": 5}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: held)
    assert pinned_bytes(TWO) == 2**20
    assert pinned_bytes(CPU) == 0


def test_torch_still_has_both() -> None:
    assert "allocated_bytes.{current" in str(torch.cuda.host_memory_stats.__doc__)
    assert (
        "uuid" in dir(torch._C._CudaDeviceProperties) if torch.version.cuda else callable(torch.cuda.host_memory_stats)
    )
