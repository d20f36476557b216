"""The three tiers of the gate: ``check`` (nothing dear starts), ``test`` (what CI runs) and ``full`` (everything).

``--tier`` chooses one; a tier holds the cheaper ones.  The tier of a test follows from what it says and uses, and the
dearest wins:

- ``pytest.mark.tier(NAME)`` on the test, its parameter or its file;
- the fixture ``processes``, which whatever starts training processes, Ray, vLLM or Slurm asks for: the tier is
  ``test`` for everything that needs it, however indirectly;
- neither: ``check``.  Such a test fails when it starts one of those (``Guard``).

pyproject.toml has the minutes that a tier may take (``tier_minutes``).  They are told at the end, and never a failure.

Three processes of pytest run a tier (``-n 3``, pytest-xdist), each whole files: more than there are cores, since many
tests wait.  Files that start processes come first, so that the cheap ones fill the cores at the end.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import Any

import pytest

TIERS = ("check", "test", "full")
# Programs that are dear, or start what is.  What a program starts in turn is not seen.
DEAR = re.compile(
    r"\b(mcore-rl|mcore_rl\.cli|crash_points|run_ranks|ray_cluster|start_engine|raylet|gcs_server|slurmctld)\b"
    r"|\bslurm/set_up\.sh\b|-m pytest\b"
)
REMEDY = "a test of the tier check starts it.  Ask for the fixture `processes`, or mark it with pytest.mark.tier"


class DearStart(AssertionError):
    """A test of the tier ``check`` started what is dear."""


class Guard:
    """Refuses processes of multiprocessing (and so training ranks and engines) and ``DEAR`` programs while it is up."""

    def __init__(self) -> None:
        self._up = False
        self._refused: list[str] = []
        start = BaseProcess.start

        def start_if_allowed(process: BaseProcess) -> None:
            self._refuse(f"the process {process.name}")
            start(process)

        BaseProcess.start = start_if_allowed  # type: ignore[method-assign]
        begin = Popen.__init__

        # No audit hook: Python calls one for each id() too, which makes every deep copy of a test a third slower.
        @wraps(begin)
        def begin_if_allowed(program: Popen[Any], args: Any, *rest: Any, **how: Any) -> None:
            words = [args] if isinstance(args, (str, bytes, os.PathLike)) else args
            if self._up and DEAR.search(said := " ".join(map(os.fsdecode, words))):
                self._refuse(f"the program {said[:200]}")
            begin(program, args, *rest, **how)

        Popen.__init__ = begin_if_allowed  # type: ignore[method-assign]

    def _refuse(self, what: str) -> None:
        if self._up:
            self._refused.append(what)
            raise DearStart(f"{what}: {REMEDY}")

    @contextmanager
    def over(self, item: pytest.Item) -> Iterator[None]:
        """Within: up, where ``item`` is of the tier ``check``.  It fails also where it caught the refusal."""
        self._up, self._refused = tier_of(item) == "check", []
        try:
            yield
        finally:
            self._up = False
        if self._refused:
            raise DearStart(f"{self._refused[0]}: {REMEDY}")


def tier_of(item: pytest.Item) -> str:
    """The dearest tier that ``item`` names, or that follows from its fixtures."""
    named = [mark.args[0] for mark in item.iter_markers("tier")]
    used = ["test"] if starts_processes(item) else []
    return max(["check", *used, *named], key=TIERS.index)


def starts_processes(item: pytest.Item) -> bool:
    """Whether ``item`` asks for ``processes``, itself or by its fixtures."""
    return "processes" in getattr(item, "fixturenames", ())


WHOLE_TIER = "whole_tier"
COLLECTED = pytest.StashKey[dict[str, str]]()


def minutes(config: pytest.Config) -> dict[str, float]:
    """What each tier may take."""
    pairs = (line.partition("=") for line in config.getini("tier_minutes"))
    return {name.strip(): float(number) for name, _, number in pairs}


# ---- hooks of pytest ----

GUARD = Guard()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("tier_minutes", "NAME = MINUTES for each tier", type="linelist")
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, default="test", help="how much is run (default: %(default)s)")
    group.addoption("--began", type=float, default=time.time(), help="when the tier's first step began, in Unix time")


def pytest_configure(config: pytest.Config) -> None:
    assert tuple(minutes(config)) == TIERS, "tier_minutes in pyproject.toml"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most, tiers = TIERS.index(config.getoption("tier")), {item: tier_of(item) for item in items}
    config.stash[COLLECTED] = {item.nodeid: tier for item, tier in tiers.items()}
    if dearer := [item for item in items if TIERS.index(tiers[item]) > most]:
        config.hook.pytest_deselected(items=dearer)
        items[:] = [item for item in items if TIERS.index(tiers[item]) <= most]
    dear_files = {item.path for item in items if starts_processes(item)}
    items.sort(key=lambda item: item.path not in dear_files)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported now stays: no garbage collection need go through these million objects, in a test or before."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_whole_tier(config: pytest.Config) -> bool:
    """Whether all tests of the tier are run, and not some that somebody named."""
    if hasattr(config, "workerinput"):  # a process of xdist's, which is given every path by name
        return bool(config.workerinput[WHOLE_TIER])
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return not (named or config.option.keyword or config.option.markexpr)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist: what a process of its is told when it starts."""
    node.workerinput[WHOLE_TIER] = is_whole_tier(node.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with GUARD.over(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with GUARD.over(item):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not is_whole_tier(config):
        return
    tier = config.getoption("tier")
    took, budget = (time.time() - config.getoption("began")) / 60, minutes(config)[tier]
    over = took > budget
    told = f"tier {tier}: {took:.1f} min of {budget:g}{', OVER ITS BUDGET' if over else ''}"
    terminalreporter.write_sep("=", told, yellow=over, bold=over)


@pytest.fixture(scope="session")
def processes() -> None:
    """Leave to start training processes, Ray, vLLM or Slurm: whatever asks for this is no part of ``make check``."""


@pytest.fixture(scope="session")
def fast_ray(
    processes: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Ray's workers and engines are forked: for tests whose subject is what a run does, not how its processes start.

    In the tier ``full`` they start as those of a user do, so that both are proven.
    """
    if request.config.getoption("--tier") == "full":
        yield
        return
    from tests.support.fast_ray import forked_ray  # imports torch, which the tier `check` need not wait for

    with forked_ray(tmp_path_factory.mktemp("fast_ray")):
        yield
