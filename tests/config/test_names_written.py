"""Which keys the user wrote: of the command line and of the user's own files, and of no others."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.compose import as_yaml, compose
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig


def written(*overrides: str, directory: Path | None = None, name: str | None = None) -> set[str]:
    return set(compose(RunConfig, "train", overrides, directory, name).written)


def test_of_the_command_line() -> None:
    written_by_user = written(
        "algorithm=rloo", "rollout.n=3", "actor.optim={lr: 1, eps: 2}", "+data.chat_template_kwargs.x=1",
        "data.train_files=[a]",
    )  # fmt: skip
    keys = {"rollout.n", "actor.optim.lr", "actor.optim.eps", "data.chat_template_kwargs.x", "data.train_files"}
    assert written_by_user == {*keys, "algorithm"}
    assert written() == set(), "our own files are nobody's words"


def test_of_files_and_of_those_they_stand_on(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("defaults: [train, _self_]\nactor: {optim: {lr: 1.0}}\n")
    (tmp_path / "second.yaml").write_text("defaults: [first, _self_]\nrollout: {n: 4}\ndata: {train_files: [a]}\n")
    keys = {"actor.optim.lr", "rollout.n", "data.train_files"}
    assert written(directory=tmp_path, name="second") == keys
    assert written("data.seed=3", directory=tmp_path, name="second") == {*keys, "data.seed"}
    (tmp_path / "train.yaml").write_text("defaults: [train_schema, algorithm: rloo, _self_]\nrollout: {n: 7}\n")
    assert written(directory=tmp_path) == {"rollout.n"}


def test_a_whole_configuration_says_every_key_and_means_nothing_by_it(tmp_path: Path) -> None:
    given = ["model.path=m", "data.train_files=[a]", "data.val_files=[b]"]
    run = compose(RunConfig, "train", ["algorithm=dapo", "actor.precision=float32", *given])
    for head in ("defaults: [train_schema, _self_]\n", ""):
        (tmp_path / "again.yaml").write_text(head + as_yaml(run))
        again = compose(RunConfig, "train", ["algorithm.lam=0.5"], tmp_path, "again")
        assert again.written == {"algorithm.lam"}
        assert [each.key for each in run_violations(again)] == ["algorithm.lam"]


def test_what_was_written_is_no_key_and_no_difference() -> None:
    one, other = compose(RunConfig, "train", ["rollout.n=5"]), compose(RunConfig, "train", [])
    assert one == other and one.written != other.written
    assert "written" not in as_yaml(one) and "written" not in repr(one)
    assert not hasattr(compose(SftConfig, "sft", []), "written")
