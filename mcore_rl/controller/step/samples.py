"""Shows people a step's episodes: the rows of ``rollouts/`` and ``validation/``, and thumbnails of their pictures.

Each thumbnail is a file of the run directory, named by the picture's sha256.  A run may see more pictures than anybody
looks at: of each step a few are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mcore_rl.data.media.images import decoded
from mcore_rl.data.prompts import PromptSet
from mcore_rl.ground.errors import DataError
from mcore_rl.rollout.episodes import Episode, Segment
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.samples import SIDE, thumbnail_file

OF_A_STEP = 16  # pictures: a quarter of what a report shows
OF_A_VALIDATION = 64  # as many as a report shows; its prompts are the same at every step


def sample_rows(step: int, episodes: Sequence[Episode], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """One row per episode; an episode of several turns, or with turn rewards, also has a column ``segments``.

    ``versions`` has the weights that drew it: consecutive tokens of the model's, of all turns, that one version drew.
    An agent's also has ``reason`` (why it ended), ``turns`` and ``calls``; one of a user's program ``conversation``,
    its number within the run of the program, and ``begins`` (``AgentCounts.begins``).  A row with pictures has them
    as ``images``: the sha256 and the source of each, in the order of their places.
    """
    prompts = {
        tokens: str(tokenizer.decode(np.asarray(tokens), skip_special_tokens=True))
        for tokens in dict.fromkeys(episode.row.tokens for episode in episodes)
    }
    return [_row(step, episode, prompts[episode.row.tokens]) for episode in episodes]


def _row(step: int, episode: Episode, prompt: str) -> dict[str, Any]:
    score = episode.graded
    versions = _spans(episode)
    row = {
        "step": step,
        "data_source": episode.row.data_source,
        "prompt_id": episode.row.id,
        "sample": episode.index,
        "prompt": prompt,
        "response": episode.transcript,
        "score": score.value,
        "correct": score.correct,
        "ground_truth": episode.row.ground_truth,
        "num_tokens": episode.num_response_tokens,
        "finish": episode.end.value,
        "version": versions[-1]["version"] if versions else step,
        "versions": versions,
        "error": score.error,
    }
    if episode.row.media:
        row["images"] = [asdict(each.image) for each in episode.row.media]
    if episode.agent is not None:
        row |= {"reason": episode.agent.reason, "turns": episode.agent.turns, "calls": episode.agent.calls}
        if episode.agent.begins:
            row |= {"conversation": episode.part, "begins": episode.agent.begins}
    if episode.is_single_turn and not episode.turn_rewards:
        return row
    return row | {"segments": [_segment(segment) for segment in episode.segments]}


def _spans(episode: Episode) -> list[dict[str, int]]:
    spans = list[dict[str, int]]()
    for span in (span for segment in episode.segments for span in segment.versions):
        if span.start == span.end:
            continue  # it was taken from an engine before it got a token
        if spans and spans[-1]["version"] == span.version:
            spans[-1]["num_tokens"] += span.end - span.start
        else:
            spans.append({"version": span.version, "num_tokens": span.end - span.start})
    return spans


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "author": segment.author.value,
        "num_tokens": len(segment.tokens),
        "trained": segment.trained,
        "reward": segment.reward,
        "versions": sorted({span.version for span in segment.versions if span.end > span.start}),
        "tool_s": segment.tool_s,
        "text": segment.text,
    }


class Thumbnails:
    """Writes thumbnails in a thread of its own.  warn: is told of a disk that is full, or fails."""

    def __init__(self, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")

    def begin(self, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
        """Begins to write those of ``write_thumbnails``."""
        self._thread.submit(self._write, prompts, episodes, most)

    def close(self) -> None:
        """Waits until all that was begun is written."""
        self._thread.shutdown()

    def _write(self, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
        try:
            write_thumbnails(self._run_dir, prompts, episodes, most)
        except OSError as error:
            self._warn(f"thumbnails of pictures: {error}. The report names them in their place")


def write_thumbnails(run_dir: Path, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
    """Writes those of up to ``most`` pictures of the episodes' rows, which are rows of ``prompts``.

    First come the rows with the highest and the lowest scores.  A picture that can no longer be read has none.
    OSError: the disk is full, or fails.
    """
    ordered = sorted(episodes, key=lambda each: -each.graded.value)
    wanted = dict[str, tuple[int, int]]()
    for each in chain.from_iterable(zip(ordered, reversed(ordered), strict=True)):
        for place, placed in enumerate(each.row.media):
            wanted.setdefault(placed.image.sha256, (each.row.number, place))
    for sha256, (number, place) in list(wanted.items())[:most]:
        path = thumbnail_file(run_dir, sha256)
        if path.exists():
            continue
        try:
            content = prompts.image_files(number)[place]
        except DataError:
            continue
        _write(content, path)


def _write(content: bytes, path: Path) -> None:
    try:
        picture = decoded(content)
    except ValueError:
        return
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as new:
        picture.save(new, format="WEBP", quality=80)
