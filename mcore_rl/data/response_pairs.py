"""Pairs of a better and a worse response to one prompt, from responses with scores: what preferences are learnt from.

The best response of a prompt is paired with its worst, the second best with the second worst, and so on while the one
has the higher score.  A response is in one pair at most, and a pair of the same two texts is written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.responses import ResponseRow
from mcore_rl.errors import DataError
from mcore_rl.tracking.atomic import replaced

MESSAGE_LIST = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
COLUMNS = pa.schema(
    [
        ("prompt", MESSAGE_LIST),
        ("chosen", MESSAGE_LIST),
        ("rejected", MESSAGE_LIST),
        ("margin", pa.float64()),
        ("data_source", pa.string()),
    ]
)
BATCH = 1024  # pairs that are held before they are written


def best_with_worst(scores: Sequence[float | None]) -> list[tuple[int, int, float]]:
    """Of each pair the places, the better one first, and by how much its score is the higher; None: in no pair."""
    scored = {place: score for place, score in enumerate(scores) if score is not None}
    ranked = sorted(scored, key=lambda place: -scored[place])  # of equal ones the earlier first
    halves = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    pairs = ((better, worse, scored[better] - scored[worse]) for better, worse in halves)
    return [pair for pair in pairs if pair[2] > 0]


def write_pairs(path: Path, rows: Iterable[tuple[ResponseRow, Sequence[float | None]]]) -> str:
    """Writes the pairs of ``rows``, each with the scores of its responses, and says for people what it wrote.

    A row of the file has the prompt, ``chosen`` and ``rejected`` as messages, ``margin``, by how much the better one's
    score is the higher, and the row's ``data_source``.  The file appears when it is complete.  DataError: no prompt has
    two responses of different scores.
    """
    pairs, prompts, without = 0, 0, 0
    with replaced(path) as new:
        with pq.ParquetWriter(new, COLUMNS) as writer:
            held: list[dict[str, Any]] = []
            for row, scores in rows:
                made = [*_pairs_of(row, scores)]
                pairs, prompts, without = pairs + len(made), prompts + 1, without + (not made)
                held += made
                if len(held) >= BATCH:
                    writer.write_table(pa.Table.from_pylist(held, COLUMNS))
                    held = []
            writer.write_table(pa.Table.from_pylist(held, COLUMNS))
        if not pairs:
            problem = f"no prompt of {prompts:,} has two responses of different scores. Generate more (rollout.n)"
            raise DataError("pairs", [problem])
    return f"pairs: {pairs:,} in {path}; {without:,} of {prompts:,} prompts have none: no two responses differ in score"


def _pairs_of(row: ResponseRow, scores: Sequence[float | None]) -> Iterator[dict[str, Any]]:
    seen: set[tuple[str, str]] = set()
    for better, worse, margin in best_with_worst(scores):
        texts = str(row.turns[better]), str(row.turns[worse])
        if texts[0] == texts[1] or texts in seen:
            continue
        seen.add(texts)
        yield {
            "prompt": row.messages,
            "chosen": row.turns[better],
            "rejected": row.turns[worse],
            "margin": margin,
            "data_source": row.data_source,
        }
