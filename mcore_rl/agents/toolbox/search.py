"""Search in a corpus of texts of the user's own, by BM25 (Robertson and Zaragoza 2009; the package ``bm25s``).

The index is made when the run starts, and is in memory; nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.agents.tools import TOOLS_KEY, EpisodeTool, ToolResult, ToolSchema, schema_of_texts
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError, Violation, pip_line

SCHEMA = schema_of_texts(
    "search", "Searches the documents for words, and returns those that fit best.", query="Words to search for"
)
KEY = "rollout.agent.search_corpus"
TEXTS = ("text", "contents", "content")  # fields that hold a document, the first that is there
TITLES = ("title", "id")
FORM = "Name a jsonl or parquet file with a field text or contents, or a folder of these, of txt and of md files"
NOTHING = "No document has any of these words."
READ = (".jsonl", ".parquet", ".txt", ".md")


class CorpusSearch(EpisodeTool):
    """The tool ``search``.  corpus: a file or a folder.  count: of the documents that a call returns.

    ConfigError: the package is not installed, or the corpus cannot be read or holds nothing.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema, corpus: str, count: int) -> None:
        super().__init__(config, tool_schema)
        if importlib.util.find_spec("bm25s") is None:
            remedy = pip_line("search")
            raise ConfigError([Violation(TOOLS_KEY, "search", "the package bm25s is not installed", remedy)])
        import bm25s  # type: ignore[import-untyped]

        self._titles, self._texts = read_corpus(Path(corpus).expanduser())
        self._count = min(count, len(self._texts))
        self._index = bm25s.BM25()
        shown = [f"{title}\n{text}" for title, text in zip(self._titles, self._texts, strict=True)]
        self._index.index(bm25s.tokenize(shown, stopwords="en", show_progress=False), show_progress=False)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        return ToolResult(text=await asyncio.to_thread(self.found, str(parameters["query"])))

    def found(self, query: str) -> str:
        """The documents that fit ``query`` best, the best first, as the model reads them."""
        import bm25s

        words = bm25s.tokenize([query], stopwords="en", show_progress=False)
        places, scores = self._index.retrieve(words, k=self._count, show_progress=False)
        hits = [int(place) for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        shown = [f"[{rank}] {self._titles[place]}\n{self._texts[place]}" for rank, place in enumerate(hits, 1)]
        return "\n\n".join(shown) or NOTHING


def read_corpus(path: Path) -> tuple[list[str], list[str]]:
    """(title, text) of every document, as two lists.  ConfigError: with the first file that is wrong."""
    files = sorted(each for each in path.rglob("*") if each.suffix in READ) if path.is_dir() else [path]
    titles = list[str]()
    texts = list[str]()
    for file in files:
        try:
            for title, text in _documents(file):
                titles.append(title)
                texts.append(text)
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            problem = f"{file.name}: {type(error).__name__}: {error}"
            raise ConfigError([Violation(KEY, str(path), problem, FORM)]) from error
    if not any(text.strip() for text in texts):
        raise ConfigError([Violation(KEY, str(path), "holds no document with text", FORM)])
    return titles, texts


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    if file.suffix == ".parquet":
        for number, record in enumerate(pq.read_table(file).to_pylist()):
            yield _document(record, f"row {number}")
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _document(json.loads(line), f"line {number}")
    else:
        yield file.name, file.read_text(encoding="utf-8")


def _document(record: Any, place: str) -> tuple[str, str]:
    """(title, text).  ValueError: the record has none."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{place} is no object")
    text = next((record[key] for key in TEXTS if record.get(key) is not None), None)
    if not isinstance(text, str):
        raise ValueError(f"{place} has no {', '.join(TEXTS)} that is a text; it has {', '.join(map(str, record))}")
    return str(next((record[key] for key in TITLES if record.get(key) is not None), place)), text


def make(config: AgentConfig, code: CodeConfig) -> CorpusSearch:
    """Make the tool of a run, with its index.  Raises ConfigError if no corpus is named, or none can be read."""
    if config.search_corpus is None:
        remedy = f"Write {KEY}=FILE_OR_FOLDER"
        raise ConfigError([Violation(TOOLS_KEY, "search", "has no documents to search in", remedy)])
    return CorpusSearch({}, SCHEMA, config.search_corpus, config.search_results)
