"""Conversations with pictures: what is trained is what it would be without, and no picture is cut or trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.data import SftDataConfig, Truncation
from mcore_rl.data.conversations import ConversationSet
from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.prompts import PAD, PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import style
from tests.support.pictures import picture
from tests.support.prompt_files import user, write

TITLE = "data.train_files"
READER = PictureReader(Sizing(14))
TOKENIZER = style("qwen2.5-vl")
PLACE = f"<|vision_start|>{PAD}<|vision_end|>"


def load(path: Path, *, reader: PictureReader | None = READER, **options: Any) -> ConversationSet:
    config = SftDataConfig(messages_key="messages", **options)
    return ConversationSet.load([path], config, TOKENIZER, max_samples=None, title=TITLE, pictures=reader)


def problems(path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        load(path, **options)
    return caught.value.problems


def struct(content: bytes) -> dict[str, Any]:
    return {"bytes": content, "path": None}


def chat(asked: str, answer: str = "7 squares", *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [*user(asked), {"role": "assistant", "content": answer}, *more]


def test_pictures_stand_where_the_messages_have_them(tmp_path: Path) -> None:
    """Oracle: the same text without pictures, whose places are filled by hand."""
    turns = chat("<image>How many?", "7 squares", *chat("And <image>?", "2"))
    pictures = [struct(picture(56, 84)), struct(picture(112, 56))]
    made = load(write(tmp_path / "t.parquet", [{"messages": turns, "images": pictures}]))[0]
    text = TOKENIZER.apply_chat_template(turns, tokenize=False)
    written = text.replace("<image>", PLACE.replace(PAD, PAD * 6), 1).replace("<image>", PLACE.replace(PAD, PAD * 8), 1)
    assert list(made.tokens) == TOKENIZER.encode(written, add_special_tokens=False)
    pad = TOKENIZER.convert_tokens_to_ids(PAD)
    tokens = np.asarray(made.tokens)
    assert [each.grid.tokens for each in made.media] == [6, 8]
    assert [place for each in made.media for place in range(each.first, each.end)] == np.flatnonzero(
        tokens == pad
    ).tolist()
    said = TOKENIZER.decode([token for token, is_trained in zip(made.tokens, made.mask, strict=True) if is_trained])
    assert said == "7 squares<|im_end|>2<|im_end|>"


def test_the_files_are_read_again_when_they_are_trained(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(56, 84))
    rows = [
        {"messages": chat("2 + 3?"), "images": None},
        {"messages": chat("<image>?"), "images": ["a.png"]},
    ]
    made = load(write(tmp_path / "t.parquet", rows))
    expected, grid = patches_of_file(picture(56, 84), READER.sizing)
    assert (made.patches(1, 0) == expected).all() and made[1].media[0].grid == grid and not made[0].media
    assert "; 1 pictures, 1 different, of 6 to 6 tokens" in made.describe()
    (tmp_path / "a.png").write_bytes(picture(56, 84, seed=1))
    with pytest.raises(DataError, match=r"t.parquet:1: images: .*a.png is not what it was when the run began"):
        made.patches(1, 0)


def test_a_cut_takes_text_and_no_picture(tmp_path: Path) -> None:
    rows = [{"messages": chat("<image>?", "x y " * 30), "images": [struct(picture())]}]
    path = write(tmp_path / "t.parquet", rows)
    whole = load(path)[0]
    limit = len(whole.tokens) - 10
    cut = load(path, max_length=limit, truncation=Truncation.right)[0]
    assert cut.media == whole.media and cut.tokens == whole.tokens[:limit] and cut.mask == whole.mask[:limit]
    (problem,) = problems(path, max_length=limit - 20, truncation=Truncation.left)
    begin = "t.parquet:0: data.truncation=left would cut the picture at the tokens "
    assert problem.startswith(begin) and f"data.max_length={limit - 20}. Write data.max_length=" in problem


def test_what_is_wrong_is_said_of_each_row(tmp_path: Path) -> None:
    rows = [
        {"messages": chat("<image>?"), "images": [struct(b"hello")]},
        {"messages": chat("?"), "images": [struct(picture())]},
        {"messages": chat("?", "see <image>"), "images": [struct(picture())]},
    ]
    said = problems(write(tmp_path / "t.parquet", rows))
    expected = [
        "images[0]: is no PNG",
        "images has 1 pictures, and the messages have 0 places",
        "has a picture in a turn",
    ]
    assert len(said) == len(expected)
    for number, (problem, text) in enumerate(zip(said, expected, strict=True)):
        assert problem.startswith(f"t.parquet:{number}: {text}"), problem


def test_rows_with_pictures_say_which_key_gives_them_to_a_model(tmp_path: Path) -> None:
    rows = [{"messages": chat("?"), "figure": struct(picture())}]
    (problem,) = problems(write(tmp_path / "t.parquet", rows), reader=None)
    assert problem.endswith("data.image_key=figure gives pictures to a model that sees some"), problem
