"""Devices by the names that drivers give them."""

from __future__ import annotations

import pytest

from mcore_rl.config.engine import Precision
from mcore_rl.parallel.peak_flops import PEAKS, peak_tflops


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 67.0),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA H200", 989.5, 67.0),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA B200", 2250.0, None),
        ("NVIDIA GB200", 2500.0, None),
        ("AMD Instinct MI355X", 2516.6, 157.3),
        ("AMD Instinct MI350X", 2306.9, 144.2),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("AMD Instinct MI325X", 1307.4, 163.4),
        ("AMD Instinct MI250X", 191.5, 47.85),
    ],
)
def test_known_devices(name: str, bfloat16: float, float32: float | None) -> None:
    assert peak_tflops(name, Precision.bfloat16) == bfloat16
    assert peak_tflops(name, Precision.float32) == float32


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GH200 480GB",  # another chip, whatever its name contains
        "NVIDIA GB300",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA H20",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB",
        "AMD Instinct MI300A",
        "Intel(R) Xeon(R) Processor @ 2.60GHz",
        "",
    ],
)
def test_others_have_no_peak(name: str) -> None:
    assert all(peak_tflops(name, precision) is None for precision in Precision)


def test_no_row_is_hidden_behind_another() -> None:
    assert all(peak_tflops(f"X {words}", Precision.bfloat16) == peak for words, peak, _ in PEAKS)
