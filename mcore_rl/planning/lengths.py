"""Lengths of responses for a simulation: a lognormal distribution, or the groups that a run recorded; pictures of rows.

The default width is that of trajectories of reasoning, whose 99th percentile is ten times the median (Laminar,
arXiv:2510.12633, section 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, isqrt, log
from pathlib import Path
from random import Random
from statistics import NormalDist

from mcore_rl.config.data import DataConfig, PlannedImagesConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.families.flops import PatchGrid
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.planning.overheads import MEAN_IMAGE_SHARE, MEAN_PROMPT_SHARE, MEAN_RESPONSE_SHARE

NORMAL = NormalDist()
SIGMA = log(10) / NORMAL.inv_cdf(0.99)  # 0.99


def mean_lengths(data: DataConfig) -> tuple[float, float]:
    """(tokens of a prompt, tokens of a response) that a plan assumes on average."""
    response = data.mean_response_length or MEAN_RESPONSE_SHARE * data.max_response_length
    return MEAN_PROMPT_SHARE * data.max_prompt_length, response


@dataclass(frozen=True, kw_only=True)
class RowPictures:
    """The pictures of a row, each by its patches high and wide.

    mean: of a row with the mean number of picture tokens.  most: of the row that has most.
    """

    mean: tuple[PatchGrid, ...] = ()
    most: tuple[PatchGrid, ...] = ()


def row_pictures(data: object, model: ModelConfig, *, mean: float, longest: int) -> RowPictures:
    """The pictures that a plan assumes of a row of ``data``; none where models are given none.

    mean, longest: tokens of the part of a row that pictures stand in, its prompt.
    """
    vision = model.vision
    if vision is None or not isinstance(data, PlannedImagesConfig) or not data.sees_pictures:
        return RowPictures()
    largest = max(1, data.image_max_pixels // (vision.patch_size * vision.merge_size) ** 2)
    most = longest if data.max_images is None else min(longest, data.max_images * largest)
    tokens = min(most, data.mean_image_tokens or max(1, round(MEAN_IMAGE_SHARE * mean)))
    return RowPictures(mean=_grids(tokens, largest, vision.merge_size), most=_grids(most, largest, vision.merge_size))


def _grids(tokens: int, largest: int, merge: int) -> tuple[PatchGrid, ...]:
    """Equal pictures, as square as whole tokens allow, of ``tokens`` at most in all and ``largest`` each."""
    count = ceil(tokens / largest)
    each = tokens // count
    side = isqrt(each)
    return ((side * merge, each // side * merge),) * count


@dataclass(frozen=True)
class Lognormal:
    """Independent lognormal lengths, cut off at ``longest``.

    mean: of the lengths after the cut, below ``longest``.  sigma: standard deviation of the logarithm before it.
    """

    mean: float
    longest: int
    sigma: float = SIGMA

    def __post_init__(self) -> None:
        assert 0 < self.mean <= self.longest and self.sigma >= 0, "the mean is at most the greatest length"

    @cached_property
    def median(self) -> float:
        """The median before the cut, for which the mean after it is ``mean``."""
        if self.sigma == 0 or self.mean >= self.longest:
            return self.mean
        low = self.mean * 1e-6
        high = self.longest * 1e6
        for _ in range(200):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, median: float) -> float:
        """The mean of ``min(length, longest)``: the partial expectation of a lognormal, and the share that is cut."""
        score = log(self.longest / median) / self.sigma
        below = median * exp(self.sigma**2 / 2) * NORMAL.cdf(score - self.sigma)
        return below + self.longest * (1 - NORMAL.cdf(score))

    def group(self, random: Random, size: int) -> list[int]:
        """The lengths of the ``size`` responses to one prompt, each at least 1."""
        center = log(self.median)
        drawn = (exp(center + self.sigma * random.gauss(0.0, 1.0)) for _ in range(size))
        return [max(1, min(self.longest, ceil(length))) for length in drawn]


@dataclass(frozen=True)
class Recorded:
    """Lengths of groups that a run drew, each group as it was, so that what its responses have in common stays.

    groups: at least one; none is empty.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert self.groups and all(self.groups), "there is a group, and each has a response"

    @cached_property
    def mean(self) -> float:
        """The mean length of all responses, tokens."""
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    @cached_property
    def longest(self) -> int:
        """The greatest length of a response, tokens."""
        return max(map(max, self.groups))

    def group(self, random: Random, size: int) -> list[int]:
        """The lengths of a recorded group; if it has another size, ``size`` of them with replacement."""
        lengths = random.choice(self.groups)
        chosen: Sequence[int] = lengths if len(lengths) == size else random.choices(lengths, k=size)
        return [max(1, length) for length in chosen]


Lengths = Lognormal | Recorded


def recorded_lengths(run: Path) -> Recorded:
    """The lengths of all groups in the ``rollouts/`` of the run directory ``run``.

    Raises ConfigError if there are none.
    """
    import pyarrow.parquet as pq

    from mcore_rl.tracking.samples import sample_files  # which imports pyarrow, that --help need not

    groups: dict[tuple[int, str], list[int]] = {}
    for step, path in sample_files(run, "rollouts").items():
        columns = pq.read_table(path, columns=["prompt_id", "num_tokens"]).to_pydict()
        for prompt, length in zip(columns["prompt_id"], columns["num_tokens"], strict=True):
            groups.setdefault((step, prompt), []).append(max(1, length))
    if not groups:
        problem = "has no rollouts/step_N.parquet with samples"
        raise ConfigError([Violation("--lengths", run, problem, "Name the directory of a run, or a mean in tokens")])
    return Recorded(tuple(map(tuple, groups.values())))
