"""The schema of ``launch/clusters/NAME.yaml``: a cluster's nodes, and how Slurm and a container engine start a job.

The planner reads sizes and rates, ``mcore-rl submit`` the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from mcore_rl.config.bounds import InputFile, Interval, Lines, NonNegativeFloat, PositiveFloat, PositiveInt, check
from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import Violation


class Container(Enum):
    """The container engine of a job: none (the node's own system), pyxis (enroot), or apptainer."""

    none = "none"
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(kw_only=True)
class ContainerConfig:
    """How a job's programs are put in a container.

    image: a path or an address, as the engine takes it.  mounts: ``HOST:INSIDE``, or one path for both.
    """

    engine: Container = Container.none
    image: str = ""
    mounts: list[str] = field(default_factory=list)


class DoctorStep(Enum):
    """What a job does before its run (docs/doctor.md).

    none: nothing.  nodes: ``mcore-rl doctor --quick`` on every node by itself, before Ray starts.  quick, full: it
    examines all nodes together, over Ray.  A FAIL ends the job.  only: full, and no run.
    """

    none = "none"
    nodes = "nodes"
    quick = "quick"
    full = "full"
    only = "only"


@dataclass(kw_only=True)
class ReachedRates:
    """Rates that programs reach on a cluster, 10**9 bytes per second; None: the share of a data sheet that is assumed.

    intra_node_gb_s, inter_node_gb_s: bus bandwidth of collectives inside a node, and of a device with other nodes.
    host_link_gb_s: between a device and pinned host memory, while all devices of the node copy.
    """

    intra_node_gb_s: PositiveFloat | None = None
    inter_node_gb_s: PositiveFloat | None = None
    host_link_gb_s: PositiveFloat | None = None


@dataclass(kw_only=True)
class ResidualMemory:
    """Memory that processes take beside the tensors that a plan counts; None: what the planner assumes.

    device_context_mib: of a device, by a process with its libraries and kernels, without communicators.
    device_collectives_mib: more of it, by the communicators of a training process.
    host_trainer_mib: of the host, by a training process, before it is one of Ray's.
    host_engine_mib: the same of all processes of an engine of one rank.
    pinned_ratio: host memory that a large page-locked block takes, over what was asked for.
    """

    device_context_mib: PositiveFloat | None = None
    device_collectives_mib: PositiveFloat | None = None
    host_trainer_mib: PositiveFloat | None = None
    host_engine_mib: PositiveFloat | None = None
    pinned_ratio: PositiveFloat | None = None


@dataclass(kw_only=True)
class SlurmConfig:
    """What a job asks Slurm for, besides nodes and devices.

    partition, account, qos: as Slurm's options of these names; None is Slurm's own choice.
    exclusive: whether the job has its nodes for itself.
    time_limit: as Slurm writes it, ``days-hours:minutes:seconds``.
    grace_s: seconds before that limit at which the run is told to save a checkpoint and end.
    requeue: whether a job that ended so, or whose node failed, is queued again and resumes.
    max_requeues: the most times that a job is queued again.
    setup: shell lines at the top of the job, such as ``module load``; variables that they export reach every node.
    extra: options of sbatch, such as ``--constraint=ib``.
    interface: the network interface through which the nodes of a job reach each other, such as ib0: Ray, and with it
        the stores and gloo; "" is that of a node's name.
    port: the port of the Ray head; Ray's client server takes the next one.
    join_timeout_s: seconds that all nodes have to answer, and the same again to join Ray.
    doctor: what is examined before the run.
    stage_model: a folder on disks of the nodes' own, into which every node copies the model before Ray starts; it may
    have variables of the node, as ``$TMPDIR``; "" is none, and the run reads ``model.path`` itself.
    keep_staged: whether that copy stays when the job ends, and later jobs of the same user take it as it is.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str = "24:00:00"
    grace_s: PositiveInt = 300
    requeue: bool = True
    max_requeues: PositiveInt = 50
    exclusive: bool = True
    setup: list[Lines] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    interface: str = ""
    port: Annotated[int, Interval("[1, 65534]")] = 6379
    join_timeout_s: PositiveInt = 300
    doctor: DoctorStep = DoctorStep.none
    stage_model: str = ""
    keep_staged: bool = False


@dataclass(kw_only=True)
class ClusterConfig:
    """A cluster of equal nodes.

    All rates are 10**9 bytes per second, one direction.

    name: of its file, unless written.
    device: the kind of its accelerators.
    device_name: their name as the driver gives it (``parallel/peak_flops.py`` has their FLOP/s by this name).
    gpus_per_node: 0 if nodes have only CPU cores.
    gpu_memory_gib: memory of one accelerator.
    cpus_per_node, host_memory_gib: CPU cores and memory of a node.
    memory_gb_s: rate at which a device reads its own memory.
    intra_node_gb_s, inter_node_gb_s: rate at which a device sends to devices of its node, and of other nodes.
    disk_gb_s: rate at which a node writes to the shared file system.
    transformer_engine: whether its environment has Transformer Engine, which ``layer_spec=auto`` then takes.
    presets: the layout presets of ``model_configs/`` that were made for it; "" is none.
    environment: variables of every process of a job.
    measured: a doctor.json of this cluster, whose numbers become those of ``reached`` and ``residuals``; "" is none.
    reached: rates to plan with, in place of assumed shares of the ones above.
    residuals: memory of processes to plan with, in place of what is assumed.
    """

    name: str = ""
    device: Device = Device.cpu
    device_name: str = ""
    gpus_per_node: Annotated[int, Interval("[0, 1024]")] = 0
    gpu_memory_gib: NonNegativeFloat = 0.0
    cpus_per_node: PositiveInt = 1
    host_memory_gib: PositiveFloat = 1.0
    memory_gb_s: PositiveFloat = 10.0
    intra_node_gb_s: PositiveFloat = 1.0
    inter_node_gb_s: PositiveFloat = 1.0
    disk_gb_s: PositiveFloat = 0.5
    transformer_engine: bool = True
    presets: str = ""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)
    measured: InputFile = ""
    reached: ReachedRates = field(default_factory=ReachedRates)
    residuals: ResidualMemory = field(default_factory=ResidualMemory)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


def cluster_violations(cluster: ClusterConfig) -> list[Violation]:
    """Every violation within ``cluster``, not looking at other groups."""
    return check(
        cluster,
        [
            _device_violations,
            _memory_violations,
            _image_violations,
            _interface_violations,
            _time_violations,
            _environment_violations,
            _stage_violations,
        ],
    )


def _device_violations(cluster: ClusterConfig) -> list[Violation]:
    if cluster.gpus_per_node or cluster.device in (Device.auto, Device.cpu):
        return []
    problem = f"leaves a run without a device, with device={cluster.device.value}"
    return [Violation("gpus_per_node", 0, problem, "Write the devices of a node, or take cluster=cpu")]


def _interface_violations(cluster: ClusterConfig) -> list[Violation]:
    if re.fullmatch(r"[\w.:-]{0,15}", cluster.slurm.interface, re.ASCII):  # what Linux takes, and a shell too
        return []
    remedy = "Write its name as ip address shows it, such as ib0"
    return [Violation("slurm.interface", cluster.slurm.interface, "is no network interface's name", remedy)]


def _memory_violations(cluster: ClusterConfig) -> list[Violation]:
    if not cluster.gpus_per_node or cluster.gpu_memory_gib > 0:
        return []
    problem = f"must be positive, with gpus_per_node={cluster.gpus_per_node}"
    return [Violation("gpu_memory_gib", cluster.gpu_memory_gib, problem, "Write the GiB of one device")]


def _image_violations(cluster: ClusterConfig) -> list[Violation]:
    if cluster.container.engine is Container.none or cluster.container.image:
        return []
    problem = f"is empty, and container.engine={cluster.container.engine.value} needs one"
    return [Violation("container.image", "", problem, "Write a path or an address, or container.engine=none")]


def _time_violations(cluster: ClusterConfig) -> list[Violation]:
    limit = cluster.slurm.time_limit
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", limit, re.ASCII):
        return []
    return [Violation("slurm.time_limit", limit, "is no time limit of Slurm's", "Write days-hours:minutes:seconds")]


def _environment_violations(cluster: ClusterConfig) -> list[Violation]:
    wrong = [name for name in cluster.environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    remedy = "Write letters, digits and underscores"
    return [Violation("environment", name, "is no name of a variable", remedy) for name in wrong]


def _stage_violations(cluster: ClusterConfig) -> Iterator[Violation]:
    folder = cluster.slurm.stage_model
    key = "slurm.stage_model"
    if folder and not folder.startswith(("/", "$")):
        yield Violation(key, folder, "is no absolute path", "Write a folder of every node's own disks, or $TMPDIR")
    elif "$" in folder and cluster.container.engine is not Container.none:
        problem = "has a variable, and a container needs to know the folder to mount it"
        yield Violation(key, folder, problem, "Write the folder itself")
    if cluster.slurm.keep_staged and not folder:
        yield Violation("slurm.keep_staged", True, "nothing is staged", f"Write {key}=DIR, or leave it out")
