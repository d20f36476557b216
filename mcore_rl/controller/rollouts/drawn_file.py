"""Rollouts in a file, to the last bit: groups with their graded episodes, and the samples of those that are unfinished.

One parquet file: a row for each episode and each sample, with tokens, log-probs (float32) and the experts that the
sampler chose as typed columns, and all else of it as JSON; what is of a group or of all groups is in the schema's
metadata.  Nothing is pickled.  A prompt is written as its number in the training files, which are read anyway.

The invariant: what is read is what was written, bit for bit, or DrawnFileError says what is wrong with the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, FinishReason, Segment, VersionSpan
from mcore_rl.rollout.protocol import Sample

FORMAT = 1
META = b"mcore_rl.drawn"
EPISODE = "episode"
SAMPLE = "sample"
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("group", pa.int32()),  # its place in the file
        ("index", pa.int32()),  # of the episode or sample within its group
        ("asked", pa.large_list(pa.int32())),  # of a sample: the model's input, to which it is the answer
        ("tokens", pa.large_list(pa.int32())),  # of an episode: of all segments, end to end
        ("logprobs", pa.large_list(pa.float32())),  # of an episode: of the segments that have some, end to end
        ("experts", pa.large_binary()),
        ("rest", pa.string()),  # JSON
    ]
)
# Gives the prompt with a number, as it is drawn in an epoch.
RowOf = Callable[[int, int], PromptRow]
AskedTokens = tuple[int, ...]  # the tokens of a request


class DrawnFileError(Exception):
    """A file of rollouts cannot be read; says why."""


@dataclass(frozen=True, kw_only=True)
class DrawnGroup:
    """What was drawn for one prompt.

    episodes: graded; a greedy one last if the algorithm needs it.  () where the group is unfinished.
    samples: of an unfinished group, each with the model's input that it answers.
    facts: what else is known of it, as JSON has it.
    """

    row: PromptRow
    episodes: tuple[Episode, ...] = ()
    samples: tuple[tuple[AskedTokens, Sample], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_drawn(path: Path, facts: Mapping[str, Any], groups: Sequence[DrawnGroup]) -> None:
    """Writes ``groups`` and ``facts``, which are plain values, to ``path``.  OSError: the disk is full, or fails."""
    of_groups = [
        {"number": each.row.number, "epoch": each.row.epoch, "id": each.row.id, "facts": dict(each.facts)}
        for each in groups
    ]
    meta = {"format": FORMAT, "facts": dict(facts), "groups": of_groups}
    episodes = [(place, each) for place, group in enumerate(groups) for each in group.episodes]
    samples = [(place, *each) for place, group in enumerate(groups) for each in group.samples]
    drawn: list[Episode | Sample] = [*(each for _, each in episodes), *(each for *_, each in samples)]
    logprobs = [[part.logprobs for part in each.segments if part.logprobs is not None] for _, each in episodes]
    tokens = [np.concatenate([part.tokens for part in each.segments]) for _, each in episodes]
    columns = [
        pa.array([EPISODE] * len(episodes) + [SAMPLE] * len(samples), pa.string()),
        pa.array([place for place, *_ in [*episodes, *samples]], pa.int32()),
        pa.array([each.index for each in drawn], pa.int32()),
        _lists([None] * len(episodes) + [np.asarray(asked, np.int32) for _, asked, _ in samples], np.int32),
        _lists([*tokens, *(each.tokens for *_, each in samples)], np.int32),
        _lists([*map(_joined, logprobs), *(each.logprobs for *_, each in samples)], np.float32),
        pa.array([_bytes(each.experts) for each in drawn], pa.large_binary()),
        pa.array(
            [json.dumps(_episode_rest(each)) for _, each in episodes]
            + [json.dumps(_sample_rest(each)) for *_, each in samples],
            pa.string(),
        ),
    ]
    table = pa.Table.from_arrays(columns, schema=SCHEMA).replace_schema_metadata({META: json.dumps(meta)})
    pq.write_table(
        table, path, compression="zstd", use_dictionary=["kind"], write_statistics=False, write_page_checksum=True
    )


def read_drawn(path: Path, row_of: RowOf) -> tuple[dict[str, Any], list[DrawnGroup]]:
    """(facts, groups) of a file that ``write_drawn`` wrote.

    row_of: the prompts of the training files.  DrawnFileError: it is missing, cut off, damaged, or of other data.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True, memory_map=False)
        meta = json.loads((table.schema.metadata or {})[META])
        if meta["format"] != FORMAT:
            raise DrawnFileError(f"is of format {meta['format']}, and this version reads {FORMAT}")
        rows = [_row(each, row_of) for each in meta["groups"]]
        episodes: list[list[Episode]] = [[] for _ in rows]
        samples: list[list[tuple[AskedTokens, Sample]]] = [[] for _ in rows]
        for kind, place, index, asked, tokens, logprobs, experts, rest in _records(table):
            values = json.loads(rest)
            if kind == EPISODE:
                episodes[place].append(_episode(rows[place], index, tokens, logprobs, experts, values))
            else:
                samples[place].append((tuple(asked.tolist()), _sample(index, tokens, logprobs, experts, values)))
        groups = [
            DrawnGroup(row=row, episodes=tuple(episodes[place]), samples=tuple(samples[place]), facts=each["facts"])
            for place, (row, each) in enumerate(zip(rows, meta["groups"], strict=True))
        ]
        return meta["facts"], groups
    except FileNotFoundError as error:
        raise DrawnFileError("is missing") from error
    except (OSError, pa.ArrowException) as error:
        raise DrawnFileError(f"cannot be read: {_line(error)}") from error
    except (LookupError, TypeError, ValueError, RecursionError, AttributeError, AssertionError) as error:
        raise DrawnFileError(f"is no file of rollouts: {type(error).__name__}: {_line(error)}") from error


def _row(group: Mapping[str, Any], row_of: RowOf) -> PromptRow:
    """The prompt of a group; the files must still have it under its number."""
    try:
        row = row_of(group["number"], group["epoch"])
    except IndexError:
        raise DrawnFileError(f"has a response to prompt {group['number']}, and there are not so many") from None
    if row.id != group["id"]:
        raise DrawnFileError(f"is of other data: its prompt {group['number']} was {group['id']}, and is {row.id} here")
    return row


def _records(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The rows of ``table``, lists as arrays."""
    assert table.schema.equals(SCHEMA), f"its columns are {table.schema.names}"
    table = table.combine_chunks()
    plain = {name: table.column(name).to_pylist() for name in ("kind", "group", "index", "experts", "rest")}
    asked, tokens, logprobs = (list(_arrays(table.column(name))) for name in ("asked", "tokens", "logprobs"))
    yield from zip(
        *(plain["kind"], plain["group"], plain["index"], asked, tokens, logprobs, plain["experts"], plain["rest"]),
        strict=True,
    )


def _episode_rest(episode: Episode) -> dict[str, Any]:
    experts = episode.experts
    return {
        "prompt_id": episode.prompt_id,
        "group": episode.group,
        "end": episode.end.value,
        "score": None if episode.score is None else asdict(episode.score),
        "agent": None if episode.agent is None else asdict(episode.agent),
        "pair": episode.pair,
        "part": episode.part,
        "experts": None if experts is None else [str(experts.dtype), *experts.shape],
        "segments": [
            {
                "author": each.author.value,
                "tokens": len(each.tokens),
                "trained": each.trained,
                "logprobs": each.logprobs is not None,
                "versions": _spans(each.versions),
                "reward": each.reward,
                "text": each.text,
                "tool_s": each.tool_s,
                "media": [asdict(placed) for placed in each.media],
            }
            for each in episode.segments
        ],
    }


def _episode(
    row: PromptRow,
    index: int,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    experts: bytes | None,
    rest: Mapping[str, Any],
) -> Episode:
    score = rest["score"]
    agent = rest["agent"]
    segments = []
    at = 0
    scored = 0
    for each in rest["segments"]:
        start = at
        at = at + each["tokens"]
        known = None
        if each["logprobs"]:
            known = logprobs[scored : scored + each["tokens"]]
            scored = scored + each["tokens"]
        segments.append(
            Segment(
                author=Author(each["author"]),
                tokens=tokens[start:at],
                trained=each["trained"],
                logprobs=known,
                versions=_versions(each["versions"]),
                reward=each["reward"],
                text=each["text"],
                tool_s=each["tool_s"],
                media=tuple(map(_placed, each.get("media", []))),
            )
        )
    assert (at, scored) == (len(tokens), len(logprobs)), f"{rest['prompt_id']}: its segments are not all of its tokens"
    own_prompt = agent is not None and agent["begins"]  # a user's program writes its prompts itself
    if not own_prompt and tuple(segments[0].tokens.tolist()) != tuple(row.tokens):
        raise DrawnFileError(f"is of other data, or another tokenizer or template: {row.id} has other tokens here")
    return Episode(
        row=row,
        prompt_id=rest["prompt_id"],
        group=rest["group"],
        index=index,
        segments=tuple(segments),
        end=FinishReason(rest["end"]),
        score=None if score is None else Score(**score | {"turn_rewards": tuple(score["turn_rewards"])}),
        experts=_experts(experts, rest["experts"]),
        agent=None if agent is None else AgentCounts(**agent),
        pair=rest["pair"],
        part=rest["part"],
    )


def _sample_rest(sample: Sample) -> dict[str, Any]:
    experts = sample.experts
    return {
        "prompt_id": sample.prompt_id,
        "versions": _spans(sample.versions),
        "finish": sample.finish.value,
        "stop": sample.stop,
        "text": sample.text,
        "cached_tokens": sample.cached_tokens,
        "experts": None if experts is None else [str(experts.dtype), *experts.shape],
    }


def _sample(
    index: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], experts: bytes | None, rest: Mapping[str, Any]
) -> Sample:
    assert len(tokens) == len(logprobs), f"{rest['prompt_id']}: {len(logprobs)} log-probs of {len(tokens)} tokens"
    return Sample(
        prompt_id=rest["prompt_id"],
        index=index,
        tokens=tokens,
        logprobs=logprobs,
        versions=_versions(rest["versions"]),
        finish=FinishReason(rest["finish"]),
        stop=rest["stop"],
        text=rest["text"],
        cached_tokens=rest["cached_tokens"],
        experts=_experts(experts, rest["experts"]),
    )


def _spans(versions: Sequence[VersionSpan]) -> list[list[int]]:
    return [[each.version, each.start, each.end] for each in versions]


def _placed(fields: Mapping[str, Any]) -> Placed:
    return Placed(ImageRef(**fields["image"]), fields["first"], Grid(**fields["grid"]))


def _versions(spans: Sequence[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans)


def _bytes(experts: NDArray[Any] | None) -> bytes | None:
    return None if experts is None else np.ascontiguousarray(experts).tobytes()


def _experts(written: bytes | None, shape: Sequence[Any] | None) -> NDArray[Any] | None:
    if written is None or shape is None:
        assert written is shape, "experts without their shape"
        return None
    return np.frombuffer(written, np.dtype(shape[0])).reshape(shape[1:]).copy()


def _joined(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _lists(arrays: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> pa.LargeListArray:
    """A column of lists, made without an object for each number.  None is null."""
    assert all(each is None or each.dtype == dtype for each in arrays), "an array of another dtype would lose bits"
    lengths = [0 if each is None else len(each) for each in arrays]
    known = [each for each in arrays if each is not None and len(each)]
    values = np.concatenate(known).astype(dtype, copy=False) if known else np.zeros(0, dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    nulls = np.array([each is None for each in arrays], dtype=bool)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(values), mask=pa.array(nulls) if nulls.any() else None
    )


def _arrays(column: pa.ChunkedArray) -> Iterator[NDArray[Any] | None]:
    """The lists of ``column`` as arrays that may be written to."""
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False)
        for at, known in enumerate(chunk.is_valid().to_pylist()):
            yield values[offsets[at] : offsets[at + 1]].copy() if known else None


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
