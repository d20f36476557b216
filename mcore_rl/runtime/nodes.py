"""Checks the nodes of a Slurm job: what each has, whether they can run together, and whether all have joined Ray.

``launch/slurm/train.sbatch`` runs the commands of this module:

- ``facts``, on every node, before anything else: a line of JSON; a problem of the node is a fact, not an error
- ``check``, on one: refuses nodes that could not run together
- ``environment``, on every: shell lines that set what Ray must be started with there
- ``wait``, on one: until every node has joined Ray

A problem is reported with the node's name and a remedy; the exit code is then 2.  Nothing here starts or ends Ray.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import mcore_rl
from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import McoreRLError
from mcore_rl.ground.secrets import secret_names

POLL_S = 0.5
PATIENCE_S = 10.0  # how long a shared file system may take to show a new file
QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one node reports of itself.

    node: its name in Slurm.
    host: its host name.
    error: why nothing more is known of it; "" if there is no error.
    version, python: versions of mcore_rl and of Python.
    num_cores: CPU cores that a process may use.
    num_devices, device_name, driver: number, name and driver version of its accelerators.
    sees_run: whether it sees the run directory that the first node made.
    port_taken: why Ray's head cannot listen on its port; "" if it can, and on the other nodes.
    environment: variables that Ray must be started with; None means unset.
    locked_bytes, open_files: what a process of the job may lock of memory and hold open, at most; negative: no limit.
    """

    node: str
    host: str
    error: str = ""
    version: str = ""
    python: str = ""
    num_cores: int = 0
    num_devices: int = 0
    device_name: str = ""
    driver: str = ""
    sees_run: bool = True
    port_taken: str = ""
    environment: dict[str, str | None] = field(default_factory=dict)
    locked_bytes: int = -1
    open_files: int = -1


class NodesError(McoreRLError):
    """The nodes of a job cannot run together; the message names each that is wrong, and the remedy."""


def facts_here(node: str, device: Device, marker: Path, listen: str | None) -> Facts:
    """The facts of this machine.

    node: its name in Slurm.  device: the kind of accelerators that the job wants.  marker: a file that the first node
    wrote into the run directory.  listen: HOST:PORT at which Ray's head will listen here; None on the other nodes.
    """
    from mcore_rl.parallel.device import detect, num_cores, ray_environment  # torch, which takes seconds
    from mcore_rl.parallel.device_details import driver_version

    locked, files = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    known: dict[str, Any] = dict(node=node, host=socket.gethostname(), sees_run=_appears(marker))
    known |= dict(locked_bytes=locked, open_files=files)
    try:
        platform = detect(device)
    except McoreRLError as error:
        return Facts(**known, error=str(error))
    return Facts(
        **known,
        version=mcore_rl.__version__,
        python=".".join(map(str, sys.version_info[:3])),
        num_cores=num_cores(),
        num_devices=platform.num_devices if platform.is_accelerator else 0,
        device_name=platform.device_name if platform.is_accelerator else "",
        driver=driver_version(platform.kind),
        environment=ray_environment(platform.kind),
        port_taken="" if listen is None else _taken(listen),
    )


def _appears(marker: Path) -> bool:
    """Whether ``marker`` exists, or appears within ``PATIENCE_S``."""
    until = time.monotonic() + PATIENCE_S
    while not marker.is_file():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _taken(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        return f"{listen}: {os.strerror(error.errno) if error.errno else error}"
    return ""


def node_problems(facts: Sequence[Facts], nodes: Sequence[str], gpus_per_node: int, marker: Path) -> list[str]:
    """Why ``nodes`` cannot run together: one sentence with a remedy for each problem.

    facts: of the nodes that answered.  gpus_per_node: the accelerators that every node must have.  marker: the file
    that ``Facts.sees_run`` is about.
    """
    problems = []
    said = {each.node: each for each in facts}
    for node in nodes:
        if node not in said:
            remedy = f"Look at it with scontrol show node {node}, and {_without(node)}"
            problems.append(f"{node} did not answer. {remedy}")
    for each in facts:
        name = _name(each)
        if not each.sees_run:
            remedy = "Write a trainer.default_local_dir on a file system that all nodes mount at one place"
            problems.append(f"{name} does not see the run directory: there is no {marker}. {remedy}")
        if each.port_taken:
            remedy = "See who listens with ss -ltnp, or write another port: cluster.slurm.port=6390"
            problems.append(f"{name} cannot start Ray's head at {each.port_taken}. {remedy}")
        if each.error:
            problems.append(f"{name}: {each.error}")
        elif each.num_devices != gpus_per_node:
            remedy = f"Mend cluster.gpus_per_node, or {_without(each.node)}"
            problems.append(f"{name} has {each.num_devices} accelerators, and {gpus_per_node} were asked for. {remedy}")
    alike = [each for each in facts if not each.error]
    for what, value in SAME.items():
        problems += _different(what, alike, value)
    return problems


def limit_warnings(facts: Sequence[Facts], open_files: int) -> list[str]:
    """What may not be enough, and who can raise it: one sentence for the nodes of each limit.

    open_files: that the job asks for.  Locked memory counts where nodes with accelerators talk to each other: RDMA
    registers memory, and NCCL fails where it may not.
    """
    few = dict[int, list[str]]()
    little = dict[int, list[str]]()
    for each in facts:
        if 0 <= each.open_files < open_files:
            few.setdefault(each.open_files, []).append(_name(each))
        if each.locked_bytes >= 0 and each.num_devices and len(facts) > 1:
            little.setdefault(each.locked_bytes, []).append(_name(each))
    files = [
        f"{', '.join(names)}: a process may have {limit:,} files open, and {open_files:,} were asked for. "
        f"Many Ray workers need more: {_RAISE.format('LimitNOFILE', open_files)}"
        for limit, names in few.items()
    ]
    return files + [
        f"{', '.join(names)}: a process may lock {limit / 2**20:,.0f} MiB of memory. "
        f"Collectives over InfiniBand and RoCE fail at it, in ibv_reg_mr: {_RAISE.format('LimitMEMLOCK', 'infinity')}"
        for limit, names in little.items()
    ]


_RAISE = "the hard limit is slurmd's, which administrators raise ({}={} in slurmd.service)"

SAME: Mapping[str, Callable[[Facts], str]] = {
    "accelerator": lambda facts: facts.device_name,
    "driver": lambda facts: facts.driver,
    "Python": lambda facts: facts.python,
    "mcore_rl": lambda facts: facts.version,
}


def _different(what: str, facts: Sequence[Facts], value: Callable[[Facts], str]) -> list[str]:
    """A problem for each node whose ``value`` differs from that of most nodes.  what: its name in the message."""
    counts = Counter(map(value, facts))
    if len(counts) < 2:
        return []
    usual, _ = counts.most_common(1)[0]
    return [
        f"{_name(each)} has {what} {value(each) or 'none'}, and others have {usual or 'none'}. "
        f"Make them alike, or {_without(each.node)}"
        for each in facts
        if value(each) != usual
    ]


def _without(*nodes: str) -> str:
    return f"leave it out with cluster.slurm.extra=[--exclude={','.join(nodes)}]"


def _name(facts: Facts) -> str:
    return facts.node if facts.node == facts.host.partition(".")[0] else f"{facts.node} ({facts.host})"


def read_facts(path: Path) -> list[Facts]:
    """The facts in ``path``, one line per node; lines of other programs are ignored."""
    lines = path.read_text(errors="replace").splitlines()
    return [Facts(**json.loads(line)) for line in lines if line.startswith('{"node"')]


def shell_lines(wanted: Mapping[str, str | None]) -> list[str]:
    """Shell lines to run before Ray is started: they set ``wanted`` and unset secrets, except those that Ray reads."""
    hidden = {name: None for name in secret_names() if not name.startswith("RAY_")}
    return [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in sorted({**wanted, **hidden}.items())
    ]


def wait_for(address: str, nodes: Sequence[str], timeout_s: float, logs: Path) -> None:
    """Waits until all ``nodes`` have joined the cluster whose head is at ``address``, HOST:PORT.

    logs: the directory in which each node's Ray writes NODE.log.
    NodesError: a node has not joined after ``timeout_s``, or the head does not answer.
    """
    import ray  # only needed here, and it takes a second

    until = time.monotonic() + timeout_s
    head = nodes[0]
    while not _listens(address):
        if time.monotonic() > until:
            raise NodesError(_not_joined([head], address, timeout_s, logs))
        time.sleep(POLL_S)
    try:
        ray.init(address=address, **QUIET)
    except ConnectionError as error:  # it ended after it had begun to listen
        raise NodesError(_not_joined([head], address, timeout_s, logs)) from error
    try:
        while missing := sorted(set(nodes) - {each["NodeName"] for each in ray.nodes() if each["Alive"]}):
            if time.monotonic() > until:
                raise NodesError(_not_joined(missing, address, timeout_s, logs))
            time.sleep(POLL_S)
    finally:
        ray.shutdown()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), POLL_S).close()
    except OSError:
        return False
    return True


def _not_joined(missing: Sequence[str], address: str, timeout_s: float, logs: Path) -> str:
    lines = [f"Ray's head at {address} waited {timeout_s:g} s, and not all nodes came:"]
    for node in missing:
        log = logs / f"{node}.log"
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
        lines.append(f"  - {node}: {last[0].strip() if last else 'it wrote nothing'} ({log})")
    lines.append(
        f"Check on each that {address} can be reached (a firewall, or a name that is 127.0.1.1 in /etc/hosts), "
        f"raise cluster.slurm.join_timeout_s, or {_without(*missing)}"
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m mcore_rl.runtime.nodes", description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)
    facts = commands.add_parser("facts", help="what this node has and sees, as a line of JSON")
    facts.add_argument("--node", required=True, help="its name to Slurm")
    facts.add_argument("--device", type=Device, required=True, metavar="|".join(each.value for each in Device))
    facts.add_argument("--marker", type=Path, required=True, help="a file that the first node has just written")
    facts.add_argument("--head", required=True, help="name of the node of Ray's head")
    facts.add_argument("--listen", required=True, help="HOST:PORT of Ray's head")
    check = commands.add_parser("check", help="refuse nodes that could not run together")
    check.add_argument("--facts", type=Path, required=True, help="what the command facts printed")
    check.add_argument("--gpus", type=int, required=True, help="that each must have")
    check.add_argument("--marker", type=Path, required=True)
    check.add_argument("--open-files", type=int, default=0, help="that a process of the job is to have")
    check.add_argument("nodes", nargs="+")
    environment = commands.add_parser("environment", help="shell lines for what Ray is started with")
    environment.add_argument("--facts", type=Path, required=True)
    environment.add_argument("node")
    wait = commands.add_parser("wait", help="until every node has joined Ray")
    wait.add_argument("--address", required=True, help="HOST:PORT of Ray's head")
    wait.add_argument("--timeout", type=float, required=True, help="seconds")
    wait.add_argument("--logs", type=Path, required=True, help="directory of NODE.log")
    wait.add_argument("nodes", nargs="+")
    return top


def _run(chosen: argparse.Namespace) -> list[str]:
    """Runs the chosen command; returns the lines to print."""
    if chosen.command == "wait":
        wait_for(chosen.address, chosen.nodes, chosen.timeout, chosen.logs)
        return []
    if chosen.command == "facts":
        listen = chosen.listen if chosen.node == chosen.head else None
        return [json.dumps(asdict(facts_here(chosen.node, chosen.device, chosen.marker, listen)))]
    facts = read_facts(chosen.facts)
    if chosen.command == "environment":
        (environment,) = [each.environment for each in facts if each.node == chosen.node]
        return shell_lines(environment)
    if problems := node_problems(facts, chosen.nodes, chosen.gpus, chosen.marker):
        raise NodesError("\n".join(["these nodes cannot run together:", *(f"  - {each}" for each in problems)]))
    return [f"warning: {each}" for each in limit_warnings(facts, chosen.open_files)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.  Returns the exit code: 0, or 2 if a node has a problem."""
    try:
        for line in _run(_parser().parse_args(arguments)):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    except McoreRLError as error:
        Console(stderr=True, emoji=False).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
