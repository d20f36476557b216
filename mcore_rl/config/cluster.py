"""A kind of machine to run on, as ``launch/clusters/NAME.yaml`` says it.

That is what a node has, how fast it is, and how Slurm and a container are asked for it.  The planner reads the sizes
and rates, ``launch/slurm/submit.py`` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.engine import Device
from mcore_rl.errors import Violation


class Container(Enum):
    """What runs the programs of a job: nothing besides the node's own system, pyxis (enroot), or apptainer."""

    none = "none"
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(kw_only=True)
class ContainerConfig:
    """image: a path or an address, as the engine takes it.  mounts: ``HOST:INSIDE`` or just the one path for both."""

    engine: Container = Container.none
    image: str = ""
    mounts: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class SlurmConfig:
    """What a job asks Slurm for, besides nodes and devices.

    time_limit: as Slurm writes it, ``days-hours:minutes:seconds``.  grace_s: seconds before that limit in which the
    run saves and leaves.  requeue: a job that left so, or whose node failed, runs again and resumes, at most
    max_requeues times.  setup: shell lines at the top of the job, such as ``module load``; what they export reaches
    every node.  extra: options of sbatch, as ``--constraint=ib``.  port: of the Ray head; its client has the next one.
    join_timeout_s: for all nodes to answer, and again to join Ray.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str = "24:00:00"
    grace_s: int = 300
    requeue: bool = True
    max_requeues: int = 50
    exclusive: bool = True
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    port: int = 6379
    join_timeout_s: int = 300


@dataclass(kw_only=True)
class ClusterConfig:
    """A cluster of equal nodes.

    device, device_name: of its accelerators, the second as the driver calls them (``parallel/peak_flops.py`` knows
    what they compute).  gpus_per_node: 0 where there are only cores.  gpu_memory_gib: of one, GiB.  memory_gb_s: from
    a device's own memory.  intra_node_gb_s, inter_node_gb_s: what one device sends to others in its node and outside
    it.  disk_gb_s: what one node writes to the shared file system.  All rates in 10**9 bytes a second, one direction.
    presets: of ``model_configs/`` that were made for it; "" is none.
    environment: variables of every process of a job.
    """

    name: str = ""
    device: Device = Device.cpu
    device_name: str = ""
    gpus_per_node: int = 0
    gpu_memory_gib: float = 0.0
    cpus_per_node: int = 1
    host_memory_gib: float = 1.0
    memory_gb_s: float = 10.0
    intra_node_gb_s: float = 1.0
    inter_node_gb_s: float = 1.0
    disk_gb_s: float = 0.5
    presets: str = ""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


def cluster_violations(cluster: ClusterConfig) -> list[Violation]:
    """Everything wrong in ``cluster`` by itself."""
    found = []
    for name in (
        "cpus_per_node",
        "host_memory_gib",
        "memory_gb_s",
        "intra_node_gb_s",
        "inter_node_gb_s",
        "disk_gb_s",
    ):
        value = getattr(cluster, name)
        if not value > 0:
            found.append(Violation(name, value, "must be positive", "Write what a node has"))
    if cluster.gpus_per_node < 0:
        found.append(Violation("gpus_per_node", cluster.gpus_per_node, "must not be negative", "Write 0 or more"))
    if cluster.gpus_per_node > 0 and not cluster.gpu_memory_gib > 0:
        problem = f"must be positive, with gpus_per_node={cluster.gpus_per_node}"
        found.append(Violation("gpu_memory_gib", cluster.gpu_memory_gib, problem, "Write the GiB of one device"))
    if cluster.container.engine is not Container.none and not cluster.container.image:
        problem = f"is empty, and container.engine={cluster.container.engine.value} needs one"
        found.append(Violation("container.image", "", problem, "Write a path or an address, or container.engine=none"))
    for name, least in (("grace_s", 1), ("join_timeout_s", 1), ("port", 1), ("max_requeues", 1)):
        value = getattr(cluster.slurm, name)
        if value < least:
            found.append(Violation(f"slurm.{name}", value, "must be positive", f"Write {least} or more"))
    return found
