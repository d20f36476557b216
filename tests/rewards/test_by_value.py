"""Reward functions of a script as a file: real grading processes import it and answer what the caller would."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.reward import Completions, CustomRewardFunction, RewardConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.by_value import FOLDERS, MAX_BYTES, functions_file, names_of
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer

SCRIPT = """
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from beside import times_two
from mcore_rl.rewards.by_value import functions_file

SCALE = 10.0
VOWELS = {"a", "e", "i", "o", "u"}
SAME = {"yes": frozenset({"yes", "y", "true"}), "no": [{"no", "n", "false"}]}


@dataclass
class Counted:
    number: int


class Answer(Enum):
    yes = "yes"
    no = "no"

    @classmethod
    def read(cls, text):
        return cls.yes if text in {"yes", "y", "true", "right"} else cls.no


def length(completions, **columns):
    return [SCALE * len(text) for text in completions]


def scaled(by):
    def doubled(completions, topic):
        return [times_two(Counted(len(text)).number) * by for text, _ in zip(completions, topic)]

    return doubled


def sets(known):
    def counted(completions, **columns):
        return [
            float(sum(each in VOWELS for each in text) + (text in known) + (text in {"four", "five", "six", "seven"}))
            + float(text in SAME["yes"] or any(text in each for each in SAME["no"]))
            + float(Answer.read(text).value == "yes")
            for text in completions
        ]

    return counted


if __name__ == "__main__":
    made = functions_file(FUNCTIONS, Path(sys.argv[1]))
    for path, data in made.files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    print(made.path, *made.names)
"""
FUNCTIONS = '[length, scaled(3), sets({"one", "two", "three", "four"})]'


def written(folder: Path, functions: str, seed: str = "0") -> tuple[Path, list[str]]:
    """What a script in ``folder`` writes of its own functions, in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text("def times_two(number):\n    return 2 * number\n")
    (folder / "script.py").write_text(SCRIPT.replace("FUNCTIONS", functions))
    done = subprocess.run(
        [sys.executable, folder / "script.py", folder / "inputs"], capture_output=True, text=True, check=False,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path, *names = done.stdout.split()
    return Path(path), names


def graded(path: Path, names: Sequence[str], response: str, **columns: Any) -> dict[str, float]:
    """The parts of the score that a grading process gives to ``response``."""
    custom = CustomRewardFunction(path=str(path), functions=list(names), completions=Completions.text)
    with Scorer(RewardConfig(num_workers=1), custom) as scorer:
        (score,) = asyncio.run(scorer.score_all([RewardRequest(("r", 0), "x", response, "", extra_info=columns)]))
    assert score.error is None
    return dict(score.parts)


@pytest.mark.tier("ci")
def test_functions_of_a_script_are_graded_by_with_what_they_use(tmp_path: Path) -> None:
    path, names = written(tmp_path / "script", "[length, scaled(3), lambda completions, **columns: [0.5]]")
    assert names == ["length", "doubled", "reward_3"]
    assert graded(path, names, "four", topic="t") == {"length": 40.0, "doubled": 24.0, "reward_3": 0.5}
    assert "# def length(completions, **columns):\n#     return [SCALE * len(text)" in path.read_text()


@pytest.mark.tier("ci")
def test_equal_functions_give_an_equal_file_from_another_process_place_and_name(tmp_path: Path) -> None:
    first, names = written(tmp_path / "script", FUNCTIONS, seed="1")
    assert graded(first, names, "four", topic="t") == {"length": 40.0, "doubled": 24.0, "counted": 4.0}
    folder, more = tmp_path / "script", tmp_path / "more"
    more.mkdir()
    script = (folder / "script.py").read_text()
    later = script.replace("SCALE =", "\n\n\nSCALE =")
    for seed, text, same in (("2", later, True), ("3", later, True), ("2", script.replace("10.0", "11.0"), False)):
        (folder / "renamed.py").write_text(text)
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{Path(__file__).parents[2]}:{more}"}
        command = [sys.executable, "-m", "renamed", str(tmp_path / "again")]
        said = subprocess.check_output(command, text=True, env=environment, cwd=folder)
        again = Path(said.split()[0])
        assert (
            (again.name, again.read_bytes()) == (first.name, first.read_bytes()) if same else again.name != first.name
        )
    assert str(more) in (tmp_path / "again" / FOLDERS).read_text(), "which the file reads"


def test_a_class_is_written_without_its_place(tmp_path: Path) -> None:
    def made(line: int, order: tuple[str, str]) -> str:
        class Counted:
            __firstlineno__ = line  # as Python 3.13 writes it
            __static_attributes__ = order

        def counted(completions: list[str]) -> list[float]:
            return [float(Counted is not None)]

        return functions_file([counted], tmp_path).path.name

    assert made(1, ("a", "b")) == made(2, ("b", "a"))


def test_folders_of_the_caller_are_those_that_python_does_not_read_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [str(tmp_path / name) for name in ("src/app", "env/lib_experiments")]
    packages = sysconfig.get_paths()["purelib"]
    for name in own:
        Path(name).mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*own, packages, f"{packages}/inner"])
    assert json.loads(functions_file([one], tmp_path).files[tmp_path / FOLDERS]) == own


def one(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


class Callable_:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0]


def test_every_function_has_a_name_of_its_own() -> None:
    functions: list[Callable[..., Any]] = [one, one, lambda completions: [1.0], functools.partial(one), Callable_()]
    assert names_of(functions) == ["one", "reward_2", "reward_3", "partial", "Callable_"]

    def reward_3(completions: list[str]) -> list[float]:
        return [1.0]

    assert names_of([reward_3, one, lambda completions: [1.0], reward_3]) == ["reward_3", "one", "reward_4", "reward_5"]


def test_the_source_is_of_the_function_or_is_not_shown(tmp_path: Path) -> None:
    names = {"__name__": "__main__"}
    exec(compile("def two(completions):\n    return [2.0]", __file__, "exec"), names)  # as if it stood in this file
    made = functions_file([one, names["two"]], tmp_path)  # type: ignore[list-item]
    text = made.files[made.path].decode()
    assert "# def one(completions: list[str], **columns: Any) -> list[float]:\n" in text
    assert text.endswith("# two: its source is not there\n#\n")


def refusal(function: Any, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        functions_file([one, function], folder)
    return str(caught.value)


def test_what_cannot_be_sent_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locked(completions: list[str]) -> list[float]:
        with lock:
            return [1.0]

    said = refusal(locked, tmp_path / "inputs")
    assert "reward=locked: cannot be sent to the processes that grade: cannot pickle '_thread.lock' object" in said
    assert "reward=team/model: is no function; a reward model has keys" in refusal("team/model", tmp_path / "inputs")
    assert "reward=3: is no function. Give f(completions, **columns)" in refusal(3, tmp_path / "inputs")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    key = "sk-0123456789"
    assert "reward=<lambda>: holds the value of a secret" in refusal(
        lambda completions: [len(key)], tmp_path / "inputs"
    )

    def in_a_comment(completions: list[str]) -> list[float]:
        return [1.0]  # for sk-0123456789

    assert "reward=in_a_comment: holds the value of a secret" in refusal(in_a_comment, tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "schlüssel")
    word = "schlüssel"
    assert "reward=<lambda>: holds the value of a secret" in refusal(lambda completions: [len(word)], tmp_path)


def test_a_function_with_much_data_is_refused_and_with_less_is_written_at_once(tmp_path: Path) -> None:
    def function_of(held: bytes) -> Callable[..., Any]:
        return lambda completions: [float(len(held))]

    said = refusal(function_of(bytes(MAX_BYTES)), tmp_path)
    assert "reward=<lambda>: holds 64 MB of data, and 64 are sent. Load it inside the function from a file" in said
    began = time.process_time()
    made = functions_file([function_of(bytes(8 << 20))], tmp_path)
    assert time.process_time() - began < 5, "the time grows with the size, and not with its square"
    assert max(map(len, made.files[made.path].splitlines())) <= 120
