"""The parsers, held to what real machines printed (tests/doctor/recorded/SOURCES.md says where that is from)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.doctor.vendor_tools import (
    GpuState,
    doubled_packages,
    is_fast,
    libraries_in,
    parse_nvidia_smi,
    parse_nvidia_topology,
    parse_rocm_smi,
    parse_rocm_topology,
    tool_output,
    vendor_libraries_in,
)

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


@pytest.mark.parametrize(
    ("file", "driver", "runtime", "gpus"),
    [
        (
            "nvidia_smi_535_h100.txt",
            "535.129.03",
            "12.2",
            [("NVIDIA H100 80GB HBM3", 72459, 0, "Default")],
        ),
        (
            "nvidia_smi_580_a100.txt",
            "580.126.09",
            "13.0",
            [
                ("NVIDIA A100-SXM4-40GB", 598, 0, "E. Process"),
                ("NVIDIA A100-SXM4-40GB", 602, 0, "E. Process"),
            ],
        ),
        (
            "nvidia_smi_610_b200.txt",
            "610.43.02",
            "13.3",
            [("NVIDIA B200", 0, 0, "Default"), ("NVIDIA B200", 0, 0, "Default")],
        ),
        (
            "nvidia_smi_331_gtx680.txt",
            "331.62",
            "",
            [("GeForce GTX 680", 9, None, "Default"), ("GeForce GTX 680", 9, None, "Default")],
        ),
    ],
)
def test_nvidia_smi_of_several_drivers(
    file: str, driver: str, runtime: str, gpus: list[tuple[str, int, int | None, str]]
) -> None:
    report = parse_nvidia_smi(recorded(file))
    assert (report.driver, report.runtime) == (driver, runtime)
    assert report.gpus == tuple(
        GpuState(index=index, name=name, used_mib=used, uncorrected=errors, compute_mode=mode)
        for index, (name, used, errors, mode) in enumerate(gpus)
    )


def test_an_uncorrected_memory_error_is_read() -> None:
    text = recorded("nvidia_smi_580_a100.txt").replace("00000000:10:1D.0 Off |                    0", "x |  3")
    assert [gpu.uncorrected for gpu in parse_nvidia_smi(text).gpus] == [0, 3]


def test_what_is_no_table_has_no_devices() -> None:
    report = parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert (report.driver, report.runtime, report.gpus) == ("", "", ())


def test_nvidia_topology_over_nvlink_and_over_pcie() -> None:
    pairs = parse_nvidia_topology(recorded("nvidia_topo_h100.txt"))
    assert len(pairs) == 8 * 7 and set(pairs.values()) == {"NV18"}, "network cards are left out"
    pairs = parse_nvidia_topology(recorded("nvidia_topo_pcie.txt"))
    assert len(pairs) == 4 * 7 and pairs[0, 3] == pairs[3, 0] == "NODE" and pairs[2, 7] == "SYS"
    assert is_fast("NV18") and is_fast("XGMI") and not any(map(is_fast, ("NODE", "SYS", "PHB", "PIX", "PCIE", "X")))


def test_nvidia_topology_with_an_underlined_header_and_of_one_device() -> None:
    header = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    assert parse_nvidia_topology(f"{header}\nGPU0\t X \t0-15\t0\t\tN/A\n") == {}
    header = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    pairs = parse_nvidia_topology(f"{header}\nGPU0\t X \tSYS\t0-15\nGPU1\tSYS\t X \t0-15\n")
    assert pairs == {(0, 1): "SYS", (1, 0): "SYS"}


def test_rocm_topology() -> None:
    assert set(parse_rocm_topology(recorded("rocm_topo_pcie.txt")).values()) == {"PCIE"}
    pairs = parse_rocm_topology(recorded("rocm_topo_xgmi.txt"))
    assert len(pairs) == 4 * 3 and set(pairs.values()) == {"XGMI"}, "weights and hops are other tables"
    pairs = parse_rocm_topology(recorded("rocm_topo_two_islands.txt"))
    assert len(pairs) == 8 * 7 and pairs[0, 3] == "XGMI" and pairs[3, 4] == pairs[4, 3] == "PCIE"


def test_rocm_smi() -> None:
    report = parse_rocm_smi(recorded("rocm_smi_rx7900xt.json"), recorded("rocm_driver.json"))
    assert report.driver == "6.12.12"
    assert report.gpus == (GpuState(index=0, name="Radeon RX 7900 XT", used_mib=26),)
    report = parse_rocm_smi("WARNING: low power\n" + recorded("rocm_smi_mi100.json"), "")
    assert [(gpu.index, gpu.name, gpu.used_mib) for gpu in report.gpus] == [
        (0, "AMD Instinct MI100", None),
        (1, "AMD Instinct MI100", None),
    ]
    assert parse_rocm_smi("ERROR: no devices", "").gpus == ()


MAPS = """\
7f1c4c000000-7f1c4c021000 rw-p 00000000 00:00 0
7f1c50000000-7f1c51000000 r-xp 00000000 08:01 131 /env/nvidia/cudnn/lib/libcudnn.so.9
7f1c52000000-7f1c53000000 r-xp 00000000 08:01 132 /env/nvidia/cudnn/lib/libcudnn_ops.so.9.10.2
7f1c54000000-7f1c55000000 r-xp 00000000 08:01 133 /env/nvidia/cu13/lib/libcudart.so.13
7f1c56000000-7f1c57000000 r-xp 00000000 08:01 134 /env/a folder/libnccl.so.2 (deleted)
7ffd1c000000-7ffd1c021000 rw-p 00000000 00:00 0 [stack]
"""


def test_libraries_of_a_process() -> None:
    loaded = libraries_in(MAPS, Device.cuda)
    assert loaded == {
        "libcudnn": {"/env/nvidia/cudnn/lib"},
        "libcudart": {"/env/nvidia/cu13/lib"},
        "libnccl": {"/env/a folder"},
    }
    other = "7f1d50000000-7f1d51000000 r-xp 00000000 08:01 9 /usr/lib/x86_64-linux-gnu/libcudnn_graph.so.9.6.0\n"
    assert libraries_in(MAPS + other, Device.cuda)["libcudnn"] == {
        "/env/nvidia/cudnn/lib",
        "/usr/lib/x86_64-linux-gnu",
    }
    hashed = "7f1d50000000-7f1d51000000 r-xp 00000000 08:01 9 /env/torch/lib/libcudart-d0da41ae.so.11.0\n"
    assert libraries_in(hashed, Device.cuda) == {"libcudart": {"/env/torch/lib"}}
    assert libraries_in(MAPS, Device.cpu) == {} and libraries_in(MAPS, Device.rocm) == {}
    amd = "7f1d50000000-7f1d51000000 r-xp 00000000 08:01 9 /opt/rocm/lib/librccl.so.1.0.70000\n"
    assert vendor_libraries_in(MAPS + amd)["librccl"] == {"/opt/rocm/lib"}


def test_libraries_of_this_process_are_those_of_torchs_build() -> None:
    """The builds of torch for accelerators are linked against them, and have them on a CPU too."""
    loaded = vendor_libraries_in(Path("/proc/self/maps").read_text())
    assert bool(loaded) == (torch.version.cuda is not None or torch.version.hip is not None)


def test_packages_of_one_library_for_two_runtimes() -> None:
    names = ["torch", "nvidia_cudnn_cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-nccl-cu13"]
    assert doubled_packages(names) == [("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")]
    assert doubled_packages(names[2:]) == []


def test_a_tool_that_hangs_is_ended_and_named() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"time\.sleep.* did not end within 0\.5 s"):
        tool_output([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert time.monotonic() - begun < 30
    assert tool_output([sys.executable, "-c", "print('x')"], 60.0) == "x\n"
    assert tool_output([sys.executable, "-c", "raise SystemExit(9)"], 60.0) is None
    assert tool_output(["there-is-no-such-tool"], 1.0) is None
