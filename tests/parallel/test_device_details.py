"""What is read of torch's accelerator side, with a torch that answers as if there were two devices."""

from __future__ import annotations

import socket
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from megatron.core.tensor_parallel import layers

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel import device_details as under_test
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.device_details import (
    device_uuids,
    driver_version,
    interface_to,
    interfaces,
    pinned_bytes,
    work_queues,
)

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


@pytest.mark.parametrize(
    ("kind", "text", "version"),
    [
        (Device.cuda, "NVRM version: NVIDIA UNIX Kernel Module  570.86.15  Thu Jan 2\nGCC version: 12.2", "570.86.15"),
        (Device.rocm, "6.12.12\n", "6.12.12"),
        (Device.rocm, "unknown\n", ""),
        (Device.rocm, None, ""),
        (Device.cpu, None, ""),
    ],
)  # fmt: skip
def test_the_driver_s_version_is_read_from_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Device, text: str | None, version: str
) -> None:
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(under_test, "DRIVERS", {Device.cuda: path, Device.rocm: path})
    assert driver_version(kind) == version


H100 = replace(TWO, queues_reorder=True)
TP, CP = ParallelConfig(tp=2), ParallelConfig(cp=2)
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}


@pytest.mark.parametrize(
    ("platform", "parallel", "environ", "wanted"),
    [
        (H100, TP, {}, ONE_QUEUE),
        (H100, CP, {}, ONE_QUEUE),
        (H100, ParallelConfig(pp=2, ep=2), {}, {}),
        (TWO, TP, {}, {}),
        (CPU, TP, {}, {}),
        (H100, TP, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        (H100, TP, {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "2"}, ONE_QUEUE | {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "2"}),
    ],
)
def test_one_queue_of_work_where_communication_hides_and_the_user_says_nothing(
    platform: Platform, parallel: ParallelConfig, environ: dict[str, str], wanted: dict[str, str]
) -> None:
    assert work_queues(platform, parallel, environ) == wanted


@pytest.mark.parametrize("set_", [True, False])
def test_megatron_misses_the_queue_where_it_is_not_set(monkeypatch: pytest.MonkeyPatch, set_: bool) -> None:
    """By the installed Megatron's own warning, in the product whose all-reduce is to hide behind another."""
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    monkeypatch.setattr(linear, "warned", False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name, value in work_queues(H100, TP, {}).items() if set_ else ():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        linear(torch.ones(1, 1), torch.ones(1, 1), None, False, True, False, tp_group="of nobody")
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in str(each.message) for each in said) is not set_
