"""The command line: exit codes, one message without a traceback, and Ctrl-C in the middle of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from mcore_rl.cli import COMMANDS, main
from mcore_rl.commands.programs import PROGRAMS
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.bounds import bound_violations
from mcore_rl.config.compose import changes_as_yaml, compose
from mcore_rl.config.names import leaf_values
from mcore_rl.config.resources import PAGES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.typed import put
from mcore_rl.controller.lifecycle.run_checkpoints import complete_checkpoints
from mcore_rl.ground.errors import ConfigError, Violation
from tests.house.source import ROOT
from tests.support.run_task import GONE_S, overrides, still_alive, write_task

LIMIT_S = 240.0  # for the first step of a run, on a busy machine


def test_a_mistake_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rollout.nn=3", "actor.speed=[1]"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: 2 problems in the configuration:\n  - rollout.nn=3: there is no such key.")
    assert "actor.speed=[1]: " in err, "brackets are no markup"
    assert "Traceback" not in err


@pytest.mark.parametrize("program", ["train", "sft"])
def test_all_that_is_missing_is_said_before_anything_starts(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([program, "trainer.device=cpu"]) == 2
    err = capsys.readouterr().err
    assert "model.path=: is not set" in err and "data.train_files=[]: there is nothing to train on" in err


def test_debug_shows_where_an_error_was_raised() -> None:
    with pytest.raises(ConfigError):
        main(["train", "--debug", "rollout.nn=3"])


def test_where_an_error_was_raised_is_told_below_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stumble(config: object) -> int:
        error = ConfigError([Violation("a", 1, "is wrong", "Write 2")])
        error.add_note("Raised by actor rank 1 on here in build")
        raise error

    monkeypatch.setitem(
        PROGRAMS, "train", replace(PROGRAMS["train"], acts=lambda: (int, stumble), violations=bound_violations)
    )
    assert main(["train"]) == 2
    assert capsys.readouterr().err.endswith("a=1: is wrong. Write 2\nRaised by actor rank 1 on here in build\n")


def test_ctrl_c_is_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(config: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(
        PROGRAMS, "sft", replace(PROGRAMS["sft"], acts=lambda: (int, interrupted), violations=bound_violations)
    )
    assert main(["sft"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_cfg_prints_what_would_run_and_stops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = ["algorithm=dapo", "model.path=m", "rollout.stop=['[/x]']"]
    assert main(["train", "--cfg", "all", *chosen]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["rollout"]["n"] == 16
    (tmp_path / "again.yaml").write_text("defaults: [train_schema, _self_]\n" + printed)
    assert compose(RunConfig, "train", [], tmp_path, "again") == compose(RunConfig, "train", chosen)


CHANGED = {  # what is written for a program: of each kind of value, a key that others follow, one that follows
    "train": ["algorithm=dapo", "data.max_prompt_length=40", "rollout.max_response_length=512", "rollout.stop=[x]"],
    "sft": ["trainer.experiment_name=other", "data.chat_template_kwargs={a: 1}"],
    "prefer": ["actor.preference.loss=kto"],
    "reward": ["actor.optim.lr=1e-3"],
    "generate": ["data.max_prompt_length=40", "rollout.dtype=float32", "model.tokenizer_path=null"],
    "evaluate": ["k=[1,8]", "reward_model.enforce_eager=true"],
}
DIFFERENT = {
    "train": {"data.max_prompt_length": 40, "rollout.stop": ["x"], "algorithm.filter_groups.enable": True},
    "sft": {"trainer.experiment_name": "other", "data.chat_template_kwargs.a": 1},
    "prefer": {"actor.preference.loss": "kto"},
    "reward": {"actor.optim.lr": 1e-3},
    "generate": {"data.max_prompt_length": 40, "rollout.dtype": "float32"},
    "evaluate": {"k": [1, 8], "reward_model.enforce_eager": True},
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_cfg_prints_first_what_differs_from_the_defaults(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A yaml file that composes to the same, and says nothing that is so without it: defaults, and what follows."""
    assert main([program, "--cfg", *CHANGED[program]]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert values.pop("defaults") == [program, "_self_"]
    differing = dict(leaf_values(values))
    of_the_algorithm = program == "train"
    assert {key: differing[key] for key in DIFFERENT[program]} == DIFFERENT[program]
    assert of_the_algorithm or differing == DIFFERENT[program]
    assert "rollout.max_prompt_length" not in differing, "it follows data.max_prompt_length"
    (tmp_path / "again.yaml").write_text(printed)
    schema = PROGRAMS[program].schema
    assert compose(schema, program, [], tmp_path, "again") == compose(schema, program, CHANGED[program])
    for without in differing:  # each is needed
        fewer = {key: value for key, value in differing.items() if key != without}
        tree: dict[str, Any] = {"defaults": [program, "_self_"]}
        for key, value in fewer.items():
            put(tree, key, value)
        (tmp_path / "fewer.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        assert compose(schema, program, [], tmp_path, "fewer") != compose(schema, program, CHANGED[program]), without


def test_cfg_of_the_defaults_prints_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    for program in PROGRAMS:
        assert main([program, "--cfg"]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == {"defaults": [program, "_self_"]}


@pytest.mark.parametrize("algorithm", list(algorithms()))
def test_what_cfg_prints_is_refused_no_more_than_what_was_written(algorithm: str, tmp_path: Path) -> None:
    """A file's keys count as written, and a key that is not read is refused where it is written."""
    train = PROGRAMS["train"]
    words = [f"algorithm={algorithm}", "model.path=m", "data.train_files=[f]", "rollout.n=4"]
    written = train.composed(words)
    (tmp_path / "again.yaml").write_text(changes_as_yaml(written, "train"))
    again = train.composed([], tmp_path, "again")
    assert again == written and set(train.violations(again)) == set(train.violations(written))


def test_overrides_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "rollout.temperature=0.5", "--cfg", "data.seed=77", "all"]) == 0
    shown = capsys.readouterr().out
    assert "temperature: 0.5" in shown and "seed: 77" in shown


def test_a_recipe_is_named_as_plan_and_submit_take_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [train, _self_]\nrollout: {n: 7}\n")
    for name, expected in (("arithmetic_grpo", 4), (str(own), 4)):
        assert main(["train", f"recipe={name}", "--cfg", "rollout.n=4"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["rollout"]["n"] == expected
    assert main(["train", f"recipe={own}", "--cfg", "all"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["rollout"]["n"] == 7 and shown["trainer"]["nnodes"] == 1
    assert main(["sft", "recipe=arithmetic_sft", "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["train_files"] == ["runs/arithmetic/data/train.parquet"]
    for arguments, said in (
        (["train", "recipe=arithmetic_grp"], "Did you mean arithmetic_grpo"),
        (["train", "recipe=arithmetic_sft"], "recipe=arithmetic_sft: is a recipe of sft. Write mcore-rl sft instead"),
        (["train", "recipe=arithmetic_grpo", "recipe=qwen2_7b_grpo"], "is given more than once"),
        (["train", "recipe=arithmetic_grpo", "--config-name", "x"], "both name a file to begin with"),
        (["generate", "recipe=arithmetic_grpo"], "recipe=arithmetic_grpo: there is no such key"),
    ):
        assert main([*arguments, "--cfg"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train", "--speed"]])
def test_what_is_no_command_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    assert exit_code.value.code == 2
    assert "usage: mcore-rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian"], "there is no command trian. Did you mean train?"),
        (["from_verl"], "Did you mean from-verl?"),
        (["conjure"], "there is no command conjure. --help lists them"),
        (["prepare", "gsm9k"], "Did you mean gsm8k?"),
        (["plan", "--serch"], "unrecognized arguments: --serch. Did you mean --search?"),
        (
            ["train", "--learning_rate", "1e-6"],
            "KEY=VALUE, without dashes. TRL's learning_rate is here",
        ),
        (
            ["train", "--learning_rate", "1e-6", "--beta", "0.04", "--debg"],
            ". Did you mean --debug? Keys are written KEY=VALUE, without dashes. TRL's learning_rate is here: "
            "actor.optim.lr. TRL's beta is here",
        ),
        (["sft", "--learning-rate=1e-6"], "without dashes. TRL's learning_rate is here: actor.optim.lr"),
        (["train", "--actor.optim.lr=1e-6"], "--actor.optim.lr=1e-6. Keys are written KEY=VALUE, without dashes"),
    ],
)
def test_the_nearest_word_is_offered(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr().err
    assert left.value.code == 2 and meant in said and said.count("Keys are written") <= 1


@pytest.mark.parametrize(
    "words", [["train", "data.train_files=[a.parquet]", "model.path=Qwen2.5-0.5B-Instruct"],
              ["convert", "to-megatron", "--out", "megatron", "--hf", "models/qwen2.5-0.5b-instruct"],
        ["plan", "--config-dir", ".", "--config-name", "own", "cluster=cpu", "model.path=Qwen2.5-0.5B-Instruct"]],
)  # fmt: skip
def test_the_id_of_a_known_model_is_offered(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("defaults: [train, _self_]\n")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert ". Write Qwen/Qwen2.5-0.5B-Instruct, its id on the Hub, and it is downloaded" in said


def test_the_examples_of_a_program_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PROGRAMS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        examples = re.findall(r"^  mcore-rl (\S+)", capsys.readouterr().out, re.MULTILINE)
        assert len(examples) >= 3 and set(examples) == {name}


def test_every_command_is_a_module_and_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {path.stem for path in (ROOT / "mcore_rl" / "commands").glob("*.py")} - {"__init__", "programs"}
    assert {name.replace("-", "_") for name in COMMANDS} == modules | set(PROGRAMS)
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and all(f"  {name:<10} {about}\n" in said for name, about in COMMANDS.items())
    assert str(PAGES) in " ".join(said.split())


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"mcore-rl {metadata.version('mcore_rl')}\n")


HELPS = """
import contextlib, io, json, sys
from mcore_rl import cli
for words in [["--help"], *([name, "--help"] for name in cli.COMMANDS)]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main(words)
    print(json.dumps([words, len(said.getvalue()), sorted(sys.modules)]))
"""


def test_no_help_imports_anything_heavy() -> None:
    """In one process, one after another: what the first imports, the others are seen with."""
    done = subprocess.run([sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 1 + len(COMMANDS)
    for words, length, modules in answers:
        assert length > 200, words
        assert not {"torch", "ray", "vllm", "hydra", "omegaconf", "megatron", "transformers"} & {*modules}, words


def test_a_full_disk_is_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "none" / "plan.json"
    assert main(["plan", "recipe=qwen25_05b_ppo", "--json", str(page)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@dataclass
class Interrupted:
    """A run that learns nothing, stopped by Ctrl-C after its first checkpoint.  alive: processes that it left."""

    task: Path
    directory: Path
    exit_code: int
    err: str
    alive: list[psutil.Process]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[Interrupted]:
    task, directory = write_task(tmp_path_factory.mktemp("task")), tmp_path_factory.mktemp("run")
    endless = ["actor.optim.lr=0", "trainer.total_training_steps=100000", "trainer.save_freq=1", "trainer.test_freq=1"]
    command = [sys.executable, "-m", "mcore_rl.cli", "train", *overrides(task, directory, *endless)]
    log = directory / "err.txt"
    with open(log, "w") as err:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)
    try:
        until = time.monotonic() + LIMIT_S
        while not (complete_checkpoints(directory) and (directory / "hf" / "best").is_dir()):
            assert run.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        started = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all in the foreground
        exit_code = run.wait(GONE_S)
        alive = still_alive(started)
        yield Interrupted(task, directory, exit_code, log.read_text(), alive)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@pytest.mark.tier("full")
def test_ctrl_c_ends_all_processes_with_one_message(interrupted: Interrupted) -> None:
    assert interrupted.exit_code == 130, interrupted.err
    assert interrupted.alive == []
    assert "Traceback" not in interrupted.err
    newest = complete_checkpoints(interrupted.directory)[-1]
    words = f"{newest} is complete: the same command goes on from there (trainer.resume_mode=auto)."
    assert interrupted.err.endswith(f"{words}\nStopped.\n")


@pytest.mark.tier("full")
def test_a_rate_of_zero_leaves_the_weights_as_they_were_bit_for_bit(interrupted: Interrupted) -> None:
    before = load_file(interrupted.task / "model" / "model.safetensors")
    paths = sorted((interrupted.directory / "hf" / "best").glob("*.safetensors"))
    after = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.int32), after[name].view(torch.int32)), name
