"""Runs checks one after another: within their time limits, and so that every error becomes a diagnosis."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import Diagnosis, HealthCheck, Subject, Verdict
from mcore_rl.ground.errors import DeviceError, McoreRLError, WorkerError
from mcore_rl.parallel.device import Platform, banner, detect
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.phase import phase

DETECT_S = 120.0
LEAST_S = 5.0  # a check is not begun with less
SHOWN_LINES = 3  # of an error, in the table; doctor.json has all


def examine(
    checks: Sequence[HealthCheck], subject: Subject, seconds: float, watch: Callable[[str], None] = lambda name: None
) -> list[Diagnosis]:
    """What ``checks`` say, at least one diagnosis each.

    seconds: of all checks together; those that come too late are SKIP.  watch: called with the name of each before it
    begins.
    """
    until = time.monotonic() + seconds
    diagnoses = list[Diagnosis]()
    for check in checks:
        left = until - time.monotonic()
        why = check.lacking(subject) or ("" if left > LEAST_S else f"the {seconds / 60:g} minutes are over (--minutes)")
        if why:
            diagnoses.append(Diagnosis(check=check.name, verdict=Verdict.SKIP, measured=why))
            continue
        watch(check.name)
        begun = time.monotonic()
        said = diagnosed(check, subject, min(check.limit_s, left))
        took = time.monotonic() - begun
        diagnoses += [replace(each, seconds=round(took, 3)) for each in said]
    return diagnoses


def diagnosed(check: HealthCheck, subject: Subject, limit_s: float) -> list[Diagnosis]:
    """What ``check`` says; FAIL with what it was doing if it hangs, dies or raises."""
    try:
        return list(check.run(subject, limit_s))
    except TimeoutError as error:
        remedy = "A driver or a device hangs: restart the node, or leave it out"
        return [Diagnosis(check=check.name, verdict=Verdict.FAIL, measured=str(error), remedy=remedy)]
    except McoreRLError as error:
        remedy = "doctor.json has the whole message"
        return [_failed(check, str(error), remedy, str(error))]
    except Exception as error:  # noqa: BLE001  # one check must not take the others with it
        remedy = "This is a fault of the check, or of a library: report it with doctor.json"
        return [_failed(check, f"{type(error).__name__}: {error}", remedy, traceback.format_exc())]


def _failed(check: HealthCheck, message: str, remedy: str, details: str) -> Diagnosis:
    lines = [line.strip() for line in message.splitlines() if line.strip()][:SHOWN_LINES]
    return Diagnosis(check=check.name, verdict=Verdict.FAIL, measured=" ".join(lines), remedy=remedy, details=details)


# ---- the platform ----


def platform_here(rank: Rank, device: Device) -> tuple[Platform, str]:
    """(the platform, a line about it); in a process of its own, because a broken driver may hang or crash it."""
    with phase("looking for devices", device=device.value):
        platform = detect(device)
        return platform, banner(platform)


def platform_diagnosis(device: Device) -> tuple[Platform, Diagnosis]:
    """The platform of this machine for ``device``; the CPU, with FAIL, if it cannot be told."""
    try:
        platform, line = run_ranks(platform_here, 1, (device,), timeout_s=DETECT_S)[0]
    except McoreRLError as error:
        remedy = "" if isinstance(error, DeviceError) else "A driver hangs or crashes: see that its own tool answers"
        return detect(Device.cpu), _no_platform(error, remedy)
    return platform, Diagnosis(check="platform", verdict=Verdict.PASS, measured=line)


def _no_platform(error: McoreRLError, remedy: str) -> Diagnosis:
    first, *_ = str(error).splitlines()
    return Diagnosis(check="platform", verdict=Verdict.FAIL, measured=first, remedy=remedy, details=str(error))


# ---- several nodes ----


def examine_node(
    node: int, num_nodes: int, names: tuple[str, ...], subject: Subject, seconds: float, limit_s: float
) -> list[Diagnosis]:
    """What the checks ``names`` say of this node; runs in a Ray worker that has all accelerators of the node."""
    from mcore_rl.doctor.command import ALL_CHECKS

    platform, first = platform_diagnosis(subject.platform.kind)
    own = replace(subject, platform=platform, directory=subject.directory / f"node_{node}")
    own.directory.mkdir(parents=True, exist_ok=True)
    checks = [check for check in ALL_CHECKS if check.name in names]
    said = [] if first.verdict is Verdict.FAIL else examine(checks, own, seconds)
    return [first, *said]


def examine_nodes(checks: Sequence[HealthCheck], subject: Subject, seconds: float) -> list[Diagnosis]:
    """What those of ``checks`` that a node does by itself say of every node of ``subject``, all at the same time."""
    from mcore_rl.runtime.each_node import on_each_node  # ray: needed for several nodes alone

    names = tuple(check.name for check in checks if check.on_each_node)
    limit_s = seconds + DETECT_S
    by_node = on_each_node(
        examine_node, subject.address, subject.num_nodes, subject.platform, (names, subject, seconds), limit_s
    )
    diagnoses = list[Diagnosis]()
    for node, said in by_node.items():
        if isinstance(said, WorkerError):
            said = [_no_platform(said, "Look at the node and at Ray's log of it, or leave it out")]
        diagnoses += [replace(each, node=node) for each in said]
    return diagnoses
