"""Detects a call of workers or engines that takes too long, and reports what every training rank is doing.

Workers that hang in a collective, or in C with Python's lock held, cannot answer a call.  So each gets a signal, on its
own machine, at which it writes its stacks as in a crash.  Everything else is read from the run's logs.
``engine_watch`` does the same for an engine.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.runtime.answers import Whereabouts, last_phase, phase_since, stacks_file
from mcore_rl.runtime.cluster import on_node

STACKS_S = 10.0  # the time limit for workers to write their stacks
SHOWN = 8  # groups of ranks that do the same, on the screen; the file has all
ENOUGH = 2  # calls of a method before its longest duration counts
COLLECTIVE = re.compile(r'File ".*distributed_c10d\.py", line \d+ in (?!wrapper)(\w+)')


# Calls in which trainers and engines wait for each other.  Who waits for one that hangs gives up by itself, when the
# transport's own limit is over; only who still has not answered after that hangs.
BOTH_SIDES = ("open", "publish", "sync_open", "sync_receive")


class Watchdog:
    """How long a call of each method may take, derived from how long its calls took so far.

    transport_s: the longest wait of a member of a weight update for another (``Address.timeout_s``).
    """

    def __init__(self, config: WatchdogConfig, transport_s: float = 0.0) -> None:
        self._config = config
        self._transport_s = transport_s
        self._longest: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)

    def limit_s(self, method: str) -> float:
        """The seconds after which a call of ``method`` counts as hung."""
        config = self._config
        if not config.limit_s:
            return float("inf")
        limit_s = config.limit_s
        if self._count[method] >= ENOUGH:
            limit_s = min(limit_s, max(config.least_s, config.factor * self._longest[method]))
        return limit_s + self._transport_s if method in BOTH_SIDES else limit_s

    def took(self, method: str, seconds: float) -> None:
        """Records that a call of ``method`` was answered after ``seconds``."""
        self._count[method] += 1
        self._longest[method] = max(self._longest[method], seconds)


@dataclass(frozen=True)
class Hung:
    """What one rank was doing when a call hung.

    title, host: the rank's name in messages, and its machine.
    phase: its current phase; "" outside any phase.
    since_s: seconds since it entered the phase; None if that is unknown.
    collective: the collective that it waits in; "" if none.
    stacks: the Python stacks of its threads.
    """

    title: str
    host: str
    phase: str
    since_s: float | None
    collective: str
    stacks: str

    def line(self) -> str:
        """One line for the screen, without the rank's name."""
        since = "" if self.since_s is None else f" for {self.since_s:.0f} s"
        inside = f", waiting in {self.collective}" if self.collective else ""
        return f"in {self.phase or 'no phase'}{since}{inside}"


def look_at(
    titles: Sequence[str], hosts: Sequence[str], logs: Sequence[Path], whereabouts: Sequence[Whereabouts]
) -> list[Hung]:
    """What each worker is doing, from its logs and stacks; waits for the stacks, ``STACKS_S`` at most."""
    before = [_size(stacks_file(log)) for log in logs]
    _ask_for_stacks(whereabouts)
    until = time.monotonic() + STACKS_S
    sizes = before
    while time.monotonic() < until:
        time.sleep(0.3)
        new = [_size(stacks_file(log)) for log in logs]
        if new == sizes and all(now > then for now, then in zip(new, before, strict=True)):
            break
        sizes = new
    hung = []
    for title, host, log, start in zip(titles, hosts, logs, before, strict=True):
        stacks = _text(stacks_file(log), start)
        since = phase_since(log)
        collective = COLLECTIVE.search(stacks)
        hung.append(
            Hung(
                title=title,
                host=host,
                phase=last_phase(log),
                since_s=None if since is None else max(0.0, time.time() - since),
                collective="" if collective is None else collective[1],
                stacks=stacks or "no stacks: the process is gone, or its machine does not answer\n",
            )
        )
    return hung


def hang_file(directory: Path) -> Path:
    """The path of a new report of a hang in ``directory``: ``hang_<time>.txt``."""
    path = directory / time.strftime("hang_%Y%m%d-%H%M%S.txt")
    number = 1
    while path.exists():  # two engines may hang at once
        number += 1
        path = directory / time.strftime(f"hang_%Y%m%d-%H%M%S_{number}.txt")
    return path


def write_hung(directory: Path, what: str, hung: Sequence[Hung]) -> Path:
    """Writes ``hang_<time>.txt`` to ``directory``: ``what`` as a title, then every rank's stacks.  Returns its path."""
    path = hang_file(directory)
    parts = [f"{each.title} on {each.host}: {each.line()}\n{each.stacks}" for each in hung]
    path.write_text("\n".join([what, "", *parts]))
    return path


def summary(hung: Sequence[Hung]) -> list[str]:
    """Lines for the screen, one for all ranks that do the same; the fewest first, since the others wait for them."""
    alike: dict[tuple[str, str], list[Hung]] = defaultdict(list)
    for each in hung:
        alike[each.phase, each.collective].append(each)
    groups = sorted(alike.values(), key=len)
    lines = []
    for group in groups[:SHOWN]:
        others = f" and {len(group) - 1} others" if len(group) > 1 else ""
        lines.append(f"  {group[0].title} on {group[0].host}{others}: {group[0].line()}")
    return lines + ([f"  and {len(groups) - SHOWN} more that differ"] if len(groups) > SHOWN else [])


def _ask_for_stacks(whereabouts: Sequence[Whereabouts]) -> None:
    nodes: dict[str, list[int]] = defaultdict(list)
    for each in whereabouts:
        nodes[each.node_id].append(each.pid)
    calls = [on_node(_signal, node_id).remote(pids) for node_id, pids in nodes.items()]
    try:
        ray.wait(calls, num_returns=len(calls), timeout=STACKS_S)
    except RayError:
        return  # the machines do not answer; the ranks' phases are known all the same


def _signal(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGUSR2)
        except ProcessLookupError:
            continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
