"""Builds the kit out of PyPI's wheels alone: no GPU, no compiler of device code.

pip installs for another Python and machine than this one.  What no run imports goes, device code of other GPUs is
zeroed, symbols are stripped, and the rest becomes three archives that unpack beside one another.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path

from benchmarks.gpu_run.fatbin import keep_device
from benchmarks.gpu_run.packages import PYTHON, ROOT, SOURCE_ONLY, TRANSFORMER_ENGINE, requirements
from benchmarks.gpu_run.unpack import ARCHIVE, KitError

MIB = 2**20
LIMIT_BYTES = 64 * MIB  # of what is carried to such a machine in one call, the working tree with it
SM = 90  # H100 and H200
# pip takes a tag literally: a wheel for glibc 2.17 is none for 2.28.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 17, 24, 26, 27, 28, 31, 34, 35, 39)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
FOR_THE_MACHINE = (
    "--no-deps",
    "--only-binary=:all:",
    "--python-version",
    PYTHON,
    "--implementation",
    "cp",
    *(word for platform in PLATFORMS for word in ("--platform", platform)),
)
# No run imports them.  FlashAttention 4, DeepGEMM and qutlass need a newer torch, or other GPUs.
PRUNED = (
    "bin",
    "share",
    "ray/jars",
    "ray/rllib",
    "ray/cpp",
    "ray/dashboard/client",
    "ray/serve",
    "ray/llm",
    "ray/tune",
    "vllm/vllm-rs",
    "vllm/benchmarks",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/_flash*_C*.so",
    "vllm/_qutlass_C*.so",
    "vllm/_deepselect_C*.so",
    "**/*.js.map",
    "**/__pycache__",
    "transformer_engine/jax",
    "transformer_engine/wheel_lib/*_ep*",
)
WITH_DEVICE_CODE = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
STRIPPED = (
    "ray/_raylet.so",
    "ray/core/src/ray/*/gcs_server",
    "ray/core/src/ray/*/raylet",
    "vllm/*.so",
    "vllm/vllm_flash_attn/*.so",
    "llguidance/*.so",
    "openai_harmony/*.so",
    "pydantic_core/*.so",
    "transformer_engine/wheel_lib/*.so",
    "transformer_engine_torch*.so",
)
CORE = "transformer_engine/wheel_lib/libtransformer_engine.so"
COMPILED = f"transformer_engine_torch.cpython-{PYTHON.replace('.', '')}-*.so"
TUNED = "vllm/model_executor/layers/**/configs/*.json"  # launch parameters of kernels, one file a GPU
TUNED_FOR = ("H100", "H200")


def build(out: Path) -> None:
    """Build the kit in the folder ``out``, in the place of an older one, and print its size.

    KitError: a tool is missing, pip cannot install, or the kit is larger than what a call carries.
    """
    need_strip()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        install(site)
        finish(site, WITH_DEVICE_CODE, out)


def build_transformer_engine(compiled: Path, out: Path) -> None:
    """Build a kit of Transformer Engine alone in ``out``: a second call brings it beside the first one's.

    compiled: what tools/build_transformer_engine.sh wrote.  KitError: as ``build``, or nothing was compiled there.
    """
    need_strip()
    version = compiled_version(compiled)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        wheels = [f"{name}=={version}" for name in TRANSFORMER_ENGINE]
        pip("install", "--no-compile", "--target", str(site), *FOR_THE_MACHINE, *wheels)
        for module in compiled.glob(COMPILED):
            shutil.copy(module, site)
        finish(site, (CORE,), out)


def compiled_version(compiled: Path) -> str:
    """The version of the sources of the module in ``compiled``.  KitError: there is none, for that Python."""
    information = compiled / "PKG-INFO"
    if not information.is_file() or not any(compiled.glob(COMPILED)):
        raise KitError(
            f"{compiled} has no {COMPILED} with its PKG-INFO: tools/build_transformer_engine.sh makes them, "
            f"with a Python {PYTHON}"
        )
    return str(Parser().parsestr(information.read_text(encoding="utf-8"))["Version"])


def finish(site: Path, with_device_code: Sequence[str], out: Path) -> None:
    """Take out of ``site`` what that machine does not need, pack the rest in ``out``, and print its size."""
    prune(site)
    for name in with_device_code:
        path = site / name
        if not path.is_file():
            package, _, file = name.partition("/")
            raise KitError(f"{package} has no {file} any more: see WITH_DEVICE_CODE and CORE in {__file__}")
        done = keep_device(path, SM)
        print(
            f"{path.name}: device code {done.kept / MIB:.1f} MiB kept, {done.zeroed / MIB:.1f} zeroed; "
            f"{done.emptied} of {done.containers} containers have nothing left for sm_{SM}"
        )
    for path in sorted({path for pattern in STRIPPED for path in site.glob(pattern)}):
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
    pack(site, out)
    say_size(out)


def need_strip() -> None:
    """KitError where binutils are missing."""
    if shutil.which("strip") is None:
        raise KitError("there is no strip: install binutils (Debian, Ubuntu: apt install binutils)")


def install(site: Path) -> None:
    """Install what the machine lacks into ``site``, from wheels for it."""
    wheels = site.with_name("wheels")
    named = dict(line.split("==") for line in requirements())
    sources = [f"{name}=={named.pop(name)}" for name in SOURCE_ONLY]
    pip("wheel", "--no-deps", "--wheel-dir", str(wheels), *sources)
    lines = [f"{name}=={version}" for name, version in named.items()]
    built = list(map(str, wheels.glob("*.whl")))
    pip("install", "--no-compile", "--target", str(site), *FOR_THE_MACHINE, *built, *lines)


def pip(*words: str) -> None:
    """Run pip; KitError with the end of what it said where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KitError(f"pip {words[0]} failed: {done.stderr.strip()[-2_000:]}")


def prune(site: Path) -> None:
    """Remove what no run imports."""
    for pattern in PRUNED:
        for path in list(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in site.glob(TUNED):
        if not any(name in path.name for name in TUNED_FOR):
            path.unlink()


def part_of(name: str) -> str:
    """The archive that the file ``name`` of a site goes into: of three that take about as long to unpack."""
    if name.startswith("ray/"):
        return "ray"
    if name.startswith(("vllm/", "transformer_engine")) and name.endswith(".so"):
        return "kernels"
    return "python"


def pack(site: Path, out: Path) -> None:
    """Write the archives of ``site`` to ``out``, in the place of older ones; equal files give equal bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for older in out.glob(f"*{ARCHIVE}"):
        older.unlink()
    by_part: dict[str, list[Path]] = {}
    for path in sorted(site.rglob("*")):
        if path.is_file():
            by_part.setdefault(part_of(path.relative_to(site).as_posix()), []).append(path)
    with ThreadPoolExecutor() as pool:
        written = [pool.submit(write_archive, out / f"{part}{ARCHIVE}", site, paths) for part, paths in by_part.items()]
        for each in written:
            each.result()


def write_archive(path: Path, site: Path, files: Sequence[Path]) -> None:
    """Write ``files`` below ``site`` to the archive ``path``."""
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    with (
        lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        for file in files:
            archive.add(file, file.relative_to(site).as_posix(), filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = 0
    member.gid = 0
    member.uname = ""
    member.gname = ""
    member.mtime = 0
    return member


def say_size(out: Path) -> None:
    """Print how large the kit and the working tree are; KitError where they are more than a call carries."""
    kit = sum(path.stat().st_size for path in out.glob(f"*{ARCHIVE}"))
    tree = working_tree_bytes()
    words = f"kit {kit / MIB:.1f} MiB and working tree {tree / MIB:.1f} MiB, of {LIMIT_BYTES / MIB:.0f}"
    if kit + tree > LIMIT_BYTES:
        raise KitError(f"{words}: {(kit + tree - LIMIT_BYTES) / MIB:.1f} MiB too many. Add to PRUNED in {__file__}")
    print(f"{out}: {words}")


def working_tree_bytes() -> int:
    """The bytes of all files that git tracks or does not ignore; 0 where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    paths = {ROOT / name for name in listed.stdout.split("\0") if name}
    return sum(path.lstat().st_size for path in paths if path.exists())
