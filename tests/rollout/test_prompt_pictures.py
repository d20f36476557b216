"""Pictures of rows in prompts: of every sample and turn that begins with the row, and made once for all samples."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from mcore_rl.config.data import DataConfig
from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.ground.errors import DataError
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


class Counted:
    """Rows that note which pictures are made; ``meanwhile`` runs within."""

    def __init__(self, prompts: PromptSet, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._prompts = prompts
        self.media = prompts.media
        self.made = Counter[tuple[int, int]]()
        self.meanwhile = meanwhile

    def patches(self, index: int, place: int) -> NDArray[np.uint8]:
        self.made[index, place] += 1
        self.meanwhile()
        return self._prompts.patches(index, place)


def keys_of(prompts: PromptSet) -> list[str]:
    return [placed.image.sha256 for media in prompts.media for placed in media]


def test_equal_pictures_are_made_once_for_all_who_ask_at_the_same_time(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture(), picture(seed=1)], [picture()])
    both = threading.Barrier(2)  # so that each picture is asked for while the other is made
    rows = Counted(prompts, lambda: both.wait(30))
    shelf = PictureShelf([cast(PromptSet, rows)])
    names = keys_of(prompts)
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(shelf.patches, names * 2))
    assert rows.made == {(0, 0): 1, (0, 1): 1}
    assert len({id(each) for each in made}) == 2
    (other,) = shelf.of_row(prompts[1])
    assert other.read() is made[0]


def test_pictures_that_were_asked_for_last_are_kept(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture(seed=seed) for seed in range(3)])
    a, b, c = keys_of(prompts)
    rows = Counted(prompts)
    size = prompts.patches(0, 0).nbytes
    shelf = PictureShelf([cast(PromptSet, rows)], kept_bytes=2 * size)
    for name in (a, b, a, c, a, b):
        shelf.patches(name)
    assert rows.made == {(0, 0): 1, (0, 1): 2, (0, 2): 1}, "c took the place of b, not of a"
    alone = PictureShelf([prompts], kept_bytes=size - 1)
    gone = weakref.ref(alone.patches(a))
    assert gone() is None, "a picture that is larger than all that is kept"


def test_everybody_who_waits_is_told_what_is_wrong_and_it_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    path = write(tmp_path / "t.parquet", [row("<image>?", images=["a.png"])])
    options = {"max_samples": None, "title": "data.files", "pictures": PictureReader(SIZING)}
    prompts = PromptSet.load([path], DataConfig(), style("qwen2.5-vl"), **options)  # type: ignore[arg-type]
    (tmp_path / "a.png").write_bytes(picture(seed=1))
    waits = threading.Event()
    shelf = PictureShelf([cast(PromptSet, Counted(prompts, lambda: waits.wait(30)))])
    (name,) = keys_of(prompts)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(shelf.patches, name) for _ in range(2)]
        waits.set()
        for each in asked:
            with pytest.raises(DataError, match=r"t.parquet:0: images: .*a.png is not what it was .* Bring the file"):
                each.result()
    (tmp_path / "a.png").write_bytes(picture())
    np.testing.assert_array_equal(shelf.patches(name), patches_of_file(picture(), SIZING)[0])


def test_a_picture_that_breaks_off_names_its_row(tmp_path: Path) -> None:
    prompts = load(tmp_path, [picture()[:-60]])
    with pytest.raises(DataError, match=r"t.parquet:0: images\[0\]: cannot be read"):
        pickle.dumps(PictureShelf([prompts]).of_row(prompts[0]))
