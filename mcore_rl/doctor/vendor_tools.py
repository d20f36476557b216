"""What the vendors' tools print, and what their libraries are called: parsers and tables, no judgement.

The tools' formats are not promised to stay; tests hold the parsers to recorded outputs of several versions
(tests/doctor/recorded).  What a parser does not find is None or missing, never an error.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_rl.config.engine import Device

# Of each family one copy may be loaded: two copies keep two states, and call into each other's sublibraries.
# name -> pattern of the file names that belong to it
LIBRARIES = {
    Device.cuda: {
        "libcudnn": r"libcudnn(_\w+)?\.so",
        "libcudart": r"libcudart[.\-\w]*\.so",
        "libnccl": r"libnccl\.so",
        "libcublas": r"libcublas(Lt)?\.so",
    },
    Device.rocm: {
        "libMIOpen": r"libMIOpen\.so",
        "libamdhip64": r"libamdhip64\.so",
        "librccl": r"librccl\.so",
        "libhipblaslt": r"libhipblaslt\.so",
    },
}
# Several of these in one environment overwrite each other's files, or bring two versions of a library.
LIBRARY_PACKAGES = ("nvidia-cudnn", "nvidia-cuda-runtime", "nvidia-nccl", "nvidia-cublas")
TOOLS = {Device.cuda: "nvidia-smi", Device.rocm: "rocm-smi"}
SLOW_LINKS_REMEDY = (
    "Run with NCCL_DEBUG=INFO: it says which links are taken. Links that are down, a missing RDMA plug-in, or ACS on "
    "PCIe switches are the usual causes"
)
EXCLUSIVE = ("E. Process", "E. Thread", "Prohibited")  # compute modes in which a device takes no second process


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One accelerator as its vendor's tool sees it; None where the tool does not say.

    uncorrected: ECC errors that were not corrected since the driver was loaded.
    """

    index: int
    name: str
    used_mib: int | None = None
    uncorrected: int | None = None
    compute_mode: str = ""


@dataclass(frozen=True, kw_only=True)
class DriverReport:
    """driver: version of the kernel driver.  runtime: the newest CUDA that it supports; "" if it does not say."""

    driver: str
    runtime: str
    gpus: tuple[GpuState, ...]


def tool_output(command: Sequence[str], limit_s: float) -> str | None:
    """What ``command`` prints on standard output; None if there is no such program or it fails.

    TimeoutError: it does not end within ``limit_s``, as where a device hangs; it may then stay behind, unkillable.
    """
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait not even that ends it
            process.wait(1.0)
        raise TimeoutError(f"{' '.join(command)} did not end within {limit_s:g} s") from error
    return out if process.returncode == 0 else None


def driver_report(kind: Device, limit_s: float) -> DriverReport | None:
    """What the vendor's tool says of driver and devices; None if it is not here.  Raises TimeoutError if it hangs."""
    if kind is Device.cuda:
        text = tool_output(["nvidia-smi"], limit_s)
        return None if text is None else parse_nvidia_smi(text)
    products = tool_output(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"], limit_s)
    # By itself: asked for both at once, some versions answer with the last table alone.
    driver = tool_output(["rocm-smi", "--showdriverversion", "--json"], limit_s)
    return None if products is None else parse_rocm_smi(products, driver or "")


def links(kind: Device, limit_s: float) -> dict[tuple[int, int], str] | None:
    """(device, device) -> kind of their link; None without the tool.  Raises TimeoutError if it hangs."""
    if kind is Device.cuda:
        text = tool_output(["nvidia-smi", "topo", "-m"], limit_s)
        return None if text is None else parse_nvidia_topology(text)
    text = tool_output(["rocm-smi", "--showtopotype"], limit_s)
    return None if text is None else parse_rocm_topology(text)


def is_fast(link: str) -> bool:
    """Whether a link is NVLink or xGMI, and no PCIe path."""
    return bool(re.fullmatch(r"NV\d+|XGMI", link))


def parse_nvidia_smi(text: str) -> DriverReport:
    """The table that ``nvidia-smi`` prints, of drivers 331 to 610."""
    driver = re.search(r"(?:Driver|KMD) Version:\s*([\d.]+)", text)
    runtime = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", text)
    gpus: list[GpuState] = []
    head: tuple[re.Match[str], str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        name = re.fullmatch(r"(\d+)\s{1,2}(\S.*?)\s+(?:On|Off|N/A)", cells[0])
        memory = re.fullmatch(r"(\d+)MiB\s*/\s*\d+MiB", cells[1])
        if name is not None:
            head = name, cells[2]
        elif head is not None and memory is not None:
            gpus.append(
                GpuState(
                    index=int(head[0][1]),
                    name=head[0][2],
                    used_mib=int(memory[1]),
                    uncorrected=int(head[1]) if head[1].isdecimal() else None,
                    compute_mode=cells[2].partition(" ")[2].strip(),
                )
            )
            head = None
    return DriverReport(driver=driver[1] if driver else "", runtime=runtime[1] if runtime else "", gpus=tuple(gpus))


def parse_rocm_smi(products: str, driver: str) -> DriverReport:
    """The JSON of ``rocm-smi --showproductname --showmeminfo vram`` and of ``--showdriverversion``."""
    gpus = []
    for card, row in _json_object(products).items():
        if number := re.fullmatch(r"card(\d+)", card):
            lower = {key.lower(): value for key, value in row.items()}  # "Card series" until ROCm 5, then "Card Series"
            used = str(lower.get("vram total used memory (b)", ""))
            gpus.append(
                GpuState(
                    index=int(number[1]),
                    name=str(lower.get("card series", "")),
                    used_mib=int(used) // 2**20 if used.isdecimal() else None,
                )
            )
    version = _json_object(driver).get("system", {}).get("Driver version", "")
    return DriverReport(driver=str(version), runtime="", gpus=tuple(gpus))


def _json_object(text: str) -> dict[str, dict[str, object]]:
    """The JSON object in ``text``, which may have warnings around it; {} if there is none."""
    begin = text.find("{")
    end = text.rfind("}")
    with suppress(json.JSONDecodeError):
        value = json.loads(text[begin : end + 1])
        if isinstance(value, dict):
            return {key: row for key, row in value.items() if isinstance(row, dict)}
    return {}


def parse_nvidia_topology(text: str) -> dict[tuple[int, int], str]:
    """``nvidia-smi topo -m``: NV# is NVLink; PIX, PXB, PHB, NODE and SYS are ever longer ways over PCIe."""
    return _matrix(text.splitlines())


def parse_rocm_topology(text: str) -> dict[tuple[int, int], str]:
    """The table "Link Type between two GPUs" of ``rocm-smi --showtopo`` or ``--showtopotype``."""
    _, _, after = text.partition("Link Type between two GPUs")
    table = after.partition("\n=")[0]
    return _matrix(table.splitlines()[1:])


def _matrix(lines: Iterable[str]) -> dict[tuple[int, int], str]:
    columns: list[int] = []
    pairs: dict[tuple[int, int], str] = {}
    for line in lines:
        words = re.sub(r"\x1b\[[\d;]*m", "", line).split()  # nvidia-smi underlines the header
        numbers = [re.fullmatch(r"GPU(\d+)", word) for word in words]
        if not columns and len(numbers) > 0 and numbers[0] and (len(words) == 1 or numbers[1] or words[1] == "CPU"):
            columns = [int(each[1]) for each in numbers if each]
        elif columns and numbers and numbers[0]:
            row = int(numbers[0][1])
            pairs |= {(row, column): link for column, link in zip(columns, words[1:], strict=False) if column != row}
    return pairs


def libraries_in(maps: str, kind: Device) -> dict[str, set[str]]:
    """Family of libraries -> the directories from which a process has loaded it.

    maps: the text of its ``/proc/PID/maps`` (proc(5)).  Two directories are two copies.
    """
    loaded: dict[str, set[str]] = {}
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5:]
        for family, pattern in LIBRARIES.get(kind, {}).items():
            if path and re.match(pattern, Path(path[0]).name):
                loaded.setdefault(family, set()).add(str(Path(path[0]).parent))
    return loaded


def vendor_libraries_in(maps: str) -> dict[str, set[str]]:
    """``libraries_in`` of all vendors, for a machine without an accelerator."""
    return libraries_in(maps, Device.cuda) | libraries_in(maps, Device.rocm)


def doubled_packages(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Distributions of one library for several versions of the runtime, such as for CUDA 12 beside CUDA 13."""
    there = sorted({name.lower().replace("_", "-") for name in names})
    groups = [
        tuple(name for name in there if re.fullmatch(rf"{package}(-cu\d+)?", name)) for package in LIBRARY_PACKAGES
    ]
    return [group for group in groups if len(group) > 1]


def torch_build() -> Device:
    """The device that torch was built for.  A build for an accelerator runs on a CPU too, and loads its libraries."""
    if torch.version.hip:
        return Device.rocm
    return Device.cuda if torch.version.cuda else Device.cpu


def torch_runtime() -> str:
    """The CUDA that torch was built for; "" of another build: no other driver says what it supports."""
    return str(torch.version.cuda or "")
