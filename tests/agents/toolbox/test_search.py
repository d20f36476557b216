"""Search over a user's documents; the oracle is BM25's formula, written out here."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.agents.toolbox.search import NOTHING, SCHEMA, CorpusSearch, read_corpus
from mcore_rl.ground.errors import ConfigError
from tests.support.awaited import awaited

TEXTS = [
    "apples grow trees", "trees trees forest night", "rivers flow sea", "apples apples pears plums trees rivers",
    "night sea ships", "quiet library",
]  # fmt: skip


def bm25(query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Scores of ``TEXTS`` by Lucene's variant, bm25s's default: idf is log(1 + (N - n + 0.5) / (n + 0.5))."""
    documents = [text.split() for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        total = 0.0
        for term in query.split():
            holds = sum(term in each for each in documents)
            idf = math.log(1 + (len(documents) - holds + 0.5) / (holds + 0.5))
            frequency = words.count(term)
            total += idf * frequency / (frequency + k1 * (1 - b + b * len(words) / mean))
        scores.append(total)
    return scores


def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    # Titles count as text: all have one of the same kind, so that the order is that of the texts.
    path.write_text("\n".join(json.dumps({"id": str(n), "contents": text}) for n, text in enumerate(TEXTS)))
    return path


@pytest.mark.parametrize("query", ["apples", "trees night", "rivers sea ships", "apples trees rivers"])
@awaited
async def test_the_order_is_that_of_the_formula(tmp_path: Path, query: str) -> None:
    made = CorpusSearch({}, SCHEMA, str(corpus(tmp_path)), 6)
    answer = await made.execute("e", {"query": query})
    shown = [part.partition("\n")[0] for part in answer.text.split("\n\n")]
    scores = bm25(query)
    best = sorted((n for n in range(len(TEXTS)) if scores[n] > 0), key=lambda n: -scores[n])
    assert len({round(scores[n], 9) for n in best}) == len(best), "no ties, or the order would be chance"
    assert shown == [f"[{rank}] {n}" for rank, n in enumerate(best, 1)]


@awaited
async def test_few_results_and_none(tmp_path: Path) -> None:
    made = CorpusSearch({}, SCHEMA, str(corpus(tmp_path)), 1)
    assert (await made.execute("e", {"query": "library"})).text == "[1] 5\nquiet library"
    for query in ("zebra", "", "the", "\ud800"):
        assert (await made.execute("e", {"query": query})).text == NOTHING


def test_files_and_folders_of_every_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["T"], "text": ["of parquet"]}), tmp_path / "a.parquet")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.md").write_text("of markdown")
    (tmp_path / "c.jsonl").write_text('{"content": "of lines"}\n\n')
    (tmp_path / "d.png").write_bytes(b"\x89")
    assert read_corpus(tmp_path) == (["T", "b.md", "line 1"], ["of parquet", "of markdown", "of lines"])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"body": "x"}', "line 1 has no text, contents, content that is a text; it has body"),
        ("a.jsonl", '{"text": 3}', "line 1 has no text"),
        ("a.jsonl", "[]", "line 1 is no object"),
        ("a.jsonl", "{", "JSONDecodeError"),
        ("a.parquet", "no", "ArrowInvalid"),
        ("a.txt", " \n", "holds no document with text"),
        ("a.png", "x", "holds no document with text"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_corpus(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        read_corpus(tmp_path / "none.jsonl")


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bm25s is not installed. pip install 'bm25s<"):
        CorpusSearch({}, SCHEMA, str(corpus(tmp_path)), 1)
