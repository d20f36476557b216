"""``mcore-rl sample``: what a command line means, and what is refused before anything is imported or started."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.commands.sample import asked, weights_of
from tests.support.greedy_llama import write_llama


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (["m", "2 + 2 = ?"], ("m", "2 + 2 = ?", [])),
        (["m", "Is a+b=c?", "rollout.n=2"], ("m", "Is a+b=c?", ["rollout.n=2"])),
        (["rollout.temperature=0", "m"], ("m", None, ["rollout.temperature=0"])),
        (["m", "+data.chat_template_kwargs={a: 1}", "q"], ("m", "q", ["+data.chat_template_kwargs={a: 1}"])),
        (["m", "If\nx = 3?"], ("m", "If\nx = 3?", [])),
    ],
)
def test_what_the_words_mean(words: list[str], meaning: tuple[str, str | None, list[str]]) -> None:
    assert asked(words) == meaning


def made(folder: Path, *files: str) -> Path:
    for each in files:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text("{}")
    return folder


def test_of_a_run_the_last_exported_weights_answer(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "config.yaml", "hf/best/config.json")
    assert weights_of(str(run)) == f"{run}/hf/best"
    made(run, "hf/final/config.json")
    assert weights_of(str(run)) == f"{run}/hf/final"
    assert weights_of(f"{run}/hf/best") == f"{run}/hf/best"
    assert weights_of("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_each_mistake_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "run/config.yaml", "run/checkpoints/step_4/manifest.json", "run/checkpoints/step_4/actor/run.json")
    made(tmp_path, "m/config.json", "megatron/.metadata")
    for words, typed, said in (
        ([], "", "MODEL=: names no model. Write a directory, an id of the Hub or a run: mcore-rl sample MODEL"),
        (["m", "What", "is", "2?"], "", "QUESTION=What is 2?: are 3 words after MODEL, and one question is asked. Put"),
        (["m"], " \n", "QUESTION=: is empty. Write it in quotes"),
        (["m", ""], "", "QUESTION=: is empty. Write it in quotes"),
        (["m", "caf\udce9?"], "", "holds bytes that are no UTF-8"),
        (["nothing/is/here", "q"], "", "MODEL=nothing/is/here: there is no such directory"),
        (["run", "q"], "", "MODEL=run: is a run that has not exported its weights. Write mcore-rl convert to-hf --run"),
        (["run/checkpoints/step_4", "q"], "", "no engine reads. Write mcore-rl convert to-hf --run run/checkpoints/st"),
        (["run/checkpoints/step_4/actor", "q"], "", "no engine reads. Write mcore-rl convert to-hf --run run/checkpo"),
        (["megatron", "q"], "", "no engine reads. Write mcore-rl convert to-hf --megatron megatron --out DIR"),
        (["m", "q", "rollout.temprature=0"], "", "rollout.temprature=0: there is no such key"),
        (["m", "q", "data.files=[x.parquet]"], "", "data.files=['x.parquet']: is not read here. Leave it out, or"),
        (["m", "q", "out=x.parquet"], "", "out=x.parquet: is not read here. Leave it out, or write mcore-rl generate"),
        (["m", "q", "rollout.agent.tools=[python]"], "", "rollout.agent=...: is not read here"),
        (["m", "q", "rollout.temperature=0", "rollout.n=3"], "", "draws the same response rollout.n=3 times"),
        (["m", "q", "rollout.top_p=3", "rollout.n=0"], "", "2 problems in the configuration"),
        (["it's (1)", "q"], "", "MODEL=it's (1): there is no such directory"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["sample", *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err and said in err, (words, err)


def test_a_question_that_could_be_asked_starts_nothing_with_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: None
) -> None:
    model = write_llama(tmp_path / "model")
    assert main(["sample", str(model), "Why?", "--check"]) == 0
    assert capsys.readouterr().out == "nothing is wrong. Nothing was started\n"
    assert main(["sample", str(model), "Why? " * 99, "--check", "data.max_prompt_length=8"]) == 2
    assert "1 prompt has more than data.max_prompt_length=8 tokens" in capsys.readouterr().err
