"""What the Hub's real client brings from a server that speaks its API: which files, once, resumed, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from mcore_rl.hub.download import NotFetchedError, data_files, model_folder
from mcore_rl.hub.names import DATASET, MODEL, HubName, named
from mcore_rl.hub.selection import ModelPart
from tests.support.hub_client import ask
from tests.support.hub_server import TOKEN, HubServer, Repo, sha256

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
NEEDED = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: b"first" * 1000,
    SHARDS[1]: b"second" * 1000,
}
UNNEEDED = {
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same once more",
    "original/consolidated.00.pth": b"and again",
    "onnx/config.json": b"{}",
    "README.md": b"# A model",
}
NAME = HubName(MODEL, "owner/tiny")


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    made = Repo(NEEDED | UNNEEDED)
    hub.repos["models/owner/tiny"] = made
    return made


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_run_needs_comes_and_nothing_else(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    folder = model_folder(NAME, ModelPart.weights)
    assert files_in(folder) == NEEDED
    assert folder == tmp_path / "hub" / "models--owner--tiny" / "snapshots" / repo.head
    assert named(str(folder)) == f"owner/tiny@{repo.head}"
    read = {path.rpartition("/resolve/")[2].partition("/")[2] for path in hub.paths("GET") if "/resolve/" in path}
    assert read == set(NEEDED), "of the others not a byte was asked for"


@pytest.mark.parametrize(
    ("part", "files"),
    [
        (ModelPart.config, {"config.json"}),
        (ModelPart.tokenizer, {name for name in NEEDED if not name.endswith(".safetensors")}),
    ],
)
def test_a_part_of_a_model(repo: Repo, part: ModelPart, files: set[str]) -> None:
    assert set(files_in(model_folder(NAME, part))) == files


def test_the_second_time_only_the_commit_is_asked_for(hub: HubServer, repo: Repo) -> None:
    folder = model_folder(NAME, ModelPart.weights)
    hub.requests.clear()
    assert model_folder(NAME, ModelPart.weights) == folder
    assert [(method, path) for method, path, _ in hub.requests] == [("GET", "/api/models/owner/tiny")]
    hub.requests.clear()
    assert model_folder(HubName(MODEL, "owner/tiny", repo.head), ModelPart.weights) == folder
    assert hub.requests == [], "a commit is a commit"


def test_what_did_not_change_is_not_read_again(hub: HubServer, repo: Repo) -> None:
    before = model_folder(NAME, ModelPart.weights)
    repo.files["config.json"] = b'{"model_type": "qwen3"}'
    repo.commit()
    hub.requests.clear()
    after = model_folder(NAME, ModelPart.weights)
    assert after != before and files_in(before) == NEEDED
    assert files_in(after) == {**NEEDED, "config.json": b'{"model_type": "qwen3"}'}
    assert [path for path in hub.paths("GET") if "/resolve/" in path] == [
        f"/owner/tiny/resolve/{repo.head}/config.json"
    ]
    assert model_folder(HubName(MODEL, "owner/tiny", before.name), ModelPart.weights) == before


def test_a_download_that_breaks_off_goes_on_where_it_was(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut[SHARDS[1]] = 1234
    folder = model_folder(NAME, ModelPart.weights)
    assert (folder / SHARDS[1]).read_bytes() == NEEDED[SHARDS[1]]
    ranges = [headers.get("Range") for _, path, headers in hub.requests if path.endswith(SHARDS[1])]
    assert "bytes=1000-" in ranges, "in whole chunks"


def test_without_a_network_the_cache_answers(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(NAME, ModelPart.weights)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert model_folder(NAME, ModelPart.weights) == folder and hub.requests == []
    (folder / SHARDS[0]).unlink()
    with pytest.raises(NotFetchedError, match=r"or not whole, where HF_HUB_OFFLINE"):
        model_folder(NAME, ModelPart.weights)


def test_a_hub_that_does_not_answer(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(NAME, ModelPart.weights)
    ask("http://127.0.0.1:9", monkeypatch)  # the port of discard, where nobody listens
    assert model_folder(NAME, ModelPart.weights) == folder
    with pytest.raises(NotFetchedError, match="cannot be reached") as caught:
        model_folder(HubName(MODEL, "owner/other"), ModelPart.weights)
    assert "hf download owner/other" in caught.value.remedy


def test_what_is_not_there(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFetchedError, match="no such model, or hides it") as caught:
        model_folder(HubName(MODEL, "owner/none"), ModelPart.weights)
    assert "HF_TOKEN" in caught.value.remedy
    with pytest.raises(NotFetchedError, match="has no revision v9"):
        model_folder(HubName(MODEL, "owner/tiny", "v9"), ModelPart.weights)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFetchedError, match="HF_HUB_OFFLINE says to look") as caught:
        model_folder(HubName(MODEL, "owner/none"), ModelPart.weights)
    assert "hf download owner/none" in caught.value.remedy


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_who_may_not_read_is_told_how_to(hub: HubServer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["models/meta/llama"] = Repo(dict(NEEDED), **{kind: True})
    name = HubName(MODEL, "meta/llama")
    said = {"gated": "is gated", "private": "hides it from you"}[kind]
    with pytest.raises(NotFetchedError, match=said) as caught:
        model_folder(name, ModelPart.weights)
    assert "HF_TOKEN" in caught.value.remedy and "hf auth login" in caught.value.remedy
    assert kind == "private" or f"{hub.url}/meta/llama" in caught.value.remedy
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_in(model_folder(name, ModelPart.weights)) == NEEDED


def test_weights_that_cannot_be_taken(hub: HubServer) -> None:
    hub.repos["models/owner/old"] = Repo({"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(NotFetchedError, match=r"only pytorch_model.bin, and neither model.safetensors"):
        model_folder(HubName(MODEL, "owner/old"), ModelPart.weights)
    for bad in ("../../../../escaped.safetensors", "/tmp/escaped.safetensors", "absent.safetensors", 7):
        index = json.dumps({"weight_map": {"a": bad}}).encode()
        hub.repos["models/owner/evil"] = Repo({"config.json": b"{}", "model.safetensors.index.json": index})
        with pytest.raises(NotFetchedError, match=r"no file beside it|cannot be read"):
            model_folder(HubName(MODEL, "owner/evil"), ModelPart.weights)


def test_a_listing_with_names_that_leave_the_cache(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["models/owner/evil"] = Repo({"config.json": b"{}"})
    hub.lists = ["additional_chat_templates/../../../../../escaped.jinja"]
    with pytest.raises(NotFetchedError, match="would leave the cache"):
        model_folder(HubName(MODEL, "owner/evil"), ModelPart.tokenizer)
    assert not list(tmp_path.rglob("escaped*"))
    assert not any("escaped" in path for path in hub.paths("GET"))


def test_a_commit_that_is_no_hash(hub: HubServer, tmp_path: Path) -> None:
    evil = Repo({"config.json": b"{}"})
    evil.commits = {"../../../escaped": evil.files}
    evil.heads["main"] = "../../../escaped"
    hub.repos["models/owner/evil"] = evil
    with pytest.raises(NotFetchedError, match="no hash"):
        model_folder(HubName(MODEL, "owner/evil"), ModelPart.config)


def test_the_files_of_a_split(hub: HubServer) -> None:
    rows = {f"main/{split}-00000-of-00001.parquet": split.encode() for split in ("train", "test")}
    hub.repos["datasets/openai/gsm8k"] = Repo({**rows, "README.md": b"", "main/gsm8k.py": b"import os"})
    (train,) = data_files(HubName(DATASET, "openai/gsm8k"), "train")
    (test,) = data_files(HubName(DATASET, "openai/gsm8k"), "val")
    assert (train.read_bytes(), test.read_bytes()) == (b"train", b"test")
    commit = hub.repos["datasets/openai/gsm8k"].head
    assert named(str(test)) == f"openai/gsm8k@{commit}:main/test-00000-of-00001.parquet"
    (again,) = data_files(HubName(DATASET, "openai/gsm8k", commit, "main/test-00000-of-00001.parquet"), "train")
    assert again == test, "a file that is named is meant"
    with pytest.raises(NotFetchedError, match="splits test, train") as caught:
        data_files(HubName(DATASET, "openai/gsm8k"), "")
    assert "openai/gsm8k:main/test-00000-of-00001.parquet" in caught.value.remedy
    hub.repos["datasets/openai/gsm8k"].files["socratic/train-00000-of-00001.parquet"] = b""
    hub.repos["datasets/openai/gsm8k"].commit()
    with pytest.raises(NotFetchedError, match="folders main, socratic"):
        data_files(HubName(DATASET, "openai/gsm8k"), "train")
    (chosen,) = data_files(HubName(DATASET, "openai/gsm8k", path="main"), "train")
    assert chosen.read_bytes() == b"train"


def test_checksums_of_the_tests_are_what_the_client_names_files_by(hub: HubServer, repo: Repo) -> None:
    folder = model_folder(NAME, ModelPart.weights)
    assert (folder / SHARDS[0]).resolve().name == sha256(NEEDED[SHARDS[0]])
