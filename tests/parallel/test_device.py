"""The platform on fake hardware: an H100 machine, an MI300X machine, none; and the masks that decide who sees what."""

from __future__ import annotations

import importlib
import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import DeviceError
from mcore_rl.parallel import device as under_test
from mcore_rl.parallel.device import (
    RAY_NOSET,
    Platform,
    banner,
    consistent_environment,
    detect,
    device_of,
    empty_cache,
    memory,
    pinned_empty_like,
    reset_peak_memory,
    set_device,
    synchronize,
    visible_devices,
)

GIB = 2**30
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=79 * GIB)
A100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, total_memory=80 * GIB)
B200 = SimpleNamespace(name="NVIDIA B200", major=10, minor=0, total_memory=180 * GIB)
V100 = SimpleNamespace(name="Tesla V100-SXM2-32GB", major=7, minor=0, total_memory=32 * GIB)
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X", major=9, minor=4, total_memory=192 * GIB, gcnArchName="gfx942:sramecc+:xnack-"
)
MI250X = SimpleNamespace(
    name="AMD Instinct MI250X", major=9, minor=0, total_memory=64 * GIB, gcnArchName="gfx90a:sramecc+:xnack-"
)
MI100 = SimpleNamespace(name="AMD Instinct MI100", major=9, minor=0, total_memory=32 * GIB, gcnArchName="gfx908")
MI355X = SimpleNamespace(name="AMD Instinct MI355X", major=9, minor=5, total_memory=288 * GIB, gcnArchName="gfx950")
VEGA20 = SimpleNamespace(name="AMD Radeon VII", major=9, minor=0, total_memory=16 * GIB, gcnArchName="gfx906:sramecc+")


class FakeAccelerators:
    """What ``torch.cuda`` answers on a machine with these devices; remembers what it was asked to do."""

    def __init__(self, devices: list[SimpleNamespace]) -> None:
        self.devices = devices
        self.calls: list[object] = []

    def is_available(self) -> bool:
        return bool(self.devices)

    def device_count(self) -> int:
        return len(self.devices)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return self.devices[index]

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device))

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset_peak_memory_stats")

    def mem_get_info(self) -> tuple[int, int]:
        return 70 * GIB, 79 * GIB

    def memory_allocated(self) -> int:
        return 5 * GIB

    def memory_reserved(self) -> int:
        return 6 * GIB

    def max_memory_allocated(self) -> int:
        return 7 * GIB


def fake_torch(
    monkeypatch: pytest.MonkeyPatch,
    *devices: SimpleNamespace,
    cuda: str | None = None,
    hip: str | None = None,
    cpu_rung: bool = False,
) -> FakeAccelerators:
    """Put a torch that is built for ``cuda`` or ``hip`` and sees ``devices`` under the module.

    cpu_rung: whether it is beside vLLM's CPU build, as here.
    """
    accelerators = FakeAccelerators(list(devices))
    fake = SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=accelerators,
        device=torch.device,
        get_num_threads=lambda: 4,
        empty_like=lambda tensor, **options: (tensor, options),
        __version__="2.13.0",
    )
    monkeypatch.setattr(under_test, "torch", fake)
    if not cpu_rung:
        monkeypatch.setattr(under_test, "is_cpu_rung", lambda: False)
    return accelerators


def test_an_h100_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, H100, H100, cuda="12.8")
    platform = detect(Device.auto, {})
    assert platform == detect(Device.cuda, {})
    assert platform == Platform(
        kind=Device.cuda,
        device_type="cuda",
        backend="nccl",
        backend_name="NCCL",
        supports_bf16=True,
        supports_fp8=True,
        num_devices=2,
        device_name="NVIDIA H100 80GB HBM3",
        memory_total_bytes=79 * GIB,
        visible_devices_vars=("CUDA_VISIBLE_DEVICES",),
        queues_reorder=True,
    )
    assert banner(platform).startswith(
        "cuda: 2 x NVIDIA H100 80GB HBM3 | 79 GiB each | NCCL | torch 2.13.0 | megatron-core"
    )
    assert "bf16 yes | fp8 yes" in banner(platform)


def test_an_mi300x_machine_answers_to_torchs_names_and_prints_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, *[MI300X] * 8, hip="6.4.0")
    platform = detect(Device.auto, {})
    assert platform == detect(Device.rocm, {})
    assert (platform.kind, platform.device_type, platform.backend) == (Device.rocm, "cuda", "nccl")
    assert platform.visible_devices_vars == ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert platform.supports_bf16 and platform.supports_fp8
    assert banner(platform).startswith("rocm: 8 x AMD Instinct MI300X | 192 GiB each | RCCL | ")


@pytest.mark.parametrize(
    ("devices", "build", "bf16", "fp8"),
    [
        ([A100], {"cuda": "12.8"}, True, False),
        ([V100], {"cuda": "12.8"}, False, False),
        ([MI250X], {"hip": "6.4.0"}, True, False),  # gfx90a reports capability 9.0, which on CUDA would mean fp8
        ([MI100], {"hip": "6.4.0"}, True, False),
        ([MI355X], {"hip": "7.1.0"}, True, True),
        ([VEGA20], {"hip": "6.4.0"}, False, False),
        ([MI300X, MI250X], {"hip": "6.4.0"}, True, False),
        ([H100, A100], {"cuda": "12.8"}, True, False),  # a machine can what its weakest device can
    ],
)
def test_abilities_are_those_of_the_weakest_device(
    monkeypatch: pytest.MonkeyPatch, devices: list[SimpleNamespace], build: dict[str, str], bf16: bool, fp8: bool
) -> None:
    fake_torch(monkeypatch, *devices, **build)
    platform = detect(Device.auto, {})
    assert (platform.supports_bf16, platform.supports_fp8) == (bf16, fp8)
    assert platform.device_name == ", ".join(device.name for device in devices)
    assert platform.memory_total_bytes == min(device.total_memory for device in devices)


@pytest.mark.parametrize(
    ("devices", "build", "reorder"),
    [
        ([H100], {"cuda": "12.8"}, True),
        ([A100], {"cuda": "12.8"}, True),
        ([B200], {"cuda": "12.8"}, False),
        ([B200, H100], {"cuda": "12.8"}, True),
        ([MI250X], {"hip": "6.4.0"}, False),  # it reports capability 9.0, and has no such queues
    ],
)
def test_queues_reorder_before_blackwell(
    monkeypatch: pytest.MonkeyPatch, devices: list[SimpleNamespace], build: dict[str, str], reorder: bool
) -> None:
    fake_torch(monkeypatch, *devices, **build)
    assert detect(Device.auto, {}).queues_reorder is reorder
    assert not detect(Device.cpu, {}).queues_reorder


@pytest.mark.parametrize("build", [{}, {"cuda": "12.8"}, {"hip": "6.4.0"}])
def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch, build: dict[str, str]) -> None:
    fake_torch(monkeypatch, **build)
    platform = detect(Device.auto, {})
    assert platform == detect(Device.cpu, {})
    assert (platform.kind, platform.device_type, platform.backend) == (Device.cpu, "cpu", "gloo")
    assert (platform.num_devices, platform.supports_bf16, platform.supports_fp8) == (1, True, False)
    assert banner(platform).startswith(f"cpu: 1 x {platform.device_name} | ")
    assert "each" not in banner(platform)


def test_the_cpu_rung_computes_on_the_cpu_where_torch_could_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines could not; what is asked for is given."""
    fake_torch(monkeypatch, H100, cuda="13.0", cpu_rung=True)
    assert detect(Device.auto, {}).kind is Device.cpu
    assert detect(Device.cuda, {}).kind is Device.cuda


def test_the_cpu_can_be_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, H100, cuda="12.8")
    assert detect(Device.cpu, {}).kind is Device.cpu


@pytest.mark.parametrize(
    ("device", "build", "expected"),
    [
        (Device.cuda, {}, ["device=cuda", "is built for cpu", "extra cuda", "or write device=cpu"]),
        (Device.rocm, {}, ["device=rocm", "is built for cpu", "extra rocm", "or write device=cpu"]),
        (Device.cuda, {"hip": "6.4.0"}, ["is built for rocm", "write device=rocm or device=cpu"]),
        (Device.cuda, {"cuda": "12.8"}, ["sees no GPU (CUDA_VISIBLE_DEVICES=-1)", "nvidia-smi", "or write device=cpu"]),
        (Device.rocm, {"hip": "6.4.0"}, ["sees no GPU (CUDA_VISIBLE_DEVICES=-1)", "rocm-smi", "or write device=cpu"]),
    ],
)
def test_an_accelerator_that_is_not_here_is_refused_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, device: Device, build: dict[str, str], expected: list[str]
) -> None:
    fake_torch(monkeypatch, **build)
    with pytest.raises(DeviceError) as refused:
        detect(device, {"CUDA_VISIBLE_DEVICES": "-1"})
    for part in expected:
        assert part in str(refused.value)


def test_contradictory_masks_are_found_before_the_runtime_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, MI300X, hip="6.4.0")
    with pytest.raises(DeviceError, match="disagree"):
        detect(Device.auto, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize(
    ("kind", "device", "build"), [(Device.cuda, H100, {"cuda": "12.8"}), (Device.rocm, MI300X, {"hip": "6.4.0"})]
)
def test_work_on_an_accelerator_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, kind: Device, device: SimpleNamespace, build: dict[str, str]
) -> None:
    accelerators = fake_torch(monkeypatch, device, device, **build)
    platform = detect(kind, {})
    assert set_device(platform, 1) == torch.device("cuda", 1)
    synchronize(platform)
    empty_cache(platform)
    reset_peak_memory(platform)
    expected = [("set_device", torch.device("cuda", 1)), "synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert accelerators.calls == expected
    figures = memory(platform)
    assert (figures.allocated_bytes, figures.reserved_bytes, figures.peak_bytes) == (5 * GIB, 6 * GIB, 7 * GIB)
    assert (figures.free_bytes, figures.total_bytes) == (70 * GIB, 79 * GIB)
    assert pinned_empty_like(platform, "weight") == ("weight", {"device": "cpu", "pin_memory": True})
    with pytest.raises(DeviceError, match="local rank 2 has no device of its own: this process sees 2"):
        device_of(platform, 2)


def test_the_cpu_measures_its_resident_memory_and_can_forget_the_peak() -> None:
    platform = detect(Device.cpu, {})
    assert set_device(platform, 5) == torch.device("cpu")
    synchronize(platform)
    empty_cache(platform)
    size = 256 * 2**20
    reset_peak_memory(platform)
    before = memory(platform)
    ballast = mmap.mmap(-1, size)  # not malloc's: how much of that goes back, other code of this process may have set
    ballast[:: mmap.PAGESIZE] = b"\1" * (size // mmap.PAGESIZE)
    during = memory(platform)
    ballast.close()
    after = memory(platform)
    slack = 32 * 2**20  # pages of the interpreter and of other threads come and go meanwhile
    assert during.allocated_bytes - before.allocated_bytes > size - slack
    assert after.allocated_bytes < before.allocated_bytes + slack
    assert after.peak_bytes > before.allocated_bytes + size - slack
    for _ in range(20):  # on a busy machine the kernel was once seen to count what is freed a moment later
        reset_peak_memory(platform)
        if memory(platform).peak_bytes < before.allocated_bytes + slack:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the peak is never forgotten")
    assert 0 < before.free_bytes <= before.total_bytes == platform.memory_total_bytes
    tensor = torch.ones(3, dtype=torch.bfloat16)
    empty = pinned_empty_like(platform, tensor)
    assert (empty.shape, empty.dtype, empty.is_pinned()) == (tensor.shape, tensor.dtype, False)


def test_without_proc_the_peak_comes_from_the_kernels_accounting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PROC_STATUS", "PROC_CLEAR_REFS", "PROC_CPUINFO"):
        monkeypatch.setattr(under_test, name, tmp_path / "absent")
    platform = detect(Device.cpu, {})
    assert platform.device_name
    reset_peak_memory(platform)
    assert memory(platform).peak_bytes >= memory(platform).allocated_bytes // 2 > 2**20


def make_package(root: Path, name: str, *modules: str) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "__init__.py").write_text("raise RuntimeError('imported while only looking')")
    for module in modules:
        (root / name / f"{module}.py").write_text("")


def test_optional_kernels_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not under_test.have_transformer_engine()
    assert not under_test.have_apex()
    make_package(tmp_path, "transformer_engine")
    make_package(tmp_path, "apex", "web")  # the unrelated project of that name
    importlib.invalidate_caches()
    assert under_test.have_transformer_engine()
    assert not under_test.have_apex()
    kernels, optimizers = tmp_path / "amp_C.py", tmp_path / "apex" / "optimizers.py"
    for present, has_apex in (({kernels}, False), ({optimizers}, False), ({kernels, optimizers}, True)):
        for path in (kernels, optimizers):
            path.touch() if path in present else path.unlink(missing_ok=True)
        importlib.invalidate_caches()
        assert under_test.have_apex() is has_apex


CUDA, HIP, ROCR, ORDINAL = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


@pytest.mark.parametrize(
    ("kind", "environ", "ids"),
    [
        (Device.cuda, {}, None),
        (Device.cuda, {CUDA: "2,3"}, ("2", "3")),
        (Device.cuda, {CUDA: " 2, GPU-8932f937 "}, ("2", "GPU-8932f937")),
        (Device.cuda, {CUDA: ""}, ()),
        (Device.cuda, {CUDA: "-1"}, ()),
        (Device.cuda, {CUDA: "NoDevFiles"}, ()),
        (Device.cuda, {CUDA: "0,-1,2"}, ("0",)),
        (Device.cuda, {CUDA: "2,3", ROCR: "2,3", HIP: "7"}, ("2", "3")),  # Slurm sets ROCR on NVIDIA machines too
        (Device.rocm, {ROCR: "4,5,6"}, ("4", "5", "6")),
        (Device.rocm, {HIP: "1"}, ("1",)),
        (Device.rocm, {CUDA: "1"}, ("1",)),
        (Device.rocm, {CUDA: "1,0", HIP: "1, 0", ORDINAL: "1,0"}, ("1", "0")),
        (Device.rocm, {ROCR: "4,5,6", HIP: "2,0"}, ("6", "4")),  # the second mask indexes what the first left
        (Device.rocm, {ROCR: "4,GPU-deadbeef", CUDA: "1"}, ("GPU-deadbeef",)),
        (Device.rocm, {ROCR: "4,5", HIP: "GPU-deadbeef"}, ("GPU-deadbeef",)),
        (Device.cpu, {CUDA: "nonsense"}, None),
    ],
)
def test_masks_leave_these_devices(kind: Device, environ: dict[str, str], ids: tuple[str, ...] | None) -> None:
    assert visible_devices(kind, environ).ids == ids


@pytest.mark.parametrize(
    ("kind", "environ", "expected"),
    [
        (Device.cuda, {CUDA: "0;1"}, [f"{CUDA}=0;1 has '0;1', which is neither an index nor a UUID"]),
        (
            Device.cuda,
            {CUDA: "0,1,0"},
            [f"{CUDA}=0,1,0 names device 0 twice", "export CUDA_VISIBLE_DEVICES=0,1; unset"],
        ),
        (Device.rocm, {HIP: "0,1", CUDA: "0"}, [f"{HIP}=0,1 and {CUDA}=0 disagree", f"export {CUDA}=0,1 {HIP}=0,1"]),
        (Device.rocm, {CUDA: "0,1", ORDINAL: "0"}, [f"{CUDA}=0,1 and {ORDINAL}=0 disagree", f"unset {ROCR} {ORDINAL}"]),
        (
            Device.rocm,  # Slurm on an AMD machine: absolute numbers in both
            {ROCR: "2,3", CUDA: "2,3"},
            [
                f"{CUDA}=2,3 indexes the 2 devices that {ROCR}=2,3 leaves",
                "no 2, 3",
                f"export {CUDA}=2,3 {HIP}=2,3; unset",
            ],
        ),
        (Device.rocm, {ROCR: "", HIP: "0"}, [f"{HIP}=0 indexes the 0 devices that {ROCR}= leaves"]),
        (Device.rocm, {ROCR: "x", HIP: "0", CUDA: "1"}, ["has 'x'", "disagree", "there is no 0"]),  # all at once
    ],
)
def test_contradictions_are_named_with_what_to_export(
    kind: Device, environ: dict[str, str], expected: list[str]
) -> None:
    with pytest.raises(DeviceError) as refused:
        visible_devices(kind, environ)
    for part in expected:
        assert part in str(refused.value)


@pytest.mark.parametrize("kind", [Device.cuda, Device.rocm])
def test_a_process_started_with_a_consistent_environment_sees_exactly_its_devices(kind: Device) -> None:
    environ = {CUDA: "7", HIP: "5", ROCR: "1", ORDINAL: "2"}  # whatever the parent had
    for name, value in consistent_environment(kind, [3, "GPU-deadbeef"]).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    assert visible_devices(kind, environ).ids == ("3", "GPU-deadbeef")
    assert all(environ[name] == "1" for name in RAY_NOSET)
    assert ROCR not in environ and ORDINAL not in environ  # Ray refuses the first
    assert (HIP in environ) == (kind is Device.rocm)


def test_a_cpu_process_sees_no_accelerator_of_either_vendor() -> None:
    environ = {name: value for name, value in consistent_environment(Device.cpu, []).items() if value is not None}
    assert visible_devices(Device.cuda, environ).ids == ()
    assert visible_devices(Device.rocm, environ).ids == ()
    assert environ[HIP] == "-1"  # an empty value would be no mask at all to ROCm's runtime


@pytest.mark.parametrize(
    ("name", "major", "hip", "installed", "there"),
    [
        ("cuda", 9, None, True, True),
        ("cuda", 9, None, False, False),
        ("cuda", 8, None, True, False),
        ("cuda", 10, None, True, False),
        ("cuda", 9, "7.1", True, False),
        ("cpu", 9, None, True, False),
    ],
)
def test_flash_attention_3_is_for_hopper(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, hip: str | None, installed: bool, there: bool
) -> None:
    monkeypatch.setattr(under_test, "find_spec", lambda package: installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert under_test.have_flash_attention_3.__wrapped__(torch.device(name)) is there
