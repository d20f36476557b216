"""What a check is, what it says, and how a measured number is judged.

A check is a row: its name, what it needs, its time limit and a function.  The function measures and returns diagnoses;
it prints nothing and raises nothing that a user must read, because ``examination.py`` makes a diagnosis of every error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.parallel.device import Platform, have_transformer_engine

if TYPE_CHECKING:  # every process of a check imports this module, and need not wait for these
    from mcore_rl.config.offline import OfflineConfig
    from mcore_rl.config.run import RunConfig


class Verdict(Enum):
    """The result of a check; FAIL alone makes the exit code 1."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


SEVERITY = (Verdict.SKIP, Verdict.PASS, Verdict.WARN, Verdict.FAIL)  # the worst comes last


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined, and how thoroughly.

    platform: of this node.  cluster: what its yaml says; None if no cluster was named.  recipe: the run that is to
    follow, if one was named.  num_nodes: of the cluster.  address: HOST:PORT of its Ray; "" without one.
    quick: leave out what starts engines or takes minutes.  directory: for files and tiny runs; every node sees it.
    """

    platform: Platform
    directory: Path
    cluster: ClusterConfig | None = None
    recipe: RunConfig | OfflineConfig | None = None
    num_nodes: int = 1
    address: str = ""
    quick: bool = False

    @property
    def num_ranks(self) -> int:
        """Processes of a check that uses all devices of a node; two on the CPU."""
        return self.platform.num_devices if self.platform.is_accelerator else 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One line of the report.

    check: its name.  measured, expected: as text, with units.  remedy: what to do; "" if there is nothing to do.
    numbers: what was measured, by a name that ends in its unit.  node: where; "" if it is about all of them.
    seconds: that its check took.  details: a whole error message, for doctor.json.
    """

    check: str
    verdict: Verdict
    measured: str
    expected: str = ""
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    seconds: float = 0.0
    details: str = ""


@dataclass(frozen=True)
class Need:
    """A condition of a check.  why: what is said of a subject that does not meet it."""

    name: str
    is_met: Callable[[Subject], bool]
    why: str


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """A row of the table.

    about: what it measures, for ``--list``.  limit_s: of the whole check.
    run: called with the subject and ``limit_s``.  on_each_node: whether every node does it by itself.
    """

    name: str
    about: str
    limit_s: float
    run: Callable[[Subject, float], Iterable[Diagnosis]]
    needs: tuple[Need, ...] = ()
    on_each_node: bool = True

    def lacking(self, subject: Subject) -> str:
        """Why it cannot run in ``subject``; "" if it can."""
        return next((need.why for need in self.needs if not need.is_met(subject)), "")


ACCELERATOR = Need("accelerator", lambda subject: subject.platform.is_accelerator, "needs an accelerator")
CLUSTER = Need("cluster", lambda subject: subject.cluster is not None, "needs a cluster: --cluster NAME")
RECIPE = Need("recipe", lambda subject: subject.recipe is not None, "needs a run to plan: --recipe NAME")
THOROUGH = Need("time", lambda subject: not subject.quick, "left out by --quick")
TWO_RANKS = Need("two devices", lambda subject: subject.num_ranks > 1, "needs two devices")
NODES = Need("nodes", lambda subject: subject.num_nodes > 1, "needs two nodes: --nodes N")
TRANSFORMER_ENGINE = Need(
    "Transformer Engine", lambda _: have_transformer_engine(), "Transformer Engine is not installed"
)


@dataclass(frozen=True, kw_only=True)
class ExpectedRate:
    """What a rate is compared with.

    value: in the unit of the rate; None: nothing is known to compare with, and any rate passes.
    source: where it is from.  passes, fails: shares of it; from ``passes`` on PASS, below ``fails`` FAIL.
    """

    value: float | None
    source: str
    passes: float
    fails: float


def judged(
    check: str, value: float, unit: str, expected: ExpectedRate, remedy: str, *, key: str, where: str = ""
) -> Diagnosis:
    """The diagnosis of a measured rate, the more the better.  key: its name among ``Diagnosis.numbers``."""
    measured = f"{value:,.4g} {unit}{where}"
    numbers = {key: value}
    if expected.value is None:
        return Diagnosis(
            check=check,
            verdict=Verdict.PASS,
            measured=measured,
            expected=f"not judged: {expected.source}",
            numbers=numbers,
        )
    least = expected.value * expected.passes
    floor = expected.value * expected.fails
    verdict = Verdict.PASS if value >= least else Verdict.WARN if value >= floor else Verdict.FAIL
    share = "" if expected.passes == 1 else f", {expected.passes:.0%} of {expected.value:,.4g}"
    return Diagnosis(
        check=check,
        verdict=verdict,
        measured=measured,
        expected=f"at least {least:,.4g} {unit}{share} ({expected.source})",
        remedy="" if verdict is Verdict.PASS else remedy,
        numbers=numbers,
    )


def problem_diagnosis(
    check: str,
    problems: Sequence[str],
    measured: str,
    expected: str,
    remedy: str,
    *,
    verdict: Verdict = Verdict.FAIL,
    numbers: Mapping[str, float] | None = None,
) -> Diagnosis:
    """PASS with ``measured``; where there are ``problems``, ``verdict`` with these and the remedy."""
    return Diagnosis(
        check=check,
        verdict=verdict if problems else Verdict.PASS,
        measured="; ".join(problems) or measured,
        expected=expected,
        remedy=remedy if problems else "",
        numbers=numbers or {},
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The most severe of ``verdicts``; SKIP if there are none."""
    return max(verdicts, key=SEVERITY.index, default=Verdict.SKIP)
