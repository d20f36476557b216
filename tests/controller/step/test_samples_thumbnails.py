"""Which pictures of a step get a thumbnail, and what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mcore_rl.config.data import DataConfig
from mcore_rl.controller.step.samples import sample_rows, write_thumbnails
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode, FinishReason, Segment, prompt_segment
from mcore_rl.tracking.samples import SIDE, thumbnail_file
from tests.support.chat_styles import style
from tests.support.pictures import encoded, noise, picture
from tests.support.prompt_files import row, write


def load(folder: Path, *contents: list[bytes]) -> PromptSet:
    rows = [
        row("<image>" * len(each) + "Find x.", images=[{"bytes": x, "path": None} for x in each]) for each in contents
    ]
    options = {"max_samples": None, "title": "data.files", "pictures": PictureReader(Sizing(14))}
    long = DataConfig(max_prompt_length=1024)
    return PromptSet.load([write(folder / "t.parquet", rows)], long, style("qwen2.5-vl"), **options)  # type: ignore[arg-type]


def episodes(prompts: PromptSet, scores: list[float]) -> list[Episode]:
    said = Segment(author=Author.model, tokens=np.asarray([5], np.int32), text="x")
    return [
        Episode(
            row=prompts[number],
            prompt_id=prompts[number].id,
            group=number,
            index=0,
            segments=(prompt_segment(prompts[number]), said),
            end=FinishReason.stop,
            score=Score(score),
        )
        for number, score in enumerate(scores)
    ]


def test_the_highest_and_the_lowest_scores_come_first(tmp_path: Path) -> None:
    prompts = load(
        tmp_path, [picture(seed=0)], [picture(seed=1), picture(seed=4)], [picture(seed=2)], [picture(seed=3)]
    )
    drawn = episodes(prompts, [0.5, 1.0, 0.2, 0.4])
    write_thumbnails(tmp_path, prompts, drawn, 3)
    (first, other), lowest = prompts.media[1], prompts.media[2][0]
    expected = {thumbnail_file(tmp_path, each.image.sha256) for each in (first, other, lowest)}
    assert set((tmp_path / "media").iterdir()) == expected
    written = sample_rows(1, drawn, style("qwen2.5-vl"))
    assert written[1]["images"] == [
        {"sha256": first.image.sha256, "source": "t.parquet:1 images[0]"},
        {"sha256": other.image.sha256, "source": "t.parquet:1 images[1]"},
    ]
    write_thumbnails(tmp_path, prompts, drawn, 9)
    assert len(list((tmp_path / "media").iterdir())) == 5


def test_a_thumbnail_is_the_picture_made_small(tmp_path: Path) -> None:
    half = Image.new("RGB", (1024, 512), "red")
    half.paste(Image.new("RGB", (512, 512), "blue"))
    prompts = load(tmp_path, [encoded(half)], [encoded(noise(56, 84))])
    write_thumbnails(tmp_path, prompts, episodes(prompts, [1.0, 0.0]), 9)
    sizes = []
    for media in prompts.media:
        with Image.open(thumbnail_file(tmp_path, media[0].image.sha256)) as shown:
            assert shown.format == "WEBP"
            sizes.append(shown.size)
    assert sizes == [(SIDE, SIDE // 2), (56, 84)], "a small one stays as it is"
    with Image.open(thumbnail_file(tmp_path, prompts.media[0][0].image.sha256)) as shown:
        pixels = np.asarray(shown.convert("RGB"))
    assert np.allclose(pixels[60, 40], (0, 0, 255), atol=12)
    assert np.allclose(pixels[60, 200], (255, 0, 0), atol=12)


def test_a_picture_that_is_gone_or_broken_has_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    rows = [row("<image>?", images=["a.png"])]
    options = {"max_samples": None, "title": "data.files", "pictures": PictureReader(Sizing(14))}
    path = write(tmp_path / "u.parquet", rows)
    gone = PromptSet.load([path], DataConfig(), style("qwen2.5-vl"), **options)  # type: ignore[arg-type]
    (tmp_path / "a.png").unlink()
    write_thumbnails(tmp_path, gone, episodes(gone, [1.0]), 9)
    broken = load(tmp_path, [picture()[:-60]])
    write_thumbnails(tmp_path, broken, episodes(broken, [1.0]), 9)
    assert not (tmp_path / "media").exists()
