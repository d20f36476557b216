"""Handles of device memory: the ordinal is the receiver's own, by UUID, and nothing else of a handle changes.

No device here: the tuples are those that torch's function for device memory takes, and what rebuilds them is a
stand-in.  ``benchmarks/gpu.py`` maps real memory.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.device import detect
from mcore_rl.sync import device_handle
from mcore_rl.sync.device_handle import DeviceMemory, ordinal_place, with_own_ordinal

NAMES = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
PLATFORM = replace(detect(Device.cpu), kind=Device.cuda, device_type="cuda", num_devices=2)
UUIDS = ("9c1d0001", "9c1d0002", "9c1d0003")


def rebuild_named(tensor_cls: type, tensor_size: tuple[int, ...], storage_device: int, storage_handle: bytes) -> object:
    """Four of the arguments of torch's function, which needs a device; the ordinal at another place."""
    return tensor_cls, tensor_size, storage_device, storage_handle


def test_torch_still_names_the_ordinal_as_we_look_for_it() -> None:
    assert ordinal_place(rebuild_cuda_tensor) == NAMES.index("storage_device") == 6
    assert ordinal_place(rebuild_named) == 2


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (UUIDS, UUIDS[1:], 0),  # masks 0,1,2 and 1,2: device 1 there is device 0 here
        (UUIDS[1:], UUIDS, 1),
        (UUIDS[1:2], tuple(reversed(UUIDS)), 1),
        (tuple(reversed(UUIDS)), UUIDS[1:2], 0),
        (UUIDS, UUIDS, 1),
    ],
)
def test_the_ordinal_is_the_one_of_this_side(theirs: tuple[str, ...], ours: tuple[str, ...], expected: int) -> None:
    arguments = tuple(f"the {name}" for name in NAMES)
    place = ordinal_place(rebuild_cuda_tensor)
    sent = (*arguments[:place], theirs.index(UUIDS[1]), *arguments[place + 1 :])
    got = with_own_ordinal(sent, place, UUIDS[1], ours)
    assert got == (*arguments[:place], expected, *arguments[place + 1 :])


def test_a_device_that_this_side_does_not_see_is_refused() -> None:
    with pytest.raises(SyncError, match=r"device 9c1d0001 .* sees 9c1d0002, 9c1d0003\. Put both"):
        with_own_ordinal((7,), 0, UUIDS[0], UUIDS[1:])
    with pytest.raises(SyncError, match="sees no device"):
        with_own_ordinal((7,), 0, UUIDS[0], ())


def test_a_handle_crosses_two_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_side(uuids: tuple[str, ...]) -> None:
        monkeypatch.setattr(device_handle, "device_uuids", lambda platform: uuids)

    monkeypatch.setattr(
        device_handle, "reduce_tensor", lambda tensor: (rebuild_named, (torch.Tensor, (3,), 2, b"memory"))
    )
    monkeypatch.setattr(device_handle, "rebuild_device_tensor", rebuild_named)
    memory = DeviceMemory(PLATFORM, torch.device("cpu"))
    on_side(UUIDS)
    tensor, handle = memory.create(3)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (3,))
    on_side(UUIDS[2:])
    assert memory.map(handle) == (torch.Tensor, (3,), 0, b"memory")
    on_side(UUIDS[:2])
    with pytest.raises(SyncError, match=UUIDS[2]):
        memory.map(handle)


@pytest.mark.parametrize("torch_has_the_getter", [True, False], ids=["2.13", "2.11"])
@pytest.mark.parametrize("settings", ["max_split_size_mb:512,expandable_segments:True", "max_split_size_mb:512"])
def test_memory_that_others_map_is_of_no_segment_that_expands(
    monkeypatch: pytest.MonkeyPatch, settings: str, torch_has_the_getter: bool
) -> None:
    """By torch's own settings while it is taken; 2.11 does not tell them."""
    get, put = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, seen = get(), list[str]()

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        seen.append(get())
        return torch.zeros(3, dtype=torch.uint8)

    monkeypatch.setattr(device_handle, "device_uuids", lambda platform: UUIDS)
    monkeypatch.setattr(
        device_handle, "reduce_tensor", lambda tensor: (rebuild_named, (torch.Tensor, (3,), 2, b"memory"))
    )
    monkeypatch.setattr(device_handle, "rebuild_device_tensor", rebuild_named)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    if not torch_has_the_getter:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setattr(torch, "empty", empty)
    try:
        put(settings)
        DeviceMemory(PLATFORM, torch.device("cpu")).create(3)
        assert seen == ["max_split_size_mb:512"] and get() == settings
    finally:
        put(before)


def test_host_memory_has_no_such_handle() -> None:
    assert reduce_tensor(torch.zeros(3))[0] is not rebuild_cuda_tensor
    with pytest.raises(AssertionError, match="no memory of a device"):
        DeviceMemory(detect(Device.cpu), torch.device("cpu")).create(3)
