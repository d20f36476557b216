"""What is read of torch's accelerator side, with a torch that answers as if there were two devices."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.device_details import device_uuids, interface_to, interfaces, pinned_bytes

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


def test_collectives_stay_on_the_interface_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    addresses = {each.address: name for name, several in psutil.net_if_addrs().items() for each in several}
    own = socket.gethostbyname(socket.gethostname())
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if not own.startswith("127.") and own in addresses:
        assert interfaces(own) == {"GLOO_SOCKET_IFNAME": addresses[own]}, "between nodes, NCCL's is the site's"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in interfaces("127.0.0.1"), "what the user says holds"
    assert interface_to("::2:3:4:5:6:7:8") in (None, *psutil.net_if_addrs())
