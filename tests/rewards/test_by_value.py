"""Reward functions of a script as a file: real grading processes import it and answer what the caller would."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.reward import Completions, CustomRewardFunction, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.by_value import names_of, write_functions
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer

SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path

from beside import times_two
from mcore_rl.rewards.by_value import write_functions

SCALE = 10.0


@dataclass
class Counted:
    number: int


def length(completions, **columns):
    return [SCALE * len(text) for text in completions]


def scaled(by):
    def doubled(completions, topic):
        return [times_two(Counted(len(text)).number) * by for text, _ in zip(completions, topic)]

    return doubled


if __name__ == "__main__":
    path, names = write_functions(FUNCTIONS, Path(sys.argv[1]))
    print(path, *names)
"""


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
def test_equal_functions_give_an_equal_file_from_another_process_and_line(tmp_path: Path) -> None:
    first, _ = written(tmp_path / "script", "[length]", seed="1")
    data = first.read_bytes()
    script = tmp_path / "script" / "script.py"
    later = script.read_text().replace("SCALE =", "\n\n\nSCALE =")
    for text, same in ((later, True), (later.replace("10.0", "11.0"), False)):
        script.write_text(text)
        command = [sys.executable, str(script), str(tmp_path / "again")]
        environment = {"PYTHONHASHSEED": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
        said = subprocess.check_output(command, text=True, env=environment, cwd="/")
        again = Path(said.split()[0])
        assert ((again.name, again.read_bytes()) == (first.name, data)) is same


def one(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


class Callable_:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0]


def test_every_function_has_a_name_of_its_own() -> None:
    functions: list[Callable[..., Any]] = [one, one, lambda completions: [1.0], functools.partial(one), Callable_()]
    assert names_of(functions) == ["one", "reward_2", "reward_3", "partial", "Callable_"]


def test_the_source_is_of_the_function_or_is_not_shown(tmp_path: Path) -> None:
    names = {"__name__": "__main__"}
    exec(compile("def two(completions):\n    return [2.0]", __file__, "exec"), names)  # as if it stood in this file
    path, _ = write_functions([one, names["two"]], tmp_path)  # type: ignore[list-item]
    text = path.read_text()
    assert "# def one(completions: list[str], **columns: Any) -> list[float]:\n" in text
    assert text.endswith("# two: its source is not there\n#\n")


def refusal(function: Any, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        write_functions([one, function], folder)
    assert not folder.exists()
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
