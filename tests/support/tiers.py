"""The four tiers of the gate: ``check``, ``test``, ``ci`` and ``full``.

Nothing dear starts in ``check``.  ``test`` has a few of all that starts processes, ``ci`` most, ``full`` every test.

``--tier`` chooses one; a tier holds the cheaper ones, which ``--beyond`` leaves out again.  The tier of a test is what
the nearest mark says, ``pytest.mark.tier(NAME)`` on its parameter or function (the dearest of these), its class or its
file.  Where nothing says it, what the test uses does:

- the fixture ``processes``, which whatever starts training processes, Ray, vLLM or Slurm asks for: the tier is ``ci``
  for everything that needs it, however indirectly;
- otherwise ``check``.  Such a test fails when it starts one of those (``Guard``).

How long a tier takes is measured by benchmarks/gate.py, and asserted nowhere.

Three processes of pytest run a tier (``-n 3``, pytest-xdist), each whole files: more than there are cores, since many
tests wait.  Files that start processes come first, so that the cheap ones fill the cores at the end.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import Any

import pytest

TIERS = ("check", "test", "ci", "full")
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
    """The tier that the marks nearest to ``item`` name, or that follows from its fixtures."""
    for node in reversed(item.listchain()):
        if named := [mark.args[0] for mark in node.own_markers if mark.name == "tier"]:
            return max(named, key=TIERS.index)
    return "ci" if starts_processes(item) else "check"


def starts_processes(item: pytest.Item) -> bool:
    """Whether ``item`` asks for ``processes``, itself or by its fixtures."""
    return "processes" in getattr(item, "fixturenames", ())


def tiers_of_run(config: pytest.Config) -> tuple[str, ...]:
    """The tiers whose tests are run: up to ``--tier``, without those up to ``--beyond``."""
    beyond = config.getoption("beyond")
    first = 0 if beyond is None else TIERS.index(beyond) + 1
    return TIERS[first : TIERS.index(config.getoption("tier")) + 1]


WHOLE_TIER = "whole_tier"
COLLECTED = pytest.StashKey[dict[str, str]]()


# ---- hooks of pytest ----

GUARD = Guard()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, default="ci", help="how much is run (default: %(default)s)")
    group.addoption("--beyond", choices=TIERS[:-1], help="leave out what this tier holds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers = {item: tier_of(item) for item in items}
    config.stash[COLLECTED] = {item.nodeid: tier for item, tier in tiers.items()}
    run = tiers_of_run(config)
    if left_out := [item for item in items if tiers[item] not in run]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tiers[item] in run]
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
