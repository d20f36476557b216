"""Parquet files of prompts as users write them, right and broken, and tiny tokenizers with the field's templates."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.tiny_tokenizer import build_tokenizer

CHATML = (  # Qwen's form: a newline follows the end of a turn
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TAGGED = (  # the same, with the assistant's part marked
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
FORGETFUL = (  # only the last turn keeps what it thought, as Qwen3 and DeepSeek-R1 do
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BARE = (  # no token ends a turn
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = (
    "{{ raise_exception('roles must alternate') if messages[0]['role'] != 'user' }}<|user|>{{ messages[0]['content'] }}"
)


@cache
def _directory() -> str:
    directory = mkdtemp()
    problems = generate(1, 400, 0, Split.train)
    build_tokenizer([text for each in problems for text in (each.question, each.solution)], directory, 400)
    return directory


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A tiny one, of its own, read from its files; chat_template: in place of its own."""
    made = PreTrainedTokenizerFast.from_pretrained(_directory())
    if chat_template is not None:
        made.chat_template = chat_template
    return made


def beginning_tokenizer() -> PreTrainedTokenizerBase:
    """One that puts its own beginning before any text, as Llama's does; the chat template has one already."""
    made = tokenizer()
    begin = (str(made.bos_token), made.bos_token_id)
    single = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    made.backend_tokenizer.post_processor = single  # type: ignore[attr-defined]
    assert made.encode("2") == [begin[1], *made.encode("2", add_special_tokens=False)]
    return made


def user(content: str | None) -> list[dict[str, str | None]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": content}]


def row(question: str = "2 + 3?", answer: object = "5", **columns: Any) -> dict[str, Any]:
    """A row in the field's schema."""
    return {
        "data_source": "sums",
        "prompt": user(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
    } | columns


def write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None, **options: Any) -> Path:
    """A parquet file of ``rows``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def write_as(path: Path, rows: list[dict[str, Any]]) -> Path:
    """``rows`` in a file of the kind that its name says: parquet, jsonl, jsonl.gz, arrow."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
        return path
    if path.suffix == ".jsonl":
        path.write_bytes(lines)
        return path
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".arrow":  # a stream, as the ArrowWriter of ``datasets`` writes
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        pq.write_table(table, path)
    return path


def save_to_disk(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """``rows`` as ``Dataset.save_to_disk`` of ``datasets`` lays them out, in two files."""
    files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for number, name in enumerate(files):
        write_as(folder / name, rows[number::2])
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def not_utf8(texts: list[bytes]) -> pa.Array:
    """A column that says it is text, and holds ``texts``."""
    return pa.array(texts, type=pa.binary()).view(pa.string())
