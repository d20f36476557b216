"""Every error a user can cause, as a type.

A user's mistake is one of these and carries its remedy; a bug of ours is an ``assert``.  The command line prints the
message of an ``McoreRLError`` alone and shows a traceback only under ``--debug``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

MAX_VALUE_SHOWN = 500  # characters
_NUMBER = re.compile(r"\d+")
_LONG_WORD = re.compile(rf"\S{{{MAX_VALUE_SHOWN + 1},}}")


def shortened(text: str) -> str:
    """``text`` with the beginning of each word that has more than ``MAX_VALUE_SHOWN`` characters."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:MAX_VALUE_SHOWN]}...", text)


class McoreRLError(Exception):
    """Base of every error whose message is meant for the user."""

    def plain(self) -> list[str]:
        """What the error is made of, as text: between processes that may not unpickle, with the name of its type."""
        return [str(self)]

    @classmethod
    def of_plain(cls, words: Sequence[str]) -> McoreRLError:
        """The error that ``plain`` described."""
        return cls(*words)


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
        value = str(self.value)
        shown = value if len(value) <= MAX_VALUE_SHOWN else f"{value[:MAX_VALUE_SHOWN]}..."
        text = f"{self.key}={shown}: {self.problem}. {self.remedy}"
        return text.encode(errors="backslashreplace").decode()  # bytes of a command line that are no UTF-8


def violations_of(key: str, value: object, problems: Sequence[str]) -> list[Violation]:
    """A violation of ``key`` for each of ``problems``, the texts of an error whose last sentence is the remedy."""
    parted = (problem.rpartition(". ") for problem in problems)
    return [Violation(key, value, said, remedy) for said, _, remedy in parted]


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

    def plain(self) -> list[str]:
        """See ``McoreRLError.plain``."""
        return [str(word) for each in self.violations for word in (each.key, each.value, each.problem, each.remedy)]

    @classmethod
    def of_plain(cls, words: Sequence[str]) -> ConfigError:
        """See ``McoreRLError.of_plain``."""
        return cls([Violation(*words[at : at + 4]) for at in range(0, len(words), 4)])


def refuse_if_any(violations: Sequence[Violation]) -> None:
    """Raise ``ConfigError`` with all ``violations`` unless there are none."""
    if violations:
        raise ConfigError(violations)


def pip_line(extra: str) -> str:
    """The pip command for the packages of an extra of this package, in the versions that pyproject.toml allows.

    It names those packages: no index has mcore_rl, so that ``pip install "mcore_rl[...]"`` finds nothing.
    """
    parted = (line.replace('"', "'").partition(";") for line in metadata.requires("mcore_rl") or ())
    packages = [package.strip() for package, _, marker in parted if f"extra == '{extra}'" in marker]
    assert packages, f"pyproject.toml has no extra {extra}"
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])


class _Problems(McoreRLError):
    """Several problems of one place, each a sentence or more.

    The message shows the first ``MAX_SHOWN`` of them; of more than ``MAX_ALIKE`` that differ in numbers alone, as of
    rows with one fault, the first and their count.
    """

    MAX_SHOWN = 20
    MAX_ALIKE = 3

    def __init__(self, place: str, problems: Sequence[str]) -> None:
        assert problems, f"a {type(self).__name__} needs at least one problem"
        self.place = place
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{place}: 1 problem:" if count == 1 else f"{place}: {count} problems:"]
        told = self._told()
        lines += [f"  - {problem}" for problem, _ in told[: self.MAX_SHOWN]]
        if left := sum(alike for _, alike in told[self.MAX_SHOWN :]):
            lines.append(f"  - and {left} more")
        super().__init__("\n".join(lines))

    def _told(self) -> list[tuple[str, int]]:
        """(line, the problems that it stands for), in order."""
        alike: dict[str, list[str]] = {}
        for problem in self.problems:
            alike.setdefault(_NUMBER.sub("#", problem), []).append(problem)
        told = list[tuple[str, int]]()
        for each in alike.values():
            if len(each) > self.MAX_ALIKE:
                told.append((f"{each[0]} (and {len(each) - 1:,} more with this fault)", len(each)))
            else:
                told += [(problem, 1) for problem in each]
        return told

    def __reduce__(self) -> tuple[type[_Problems], tuple[str, tuple[str, ...]]]:
        return type(self), (self.place, self.problems)  # as ConfigError

    def plain(self) -> list[str]:
        """See ``McoreRLError.plain``."""
        return [self.place, *self.problems]

    @classmethod
    def of_plain(cls, words: Sequence[str]) -> _Problems:
        """See ``McoreRLError.of_plain``."""
        return cls(words[0], words[1:])


class CheckpointError(_Problems):
    """A checkpoint cannot be read or written as asked; holds every problem found, not only the first.

    place: the directory it is about.  problems: each names the file or tensor, what was expected and found, and the
    remedy.
    """


class WeightMapError(_Problems):
    """A family's weight table and the modules of a rank do not agree; holds every disagreement, not only the first.

    place: the family and the rank.  problems: each names the tensor, what was expected and found, and the remedy.
    """


class DataError(_Problems):
    """Data or a tokenizer that cannot be used; holds every problem found, not only the first.

    place: the key of the files, or the tokenizer's directory.  problems: each names the file and the row, what is
    wrong, and the remedy.
    """


class RolloutError(McoreRLError):
    """vLLM cannot hold the model, or do what was asked; the message says where, and what vLLM said."""


class DeadEngineError(RolloutError):
    """A rollout engine is gone; the message names it, what it was doing and the first cause."""


class WeightsIncompleteError(RolloutError):
    """An engine was asked to generate before all of its weights were of one version: an update goes on, or failed."""


class SyncError(McoreRLError):
    """Weights did not reach the rollout ranks, or not as they are; the message names rank, tensor and first cause."""


class DeviceError(McoreRLError):
    """The accelerator that was asked for is not here, or is masked by a contradictory environment."""


class WorkerError(McoreRLError):
    """A worker process died or raised; the message names rank, coordinates, phase and the first cause."""


class DeadWorkerError(WorkerError):
    """It died, hung, or lost its device or its peers: begun again, the run may well get on, unlike after an error."""


class RunDirectoryError(McoreRLError):
    """The run directory vanished, or another run has it; the message says where the run was saved."""


class AlarmError(McoreRLError):
    """A guard stopped the run; the message says what went wrong, and what to do."""


class NonFiniteError(McoreRLError):
    """Too many steps in a row had a non-finite loss or gradient."""


def error_named(name: str, words: Sequence[str]) -> McoreRLError:
    """The error of type ``name`` that ``plain`` described; a WorkerError if this process has no such type."""
    kinds = [McoreRLError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind.of_plain(words)
        kinds += kind.__subclasses__()
    return WorkerError(" ".join(words))
