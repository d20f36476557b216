"""What is refused at the front of every command: before torch, without a traceback, and without waiting for ever.

The programs themselves are replaced by one that says that it was reached; some commands are run as a user runs them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import cli
from mcore_rl.commands import programs
from mcore_rl.commands.programs import PROGRAMS, Program
from mcore_rl.config.bounds import file_violations
from mcore_rl.config.compose import compose
from mcore_rl.config.files import input_problem, output_problem
from mcore_rl.config.hub_files import fetched
from mcore_rl.ground.errors import ConfigError, Violation
from tests.support.number_oracle import NUMBERS
from tests.support.outsider import as_another_user

ROOT = Path(__file__).resolve().parents[2]
REACHED = 77
HANGS_S = 300  # for ever, on any machine: what is measured here takes milliseconds
HEAVY = ("torch", "ray", "megatron", "vllm", "transformers")


@pytest.fixture(autouse=True)
def hang_is_failure() -> Iterator[None]:
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of things that are not what they are named as, and of some that are."""
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "trap").mkdir()
    os.mkfifo(tmp_path / "trap" / "config.json")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


def base(program: str, files: Path) -> dict[str, str]:
    model, file = str(files / "model"), str(files / "file")
    return {
        "train": {"model.path": model, "data.train_files": file, "trainer.default_local_dir": str(files / "run")},
        "sft": {"model.path": model, "data.train_files": file, "trainer.default_local_dir": str(files / "run")},
        "prefer": {"model.path": model, "data.train_files": file, "trainer.default_local_dir": str(files / "run")},
        "reward": {"model.path": model, "data.train_files": file, "trainer.default_local_dir": str(files / "run")},
        "generate": {"model.path": model, "data.files": file, "out": str(files / "out.parquet")},
        "evaluate": {"path": file, "out": str(files / "out.json")},
    }[program]


def answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, program: str, *words: str
) -> tuple[int, str]:
    """(exit code, what was said); ``REACHED`` if the program would have been run."""
    made = PROGRAMS[program]
    monkeypatch.setattr(programs, "begin", lambda name: None)
    monkeypatch.setitem(PROGRAMS, program, replace(made, acts=lambda: (lambda config: REACHED, _reached)))
    code = cli.main([program, *words])
    return code, capsys.readouterr().err


async def _reached(config: object) -> int:
    return REACHED


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_sound_reaches_the_program(
    program: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{key}={value}" for key, value in base(program, files).items()]
    assert answer(capsys, monkeypatch, program, *words) == (REACHED, "")


PLACES = [
    *((program, "model.path", True) for program in ("train", "sft", "prefer", "reward", "generate")),
    *((program, key, False) for program, key in (("train", "data.train_files"), ("sft", "data.train_files"))),
    ("generate", "data.files", False),
    ("evaluate", "path", False),
    ("train", "custom_reward_function.path", False),
    ("sft", "model.tokenizer_path", True),
]


def refused(made: Program, config: Any) -> list[Violation]:
    """What stops ``config``: as it stands, or when the files of its folders and names are looked for."""
    if wrong := [*made.violations(config), *file_violations(config)]:
        return wrong
    with pytest.raises(ConfigError) as caught:
        fetched(config)
    return list(caught.value.violations)


@pytest.mark.parametrize(("program", "key", "directory"), PLACES)
def test_only_files_are_read_as_files(program: str, key: str, directory: bool, files: Path) -> None:
    wrong = ["pipe", "dangling", "loop", "none", *(["file", "trap"] if directory else ["model"])]
    places = [str(files / each) for each in wrong] + ["/dev/zero", "/dev/null", str(files / ("x" * 300)), "~nobody_x/a"]
    made, (*groups, name) = PROGRAMS[program], key.split(".")
    config = compose(made.schema, program, [f"{name}={value}" for name, value in base(program, files).items()])
    group = reduce(getattr, groups, config)
    for place in places:
        setattr(group, name, [place] if isinstance(getattr(group, name), list) else place)
        assert [each.key.partition("[")[0] for each in refused(made, config)] == [key], place


@pytest.mark.parametrize(
    ("program", "key"),
    [("generate", "out"), ("evaluate", "out"), ("train", "trainer.default_local_dir"),
     ("evaluate", "ray_init.timeline_json_file")],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_before_the_work(
    program: str, key: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [files / "pipe", files / "file" / "below", "/dev/zero"]
    wrong += [files / "file"] if key == "trainer.default_local_dir" else [files / "model"]
    for place in wrong:
        words = [f"{name}={value}" for name, value in (base(program, files) | {key: str(place)}).items()]
        code, said = answer(capsys, monkeypatch, program, *words)
        assert code == 2 and f"- {key}=" in said, (place, said)


def test_what_one_may_not_read_or_write_is_refused(files: Path) -> None:
    closed = files / "closed"
    closed.write_text("")
    closed.chmod(0)
    for each in (files, *files.parents[:3]):
        each.chmod(each.stat().st_mode | 0o055) if each != Path("/tmp") else None
    if os.geteuid() == 0:  # who may read everything
        imports = "from mcore_rl.config.files import input_problem, output_problem"
        code = "print(input_problem(sys.argv[1]), output_problem(sys.argv[1]), output_problem('/etc/x.json'))"
        said = as_another_user(code, closed, imports=imports)
    else:
        said = f"{input_problem(str(closed))} {output_problem(str(closed))} {output_problem('/etc/x.json')}"
    assert said.count("may not be") == 3, said


ODD_WORDS = [
    ["data.train_files=" + "[" * 3000 + "]" * 3000], ["model.path=" + "x" * 100_000], ["model.path=${model.path}"],
    ["model.path=${oc.env:NO_SUCH_VARIABLE}"], ["~model"], ["model=null"], ["actor=5"], ["=5"], ["a"], [""],
    ["trainer.nnodes=1" + "0" * 26], ["trainer.nnodes=1024", "trainer.n_gpus_per_node=1024"],
    ["trainer.experiment_name=\udcff"], ["actor.megatron={}}"], ["hydra.run.dir=/x"], ["algorithm=/dev/zero.py"],
    ["--config-dir", "/nonexistent"], ["--config-name", "x y"],
]  # fmt: skip


@pytest.mark.parametrize("words", ODD_WORDS, ids=lambda words: " ".join(words)[:40].encode("ascii", "replace").decode())
def test_odd_words_are_one_message(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = answer(capsys, monkeypatch, "train", *words)
    assert code == 2 and said.startswith("error: ") and "Traceback" not in said, said[:2000]
    assert len(said) < 5000, "the message is for people"


@pytest.mark.parametrize("name", ["pipe", "folder", "none"])
def test_odd_yaml_files_are_one_message(
    name: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = answer(capsys, monkeypatch, "train", "--config-dir", str(files), "--config-name", name)
    assert code == 2 and said.startswith("error: ")


COMMANDS = [
    *(["-m", "mcore_rl.cli", program, "trainer.nnodes=0" if program in ("train", "sft") else "ray_init.num_cpus=0"]
      for program in PROGRAMS),
    ["-m", "mcore_rl.cli", "doctor", "--nodes", "0"],
    ["launch/slurm/submit.py", "recipe=mixtral_8x22b_rloo", "cluster=nvidia_h200", "--dry-run", "rollout.n=0"],
    ["tools/plan_run.py", "recipe=mixtral_8x22b_rloo", "rollout.n=0", "data.train_batch_size=0"],
    ["tools/rehearse.py", "recipe=mixtral_8x22b_rloo", "actor.optim.lr=nan"],
    ["tools/compare_logprobs.py", "--hf", "/dev/null", "--data", "/dev/zero", "--out", "/tmp", "--samples", "0"],
    ["tools/verify_conversion.py", "--model", "tiny-llama", "--layout", "tp=99999999999"],
    ["tools/convert_checkpoint.py", "to-megatron", "--hf", "/dev/null", "--out", "/dev/null"],
    ["tools/make_tiny_model.py", "--data", "/dev/null", "--out", "/dev/null", "--vocab-size", "0"],
    ["tools/fit_tiny.py", "--steps", "0", "--lr", "nan"],
    ["tools/prepare_data.py", "arithmetic", "--train", "0", "--out", "/dev/null"],
    ["tools/report.py", "/dev/zero"],
]  # fmt: skip
RUN = """
import contextlib, io, json, runpy, sys
for command in json.load(sys.stdin):
    module, sys.argv = command[0] == "-m", command[1:] if command[0] == "-m" else command
    code, said = 0, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as left:
            code = left.code
    print(json.dumps([code, said.getvalue(), sorted(sys.modules)]))
"""


def test_every_command_refuses_before_anything_heavy_is_imported(processes: None) -> None:
    """In one process, one after another: each has imported what it needs to refuse, and no more."""
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, input=json.dumps(COMMANDS),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(COMMANDS), done.stderr
    for command, (code, said, modules) in zip(COMMANDS, answers, strict=True):
        assert code == 2 and said.startswith("error: ") and "Traceback" not in said, (command, code, said)
        assert not {*HEAVY} & {*modules}, command


@pytest.mark.parametrize("number", [0, 5, 7])
def test_a_user_sees_one_message(number: int, processes: None) -> None:
    done = subprocess.run(
        [sys.executable, *COMMANDS[number]], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: "), done


@pytest.mark.parametrize(
    "key", ["rollout.n", "data.train_batch_size", "actor.optim.lr", "trainer.nnodes", "rollout.tp"]
)
def test_the_planner_refuses_what_training_refuses(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in NUMBERS[key][0][:2]:
        assert cli.main(["plan", "recipe=mixtral_8x22b_rloo", f"{key}={text}"]) == 2
        assert f"- {key}=" in capsys.readouterr().err
