"""What is a Hub id and what is a path, and the id of a file in the Hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.hub.names import DATASET, MODEL, HubName, hub_name, is_inside, named, with_names

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", MODEL, HubName(MODEL, "Qwen/Qwen2.5-0.5B-Instruct")),
        (f"a/b@{COMMIT}", MODEL, HubName(MODEL, "a/b", COMMIT)),
        ("a/b@refs/pr/4", MODEL, HubName(MODEL, "a/b", "refs/pr/4")),
        ("openai/gsm8k", DATASET, HubName(DATASET, "openai/gsm8k")),
        ("openai/gsm8k:main", DATASET, HubName(DATASET, "openai/gsm8k", None, "main")),
        ("a/b@v1:main/train.parquet", DATASET, HubName(DATASET, "a/b", "v1", "main/train.parquet")),
    ],
)
def test_ids(text: str, kind: str, expected: HubName) -> None:
    assert hub_name(text, kind) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "MODEL", "./a/b", "/a/b", "~/a/b", "a/b/c", "../b", "a/..", "a/b@", "a/b@../c", "a/b:../c",
        "a/b:/etc/passwd", "a/b:c//d",
        "a/b:c\\d", "a--b/c", "a/b--c", "a/-b", "a/b.", ".a/b", "a b/c", "ä/b", "a/b@v@w", "a/b:c:d", f"a/{'b' * 96}",
        "data/train.parquet", "data/train.jsonl", "data/train.jsonl.gz", "data/x.arrow", "data/x.json",
        "models/Qwen2.5-7B", "own/x.parquet", "own/x.json", "data/gsm8k", "runs/first", "Models/Qwen2@main", "a/b\n",
    ],
)  # fmt: skip
def test_paths_and_names_that_leave_the_cache_are_no_ids(text: str) -> None:
    assert hub_name(text, DATASET) is None


def test_a_model_has_no_path_inside() -> None:
    assert hub_name("a/b:c", MODEL) is None


def test_what_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/tiny", MODEL) is not None
    (tmp_path / "Qwen" / "tiny").mkdir(parents=True)
    assert hub_name("Qwen/tiny", MODEL) is None
    (tmp_path / "Qwen" / "link").symlink_to("nowhere")
    assert hub_name("Qwen/link", MODEL) is None, "a broken link is a mistake to be told of"


def test_names_of_the_cache() -> None:
    model = f"/cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{COMMIT}"
    data = f"/x/datasets--openai--gsm8k/snapshots/{COMMIT}/main/train-00000-of-00001.parquet"
    assert named(model) == f"Qwen/Qwen2.5-0.5B@{COMMIT}"
    assert named(data) == f"openai/gsm8k@{COMMIT}:main/train-00000-of-00001.parquet"
    for name, kind in ((named(model), MODEL), (named(data), DATASET)):
        read = hub_name(name, kind)
        assert read is not None and read.revision == COMMIT
    assert named("/data/train.parquet") == "/data/train.parquet"
    values = {"model": {"path": model, "n": 3}, "data": {"files": [data, None, True]}}
    assert with_names(values) == {"model": {"path": named(model), "n": 3}, "data": {"files": [named(data), None, True]}}


@pytest.mark.parametrize("path", ["a/../b", "..", "/a", "a\\b", "a//b", "./a", "a\0b", "a\nb"])
def test_paths_that_leave(path: str) -> None:
    assert not is_inside(path)
    assert is_inside("main/train-00000-of-00001.parquet")
