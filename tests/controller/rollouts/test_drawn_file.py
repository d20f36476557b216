"""Rollouts in a file: random ones come back to the last bit, and a file that was damaged anywhere is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.controller.rollouts.drawn_file import META, DrawnFileError, DrawnGroup, read_drawn, write_drawn
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, FinishReason, Segment, VersionSpan, prompt_segment
from mcore_rl.rollout.protocol import Sample
from tests.support.scripted_rollout import row

TEXTS = ("", "seven", "zwölf\n\x00", "\ud800 half a pair", "日本", '"quoted" {json}')
NUMBERS = (0.1 + 0.2, -0.0, 5e-324, 1e308, -1.0, 3, math.nextafter(1.0, 2.0))


def prompts(number: int, epoch: int) -> PromptRow:
    if not 0 <= number < 12:
        raise IndexError(number)
    return replace(row(number, tokens=range(1, 2 + number)), number=number, epoch=epoch)


def logprobs(draw: random.Random, count: int) -> np.ndarray:
    """Any bits that a float32 may have, nan with a payload and negative zero among them."""
    return np.array([draw.getrandbits(32) for _ in range(count)], dtype=np.uint32).view(np.float32)


def spans(draw: random.Random, count: int) -> tuple[VersionSpan, ...]:
    if draw.random() < 0.2:
        return ()
    cuts = sorted({0, count, *(draw.randint(0, count) for _ in range(draw.randint(0, 3)))})
    of = list(pairwise(cuts)) or [(0, 0)]
    return tuple(VersionSpan(version=draw.randint(0, 9), start=start, end=end) for start, end in of)


def experts(draw: random.Random, count: int) -> np.ndarray | None:
    if draw.random() < 0.5:
        return None
    kind = draw.choice([np.uint8, np.int16])
    return np.array([draw.randint(0, 120) for _ in range(count * 6)], dtype=kind).reshape(count, 3, 2)


def segment(draw: random.Random) -> Segment:
    author, count = draw.choice([Author.model, Author.model, Author.tool, Author.user]), draw.randint(0, 5)
    trained = author is Author.model and draw.random() < 0.8
    known = trained or draw.random() < 0.3
    return Segment(
        author=author,
        tokens=np.array([draw.randint(0, 2**31 - 1) for _ in range(count)], dtype=np.int32),
        trained=trained,
        logprobs=logprobs(draw, count) if known else None,
        versions=spans(draw, count) if author is Author.model else (),
        reward=draw.choice([None, *NUMBERS]) if trained else None,
        text=draw.choice(TEXTS),
        tool_s=float(draw.choice(NUMBERS)),
        media=pictures(draw, count) if author is not Author.model else (),
    )


def pictures(draw: random.Random, count: int) -> tuple[Placed, ...]:
    """Pictures of one token each."""
    places = [place for place in range(count) if draw.random() < 0.2]
    sizes = [Grid(1, 2, 2), Grid(1, 4, 4, merge=4)]
    return tuple(Placed(ImageRef(f"{place:064x}", draw.choice(TEXTS)), place, draw.choice(sizes)) for place in places)


def score(draw: random.Random) -> Score | None:
    if draw.random() < 0.1:
        return None
    parts = {draw.choice(TEXTS): draw.choice([*NUMBERS, math.inf]) for _ in range(draw.randint(0, 3))}
    rewards = tuple(draw.choice(NUMBERS) for _ in range(draw.randint(0, 3)))
    named = draw.choice([None, *TEXTS])
    return Score(draw.choice(NUMBERS), parts, draw.choice([None, 0.0, 1.0, 0.5]), named, named, rewards)


def episode(draw: random.Random, of: PromptRow, index: int) -> Episode:
    segments = (prompt_segment(of), *(segment(draw) for _ in range(draw.randint(0, 4))))
    agent = AgentCounts(
        reason="answered", turns=2, calls=draw.randint(0, 3), failed_calls=1, tool_s=draw.choice(NUMBERS),
        cached_tokens=draw.randint(0, 9),
    )  # fmt: skip
    made = Episode(
        row=of,
        prompt_id=f"{draw.randint(0, 9)}/{draw.choice(TEXTS)}",
        group=draw.randint(0, 7),
        index=index,
        segments=segments,
        end=draw.choice([*FinishReason]),
        score=score(draw),
        agent=draw.choice([None, agent]),
        pair=draw.choice([None, 0, 7]),
        part=draw.choice([0, 2]),
    )
    return replace(made, experts=experts(draw, made.num_tokens - 1))


def sample(draw: random.Random, index: int) -> Sample:
    count = draw.randint(0, 5)
    return Sample(
        prompt_id=draw.choice(TEXTS),
        index=index,
        tokens=np.array([draw.randint(0, 99) for _ in range(count)], dtype=np.int32),
        logprobs=logprobs(draw, count),
        versions=spans(draw, count),
        finish=draw.choice([*FinishReason]),
        stop=draw.choice([None, 7, *TEXTS]),
        text=draw.choice(TEXTS),
        cached_tokens=draw.randint(0, 9),
        experts=experts(draw, count + 1),
    )


def drawn(seed: int) -> list[DrawnGroup]:
    draw, groups = random.Random(seed), list[DrawnGroup]()
    for number in range(draw.randint(0, 6)):
        of, finished = prompts(draw.randint(0, 11), draw.randint(0, 3)), draw.random() < 0.6
        samples = [(tuple(range(draw.randint(0, 4))), sample(draw, index)) for index in range(draw.randint(0, 4))]
        groups.append(
            DrawnGroup(
                row=of,
                episodes=tuple(episode(draw, of, index) for index in range(draw.randint(1, 4))) if finished else (),
                samples=() if finished else tuple(samples),
                facts={"ordinal": number, "oldest": draw.randint(0, 9)},
            )
        )
    return groups


def bits(value: Any) -> Any:
    """``value`` as nested tuples that are equal where, and only where, every bit and every type is."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(bits(getattr(value, each.name)) for each in fields(value)))
    if isinstance(value, dict):
        return tuple((key, bits(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(bits(each) for each in value)
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


def test_every_field_is_written() -> None:
    """A field that is added must be written, too, and drawn at random above."""
    known = {
        Episode: "row prompt_id group index segments end score experts agent pair part",
        Segment: "author tokens trained logprobs versions reward text tool_s media",
        AgentCounts: "reason turns calls failed_calls tool_s cached_tokens begins",
        Score: "value parts correct error answer turn_rewards",
        Sample: "prompt_id index tokens logprobs versions finish stop text cached_tokens experts",
        RolloutBatch: "episodes greedy num_batches seconds dropped metrics",
    }
    for kind, names in known.items():
        assert [each.name for each in fields(kind)] == names.split(), kind


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_is_what_was_written(tmp_path: Path, seed: int) -> None:
    groups, facts = drawn(seed), {"place": {"again": [[0, 1]]}, "greedy": [0.1 + 0.2, -0.0], "none": None}
    write_drawn(tmp_path / "drawn.parquet", facts, groups)
    read_facts, read = read_drawn(tmp_path / "drawn.parquet", prompts)
    assert bits(read_facts) == bits(facts)
    assert bits(read) == bits(groups)
    for group in read:
        for each in group.episodes:
            assert each.segments[0].tokens.flags.writeable, "torch warns of arrays that it may not write to"


def test_columns_are_typed_and_small(tmp_path: Path) -> None:
    """A token costs the 8 bytes of its id and its log-prob, if they do not compress; a choice of an expert one byte."""
    draw, of = random.Random(0), prompts(3, 0)
    count = 20_000
    tokens = np.array([draw.getrandbits(31) for _ in range(count)], dtype=np.int32)
    said = Segment(author=Author.model, tokens=tokens, trained=True, logprobs=logprobs(draw, count))
    made = Episode(row=of, prompt_id="p", group=0, index=0, segments=(prompt_segment(of), said), end=FinishReason.stop)
    choices = np.array([draw.getrandbits(8) for _ in range((made.num_tokens - 1) * 4)], dtype=np.uint8)
    made = replace(made, experts=choices.reshape(-1, 2, 2))
    write_drawn(path := tmp_path / "drawn.parquet", {}, [DrawnGroup(row=of, episodes=(made,))])
    assert path.stat().st_size < count * (8 + 4) * 1.05 + 10_000
    types = {each.name: str(each.type) for each in pq.read_schema(path)}
    assert types["tokens"].startswith("large_list") and "int32" in types["tokens"] and "float" in types["logprobs"]


def written(directory: Path) -> Path:
    write_drawn(path := directory / "drawn.parquet", {"a": 1}, [each for seed in range(6) for each in drawn(seed)])
    return path


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    for length in [0, 3, *range(5, len(whole), max(1, len(whole) // 60)), len(whole) - 1]:
        (torn := tmp_path / "torn.parquet").write_bytes(whole[:length])
        with pytest.raises(DrawnFileError, match=r"cannot be read|is no file of rollouts"):
            read_drawn(torn, prompts)


def test_a_byte_that_was_changed_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    whole, as_it_was = written(tmp_path).read_bytes(), bits(read_drawn(tmp_path / "drawn.parquet", prompts))
    draw, noticed = random.Random(1), 0
    for _ in range(150):
        place = draw.randrange(len(whole))
        (changed := tmp_path / "changed.parquet").write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
        )
        try:
            read = bits(read_drawn(changed, prompts))
        except DrawnFileError:
            noticed += 1
        else:  # in parquet's footer, which a checkpoint's manifest sums: values are under a checksum of their page
            assert read[1] == as_it_was[1] or place > len(whole) // 2
    assert noticed > 75


def fewer(number: int, epoch: int) -> PromptRow:
    return prompts(number if number < 2 else 99, epoch)


def renamed(number: int, epoch: int) -> PromptRow:
    return replace(prompts(number, epoch), id=f"other:{number}")


def retokenised(number: int, epoch: int) -> PromptRow:
    return replace(prompts(number, epoch), tokens=(9, *prompts(number, epoch).tokens))


@pytest.mark.parametrize(
    ("row_of", "says"),
    [(fewer, "there are not so many"), (renamed, "is of other data: its prompt"), (retokenised, "another tokenizer")],
)
def test_other_data_are_refused(tmp_path: Path, row_of: Callable[[int, int], PromptRow], says: str) -> None:
    with pytest.raises(DrawnFileError, match=says):
        read_drawn(written(tmp_path), row_of)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrawnFileError, match="is missing"):
        read_drawn(tmp_path / "none.parquet", prompts)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(DrawnFileError, match="is no file of rollouts"):
        read_drawn(tmp_path / "foreign.parquet", prompts)
    table = pq.read_table(written(tmp_path))
    pq.write_table(table.replace_schema_metadata({META: '{"format": 99}'}), tmp_path / "later.parquet")
    with pytest.raises(DrawnFileError, match="is of format 99, and this version reads 1"):
        read_drawn(tmp_path / "later.parquet", prompts)
