"""The ports that a run listens at: as /proc shows them, and as docs/security.md names them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
# What tells a process from its command line, the first that is found.
WHO = {
    "gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "RuntimeEnvAgent": "Ray's agents",
    "DashboardAgent": "Ray's agents",
    "dashboard/agent.py": "Ray's agents",
    "runtime_env/agent": "Ray's agents",
    "ray::TrainWorker": "training worker",
    "ray::RolloutWorker": "rollout worker",
    "ray::": "Ray's worker",
    "monitor.py": "Ray's agents",
    "VLLM": "engine",
    "mcore_rl.cli": "controller",
    "spawn_main": "engine",
    "wandb": "wandb",
}


def of(process: psutil.Process) -> Iterator[tuple[str, str]]:
    """(who it is, at which addresses) of each port that ``process`` listens at."""
    command = " ".join(process.cmdline())
    who = next((name for word, name in WHO.items() if word in command), command)
    for each in process.net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            yield who, reach(each.laddr.ip)


def reach(address: str) -> str:
    """The word of docs/security.md for ``address``."""
    known = ipaddress.ip_address(address)
    return "all" if known.is_unspecified else "loopback" if known.is_loopback else "node"


def documented() -> set[tuple[str, str]]:
    """The rows of the table of ports that a run on one machine opens."""
    on_one_machine = PAGE.read_text().partition("## The ports of a run")[2].partition("With several nodes:")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", on_one_machine, re.MULTILINE)
    return {(who.strip(), where.strip()) for _, who, where in rows if where.strip() in ("all", "loopback", "node")}
