"""An export becomes a repository of a Hub, by the real client; who may not write is told before hours of work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, constants

from mcore_rl.cli import main
from mcore_rl.ground.errors import ConfigError
from mcore_rl.hub.push import target
from tests.support import checkpoints, rank_files
from tests.support.engines import same_bits
from tests.support.hub_server import TOKEN, HubServer, Repo
from tests.tracking.recorded_run import record


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "hf"
    checkpoints.write("mixtral", directory)
    return directory


@pytest.fixture
def words(hf: Path, tmp_path: Path) -> list[str]:
    """Of an export of a recorded run."""
    record(tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step_3"
    step.parent.mkdir()
    rank_files.write_run(step, "mixtral", hf, "tp=2,ep=2", 4)
    return ["convert", "to-hf", "--run", str(step), "--out", str(tmp_path / "out"), "--push-to-hub"]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_an_export_is_uploaded_with_its_card(
    hub: HubServer, words: list[str], hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([*words, "team/tuned", "--private"]) == 0
    repo = hub.repos["models/team/tuned"]
    assert repo.private and f"{hub.url}/team/tuned/commit/{repo.head}" in said(capsys)
    assert repo.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "read").mkdir()
    for name, data in repo.files.items():
        (tmp_path / "read" / name).write_bytes(data)
    assert same_bits(checkpoints.tensors(tmp_path / "read"), checkpoints.tensors(hf))
    _, front, card = repo.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert card.startswith("\n# tuned\n") and str(tmp_path) not in card
    assert not any(TOKEN in path for _, path, _ in hub.requests)


def test_the_login_of_the_client_is_enough_and_old_shards_go(
    hub: HubServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)  # where `hf auth login` keeps it, for this test
    hub.repos["models/team/tuned"] = Repo({"model-00009-of-00009.safetensors": b"old", "LICENSE": b"kept"})
    assert main([*words, "team/tuned"]) == 0
    files = hub.repos["models/team/tuned"].files
    assert "model-00009-of-00009.safetensors" not in files and files["LICENSE"] == b"kept"


def test_who_may_not_write_is_told_before_anything_is_converted(
    hub: HubServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert main([*words, "team/tuned"]) == 2
    assert "--push-to-hub=team/tuned: nobody is logged in" in (told := said(capsys)) and "hf auth login" in told
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert main([*words, "team/tuned"]) == 2
    assert "does not let you write there (401); nothing was done yet" in said(capsys)
    for name in ("tuned", "a/b/c", "../x", "a/b@main", "", "a/b:c"):
        assert main([*words, name]) == 2
        assert "is no name of a repository" in said(capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*words, "team/tuned"]) == 2
    assert "HF_HUB_OFFLINE" in said(capsys)
    assert main([*words[:-1], "--private"]) == 2
    assert "--private=: says nothing without --push-to-hub" in said(capsys)
    assert not (tmp_path / "out").exists() and hub.paths("POST") == []


def test_what_was_converted_is_kept_where_the_hub_refuses(
    hub: HubServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    by_hand = f"{tmp_path / 'out'} is complete; upload it with: hf upload closed/tuned {tmp_path / 'out'}"
    assert main([*words, "closed/tuned"]) == 2
    told = said(capsys)
    assert "does not let you write there (403)" in told and f"{by_hand}." in told
    shutil.rmtree(tmp_path / "out")
    assert main([*words, "closed/tuned", "--private"]) == 2
    assert f"{by_hand} --private." in said(capsys), "else it would be made for all to see"
    assert (tmp_path / "out" / "README.md").is_file()


def test_a_run_that_could_not_push_is_refused_before_it_starts(
    hub: HubServer, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [f"model.path={hf}", f"data.train_files=[{__file__}]", f"trainer.default_local_dir={tmp_path / 'run'}"]
    for program in ("train", "sft"):
        asked = [program, *given, "trainer.push_to_hub=team/tuned"]
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert main(asked) == 2
        assert "trainer.push_to_hub=team/tuned: nobody is logged in" in (told := said(capsys)) and "HF_TOKEN" in told
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert main([*asked, "--check"]) == 2
        assert "does not let you write there (401)" in (told := said(capsys)) and "hf_wrong" not in told
        assert main([program, *given, "trainer.push_to_hub=tuned"]) == 2
        assert "trainer.push_to_hub=tuned: is no name of a repository. Write OWNER/NAME" in said(capsys)
        assert main([*asked, "trainer.val_only=true"]) == 2
        assert "trainer.val_only=true trains nothing" in said(capsys)
    assert not (tmp_path / "run").exists() and hub.paths("POST") == []


def test_what_the_hub_says_is_told_without_token_and_signature(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)  # in no variable, which would be masked elsewhere
    repository = target("team/tuned", private=True, key="trainer.push_to_hub")
    words = f"Bearer {TOKEN} at https://store/x?X-Amz-Signature=abc&y=1 broke"

    def broken(*_: object, **__: object) -> None:
        raise OSError(words)

    monkeypatch.setattr(HfApi, "create_repo", broken)
    with pytest.raises(ConfigError, match=r"Bearer \*\*\* at https://store/x\?\*\*\* broke"):
        repository.push(tmp_path, "nothing is lost")
