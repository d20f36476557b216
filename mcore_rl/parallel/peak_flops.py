"""Peak FLOP/s of devices, from their vendors' data sheets: the denominator of MFU.

Dense rates; NVIDIA's data sheets print them with structured sparsity, which doubles them.  float32 means torch's
default, without TF32 (``torch.set_float32_matmul_precision``), which this package keeps.  For a device that is not in
the table the user gives the peak (``trainer.device_peak_tflops``); nothing is derived from clocks and cores.

Sources, all "data sheet" or product page of that name: NVIDIA A100 (2020), NVIDIA H100 (SXM, PCIe; NVL in its later
edition), NVIDIA H200 (SXM, NVL), NVIDIA L40S, NVIDIA HGX B200, NVIDIA GB200 NVL72 (its figures of one GPU); AMD
Instinct MI250X, MI300X, MI325X, MI350X and MI355X.  RTX 4090: the NVIDIA Ada architecture paper, appendix A.
"""

from __future__ import annotations

import re

from mcore_rl.config.engine import Precision

# (words of the device's name, TFLOP/s in bfloat16, in float32); the first row whose words the name contains counts.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.5, 67.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.5, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.05, 91.6),
    ("RTX 4090", 165.2, 82.6),  # with float32 sums
    ("B200", 2250.0, None),  # its sheets disagree on float32
    ("GB200", 2500.0, None),  # as B200's
    ("MI355X", 2516.6, 157.3),
    ("MI350X", 2306.9, 144.2),
    ("MI300X", 1307.4, 163.4),
    ("MI325X", 1307.4, 163.4),
    ("MI250X", 191.5, 47.85),  # of one of its two dies: torch sees each as a device; the sheet gives both together
)


def peak_tflops(device_name: str, precision: Precision) -> float | None:
    """TFLOP/s of a device for matrices of ``precision``; None if unknown.

    device_name: ``Platform.device_name``.  Unknown for different devices in one machine, for a part of one (MIG), and
    for a slower one of the same name.
    """
    names = device_name.split(", ")
    if len(names) > 1 or re.search(r"\bMIG\b|\bLaptop\b|\b4090 D\b", device_name):
        return None
    for words, bfloat16, float32 in PEAKS:
        if all(re.search(rf"\b{word}\b", device_name) for word in words.split()):
            return bfloat16 if precision is Precision.bfloat16 else float32
    return None
