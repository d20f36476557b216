"""Makes the rows of ``rollouts/`` and ``validation/``, which record each episode for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mcore_rl.episodes import Episode, Segment


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
