"""Lengths: the mean that was asked for after the cut, the published tail, and the groups of a real run's files."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean

import pytest

from mcore_rl.config.data import DataConfig
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.planning.lengths import SIGMA, Lognormal, Recorded, RowPictures, recorded_lengths, row_pictures
from mcore_rl.tracking.samples import write_samples
from tests.support import picture_models


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_the_mean_after_the_cut_is_the_one_asked_for(share: float) -> None:
    longest = 10_000
    lengths = Lognormal(share * longest, longest).group(Random(1), 40_000)
    assert fmean(lengths) == pytest.approx(share * longest, rel=0.02)
    assert min(lengths) >= 1 and max(lengths) == longest


def test_the_tail_is_the_published_one() -> None:
    """The 99th percentile is ten times the median; nearly nothing is cut here."""
    whole = Lognormal(1_000, 10**7)
    assert whole.median == pytest.approx(1_000 / exp(SIGMA**2 / 2), rel=1e-3)
    assert log(10) / SIGMA == pytest.approx(NormalDist().inv_cdf(0.99))
    lengths = sorted(whole.group(Random(2), 40_000))
    assert lengths[39_600] / lengths[20_000] == pytest.approx(10, rel=0.08)


def test_no_width_is_a_constant() -> None:
    assert set(Lognormal(300, 1_000, 0.0).group(Random(0), 50)) <= {300, 301}
    assert set(Lognormal(1_000, 1_000).group(Random(0), 50)) <= {1_000} | set(range(1, 1_001))


def test_groups_of_a_run_stay_together(tmp_path: Path) -> None:
    for step in (1, 2):
        rows = [
            {"prompt_id": prompt, "sample": sample, "num_tokens": 100 * step + 10 * index + sample}
            for index, prompt in enumerate("ab")
            for sample in range(3)
        ]
        write_samples(tmp_path, step, "rollouts", rows)
    lengths = recorded_lengths(tmp_path)
    assert sorted(lengths.groups) == [(100, 101, 102), (110, 111, 112), (200, 201, 202), (210, 211, 212)]
    assert lengths.mean == 156 and lengths.longest == 212
    random = Random(3)
    assert {tuple(lengths.group(random, 3)) for _ in range(100)} == set(lengths.groups)
    five = Recorded(((7, 9),)).group(random, 50)
    assert len(five) == 50 and set(five) == {7, 9}


def test_a_run_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lengths.*has no rollouts"):
        recorded_lengths(tmp_path)


def test_pictures_of_a_row_are_as_many_and_as_large_as_its_settings_allow() -> None:
    """Of 28 x 28 pixels a token, and of 2 x 2 patches: 20 tokens are 4 x 5 of them."""
    _, model = model_of(picture_models.config("qwen2_5_vl"), pictures=True)

    def pictures(**settings: object) -> RowPictures:
        data = DataConfig(image_key="images", image_max_pixels=28 * 28 * 20, **settings)  # type: ignore[arg-type]
        return row_pictures(data, model, mean=40, longest=100)

    full = (8, 10)
    assert pictures() == RowPictures(mean=(full,), most=(full,) * 5)
    assert pictures(max_images=2) == RowPictures(mean=(full,), most=(full,) * 2)
    assert pictures(mean_image_tokens=50) == RowPictures(mean=((8, 8),) * 3, most=(full,) * 5)
    assert pictures(mean_image_tokens=50, max_images=1).mean == (full,)
    assert row_pictures(DataConfig(), model, mean=40, longest=100) == RowPictures()
