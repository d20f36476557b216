"""Pictures of rows in prompts: of every sample and turn that begins with the row, and made once for all samples."""

from __future__ import annotations

import asyncio
import pickle
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.data import DataConfig
from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import DataError
from mcore_rl.rollout.prompt_pictures import PictureShelf, SeeingSource
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, requests_of
from tests.support.chat_styles import style
from tests.support.pictures import picture
from tests.support.prompt_files import row, write

SIZING = Sizing(14)


class Recorder:
    """Remembers what it was asked for, and draws nothing."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        self.asked += requests
        for each in list[Sample]():
            yield each


def load(folder: Path, *contents: Sequence[bytes]) -> PromptSet:
    """Rows of which each has so many pictures."""
    rows = [
        row("<image>" * len(each) + "Find x.", images=[{"bytes": content, "path": None} for content in each] or None)
        for each in contents
    ]
    options = {"max_samples": None, "title": "data.files", "pictures": PictureReader(SIZING)}
    file = write(folder / "t.parquet", rows)
    return PromptSet.load([file], DataConfig(), style("qwen2.5-vl"), **options)  # type: ignore[arg-type]


def shown(prompts: PromptSet, requests: Sequence[Request]) -> list[Request]:
    """``requests`` as an engine gets them; the row of number N is drawn from as ``7/N``."""
    recorder = Recorder()
    rows = {f"7/{index}": prompts[index] for index in range(len(prompts))}

    async def draw() -> None:
        source = SeeingSource(recorder, rows, PictureShelf([prompts]))
        assert [each async for each in source.generate(requests, Sampling(max_tokens=4))] == []

    asyncio.run(draw())
    return recorder.asked


def test_every_turn_that_begins_with_a_row_has_its_pictures(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture(56, 84), picture(112, 56)], [])
    seen, text = prompts[0], prompts[1]
    first = Prompt(id="7/0", tokens=seen.tokens)
    later = Prompt(id="7/0/turn1", tokens=(*seen.tokens, 5, 6), opening="7/0")
    asked = [
        Request(prompt=first),
        Request(prompt=later, index=3),
        Request(prompt=replace(later, tokens=(5, *seen.tokens))),  # a program's own text
        Request(prompt=Prompt(id="7/1", tokens=text.tokens)),
        Request(prompt=Prompt(id="a stranger's", tokens=seen.tokens)),
    ]
    given = shown(prompts, asked)
    assert [len(each.prompt.pictures) for each in given] == [2, 2, 0, 0, 0]
    assert [replace(each, prompt=replace(each.prompt, pictures=())) for each in given] == asked
    for each in given[:2]:
        assert tuple(picture.placed for picture in each.prompt.pictures) == seen.media
    for content, each in zip((picture(56, 84), picture(112, 56)), given[0].prompt.pictures, strict=True):
        np.testing.assert_array_equal(each.read(), patches_of_file(content, SIZING)[0])


def test_samples_share_a_picture_on_its_way(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture(560, 560)])
    prompt = Prompt(id="7/0", tokens=prompts[0].tokens)
    sent = {n: pickle.dumps(shown(prompts, requests_of([prompt], n))) for n in (1, 8)}
    size = patches_of_file(picture(560, 560), SIZING)[0].nbytes
    assert size < len(sent[1]) and len(sent[8]) < len(sent[1]) + size // 10
    arrived = pickle.loads(sent[8])
    assert len({id(each.prompt.pictures[0].read()) for each in arrived}) == 1
    again = pickle.loads(pickle.dumps(arrived))  # from the actor to the engine's process
    np.testing.assert_array_equal(again[7].prompt.pictures[0].read(), arrived[0].prompt.pictures[0].read())


def test_equal_pictures_are_made_once_and_not_kept(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture()], [picture()])
    shelf = PictureShelf([prompts])
    name = prompts[0].media[0].image.sha256
    made = shelf.patches(name)
    (other,) = shelf.of_row(prompts[1])
    assert other.read() is made
    alive = weakref.ref(made)
    del made
    assert alive() is None


def test_a_picture_that_breaks_off_names_its_row(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture()[:-60]])
    with pytest.raises(DataError, match=r"t.parquet:0: images\[0\]: cannot be read"):
        pickle.dumps(PictureShelf([prompts]).of_row(prompts[0]))
