"""Every error a user can cause, as a type.

A user's mistake is one of these and carries its remedy; a bug of ours is an ``assert``.  The command line prints the
message of an ``McoreRLError`` alone and shows a traceback only under ``--debug``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class McoreRLError(Exception):
    """Base of every error whose message is meant for the user."""


@dataclass(frozen=True)
class Violation:
    """One thing wrong in a configuration.

    key: the dotted name the user writes (``parallel.tp``).  value: what was written.  problem: what is wrong with it.
    remedy: what to write instead.
    """

    key: str
    value: object
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.problem}. {self.remedy}"


class ConfigError(McoreRLError):
    """The configuration cannot be run; holds every violation found, not only the first."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        assert violations, "a ConfigError needs at least one violation"
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
        super().__init__("\n".join([head, *(f"  - {violation}" for violation in self.violations)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Violation, ...]]]:
        return ConfigError, (self.violations,)  # exceptions cross process borders; the default would lose the type


def refuse_if_any(violations: Sequence[Violation]) -> None:
    """Raise ``ConfigError`` with all ``violations`` unless there are none."""
    if violations:
        raise ConfigError(violations)


class DeviceError(McoreRLError):
    """The accelerator that was asked for is not here, or is masked by a contradictory environment."""


class WorkerError(McoreRLError):
    """A worker process died or raised; the message names rank, coordinates, phase and the first cause."""


class NonFiniteError(McoreRLError):
    """Too many steps in a row had a non-finite loss or gradient."""
