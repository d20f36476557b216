"""Resolve every rung with uv, and record what the distributions that only the rung cuda has require.

    python tools/record_requirements.py            # writes tests/accelerators/requirements.json
    python tools/record_requirements.py --dry-run  # resolves alone: every rung, Python and kind of machine

No interpreter but this one is needed: uv is told which Python and machine to resolve for, and takes wheels alone, so
that a version that has none for one of them is found.  tests/accelerators/test_requirements.py holds pyproject.toml
and constraints.txt against the record, without a network or uv.  What constraints.txt has too is not recorded: that is
installed on every rung, and asked there.  Needs an index whose torch is the CUDA build, as that of PyPI is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Set
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "accelerators" / "requirements.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = tuple(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"])))
RUNGS = ("cpu", "cuda", "rocm")
MACHINES = ("x86_64", "aarch64")  # aarch64: Grace, of GH200 and GB200
GLIBC = "manylinux_2_34"  # RHEL 9's; Ubuntu 22.04 and Debian 12 have newer ones
# Published as source alone.  The first is pure Python, of omegaconf; the second is compiled against the torch there is.
SOURCES = ("antlr4-python3-runtime", "transformer-engine-torch")
# Source distributions whose metadata is computed by running them, with nvcc.  From build_tools/pytorch.py and
# transformer_engine/pytorch/setup.py of Transformer Engine 2.11 and 2.20, with a torch that is built for CUDA 13.
COMPUTED = {
    "transformer-engine-torch==2.11.0": [
        "torch>=2.1",
        "einops",
        "onnxscript",
        "onnx",
        "packaging",
        "pydantic",
        "transformer_engine_cu13==2.11.0",
    ],
    "transformer-engine-torch==2.20.2": [
        "torch>=2.1",
        "einops",
        "onnxscript",
        "onnx",
        "packaging",
        "pydantic",
        "nvdlfw-inspect",
        "nvidia-cudnn-frontend>=1.29.0",
        "transformer_engine_cu13==2.20.2",
    ],
}
NOT_OURS = {"transformer-engine-cu12"}  # in the source distribution's own metadata, which was written beside CUDA 12
# Recorded although the lock has it: on the CPU rung it is another build, which requires other things.
OTHER_BUILD = {"torch"}


def locked(python: str = PYTHONS[0]) -> dict[str, str]:
    """name -> version of constraints.txt for ``python``: a line may have a marker."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [pin for pin in map(Requirement, filter(None, lines)) if holds_for(python, pin)]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


def holds_for(python: str, requirement: Requirement) -> bool:
    """Whether ``requirement`` is one of that Python on Linux."""
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python, "extra": ""})


def uv_program() -> str | None:
    """The uv of this environment, or one on PATH."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


def resolve(extra: str, python: str, machine: str = "x86_64") -> dict[str, str]:
    """name -> version of what ``mcore_rl[extra,dev]`` comes to under the lock, as uv resolves it from wheels.

    Raises:
        SystemExit: it does not resolve, with uv's own words; or there is no uv.
    """
    uv = uv_program()
    if uv is None:
        raise SystemExit("there is no uv: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "resolved.txt"
        command = [
            uv,
            "pip",
            "compile",
            "pyproject.toml",
            f"--extra={extra}",
            "--extra=dev",
            "--quiet",
            "--no-header",
            f"--python-version={python}",
            f"--python-platform={machine}-{GLIBC}",
            "--no-annotate",
            "--only-binary=:all:",
            *(f"--no-binary={name}" for name in SOURCES),
            "--constraint=constraints.txt",
            f"--output-file={out}",
        ]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"mcore_rl[{extra},dev] does not resolve on Python {python}, {machine}:\n{run.stderr}")
        pairs = (line.split("==") for line in out.read_text().splitlines())
        return {canonicalize_name(name): version for name, version in pairs}


def metadata(pins: list[str]) -> list[dict[str, object]]:
    """The core metadata of ``NAME==VERSION`` each, as pip reads it from the index without installing anything."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--dry-run",
            "--quiet",
            "--no-deps",
            "--ignore-installed",
            "--only-binary=:all:",
            f"--report={report}",
            *pins,
        ]
        subprocess.run(command, check=True)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def of_the_rung(requires: dict[str, list[str]]) -> dict[str, list[str]]:
    """``requires`` (NAME==VERSION -> lines) without what does not hold on Linux, or for no extra that is asked for."""
    linux = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
    pythons = [linux | {"python_version": python, "python_full_version": f"{python}.1"} for python in PYTHONS]
    asked: dict[str, set[str]] = {}
    for line in [*PROJECT["optional-dependencies"]["cuda"], *(line for lines in requires.values() for line in lines)]:
        requirement = Requirement(line)
        asked.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)

    def holds(name: str, line: str) -> bool:
        marker = Requirement(line).marker
        extras = asked.get(name, set()) | {""}
        return marker is None or any(
            marker.evaluate(python | {"extra": extra}) for python in pythons for extra in extras
        )

    return {pin: [line for line in lines if holds(pin.split("==")[0], line)] for pin, lines in requires.items()}


def in_turns(pins: Set[str]) -> list[list[str]]:
    """``pins`` in lists in which every name comes once: pip takes one version of a distribution at a time."""
    turns: list[list[str]] = []
    for _, versions in itertools.groupby(sorted(pins), lambda pin: pin.split("==")[0]):
        for place, pin in enumerate(versions):
            if place == len(turns):
                turns.append([])
            turns[place].append(pin)
    return turns


def main() -> None:
    """Resolve, then record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="resolve everything, and record nothing")
    options = parser.parse_args()
    if options.dry_run:
        for rung, machine, python in itertools.product(RUNGS, MACHINES, PYTHONS):
            print(
                f"{rung}, {machine}, Python {python}: {len(resolve(rung, python, machine))} distributions", flush=True
            )
        return
    lock = locked()
    pythons: dict[str, list[str]] = {}  # pin -> where it is resolved to
    for python in PYTHONS:
        resolved = resolve("cuda", python)
        for name, version in resolved.items():
            if name not in NOT_OURS and (name not in lock or name in OTHER_BUILD):
                pythons.setdefault(f"{name}=={version}", []).append(python)
        print(f"Python {python}: resolved, {len(resolved)} distributions")
    own = pythons.keys()
    requires = {pin: lines for pin, lines in COMPUTED.items() if pin in own}
    for pins in in_turns(own - requires.keys()):
        for item in metadata(pins):
            pin = f"{canonicalize_name(str(item['name']))}=={item['version']}"
            if pin not in pins:
                raise SystemExit(f"pip is given {pin}, which uv did not resolve: clear PIP_FIND_LINKS and the like")
            lines = item.get("requires_dist", [])
            assert isinstance(lines, list)
            requires[pin] = [str(line) for line in lines]
    source = "Requires-Dist of the index's wheels for Linux on x86_64: tools/record_requirements.py"
    only_on = {pin: on for pin, on in sorted(pythons.items()) if len(on) < len(PYTHONS)}
    record = {"source": source, "only_on": only_on, "requires": dict(sorted(of_the_rung(requires).items()))}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RECORD.relative_to(ROOT)}: {len(requires)} distributions")


if __name__ == "__main__":
    main()
