"""The parallel layout as a user writes it: ``tp=2,pp=2,vpp=1,cp=1,ep=2,etp=1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from mcore_rl.config.bounds import PositiveInt, Ranks
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; the data-parallel size is what remains of the world.

    tp: tensor parallel (always with sequence parallelism).  pp: pipeline stages.  vpp: model chunks per stage
    (interleaved schedule).  cp: context parallel.  ep: expert parallel, over the tp*cp*dp ranks of a stage.
    etp: tensor parallel inside an expert.
    pipeline_layers: layers of each of the pp*vpp chunks in the order of the forward pass; required if the layers do not
    divide evenly, else optional.
    """

    tp: Ranks = 1
    pp: Ranks = 1
    vpp: Ranks = 1
    cp: Ranks = 1
    ep: Ranks = 1
    etp: Ranks = 1
    pipeline_layers: list[PositiveInt] | None = None

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


assert AXES == tuple(field.name for field in fields(ParallelConfig))[: len(AXES)]


def parse_sizes(text: str, axes: Sequence[str], key: str) -> dict[str, int]:
    """``"tp=2,ep=2"`` to ``{"tp": 2, "ep": 2}``; axes that are left out are absent.

    axes: the names that may be written.  key: the name of the text in messages.
    Raises ConfigError with every malformed, unknown, repeated or non-positive part.
    """
    sizes: dict[str, int] = {}
    violations = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in axes:
            violations.append(Violation(key, part, "no such axis", f"Write some of {', '.join(axes)}"))
        elif axis in sizes:
            violations.append(Violation(key, part, f"{axis} is given twice", "Write it once"))
        elif not re.fullmatch("0*[1-9][0-9]{0,5}", size):
            violations.append(
                Violation(key, part, "a size is a positive integer, of six digits at most", f"Write {axis}=1 or more")
            )
        else:
            sizes[axis] = int(size)
    refuse_if_any(violations)
    return sizes


def parse_layers(text: str) -> list[int]:
    """``"16,15,15,15"`` to the layers of each chunk.  Raises ConfigError if a part is no positive integer."""
    counts = [piece.strip() for piece in text.split(",")]
    if all(re.fullmatch("0*[1-9][0-9]{0,5}", count) for count in counts):
        return [int(count) for count in counts]
    problem = "is no list of numbers of layers"
    remedy = "Write one for each chunk, as 16,15,15,15"
    raise ConfigError([Violation("pipeline-layers", text, problem, remedy)])


def parse_layout(text: str) -> ParallelConfig:
    """``"tp=2,ep=2"`` to a ``ParallelConfig``; axes left out are 1.

    Raises ConfigError as ``parse_sizes`` does.
    """
    parallel = ParallelConfig()
    for axis, size in parse_sizes(text, AXES, "layout").items():
        setattr(parallel, axis, size)
    return parallel
