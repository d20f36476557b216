"""Ask a model a question, and read what it answers.

    mcore-rl sample Qwen/Qwen2.5-0.5B-Instruct "What is 17 + 25?"
    mcore-rl sample runs/arithmetic/grpo "Omar has 2 coins and finds 2 more. How many coins does Omar have?"
    mcore-rl sample runs/arithmetic/grpo rollout.temperature=0          asks you, again and again; Ctrl-D ends
    mcore-rl sample MODEL "Name a prime." rollout.n=4 data.max_response_length=64
    mcore-rl sample MODEL < question.txt > answer.txt

MODEL is a directory with config.json, tokenizer and weights, an id of the Hub, or a run, whose last exported weights
answer.  The question is put into the model's chat template and answered by vLLM, as in training; each is asked by
itself, without what was said before.  The answer goes to the standard output, all else to the standard error.

key=value: rollout.temperature (1; 0 takes the likeliest token), rollout.top_p, rollout.n (answers), rollout.seed,
data.max_response_length (1024 tokens), data.chat_template_kwargs, rollout.tp, and all that mcore-rl generate takes,
which answers files of questions.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

from mcore_rl.commands.programs import PROGRAMS, begin
from mcore_rl.config.generate import sample_violations
from mcore_rl.ground.errors import ConfigError, Violation

OVERRIDE = re.compile(r"[+~]?[A-Za-z_][\w.]*=.*", re.DOTALL)
EXAMPLE = 'mcore-rl sample MODEL "What is 17 + 25?"'
SPELT = {"model.path": "MODEL"}
EXPORTED = ("final", "best")  # in a run's folder hf, the first that is there
ASKING = replace(PROGRAMS["generate"], violations=sample_violations)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.set_defaults(spelt=SPELT)
    parser.usage = 'mcore-rl sample MODEL ["QUESTION"] [key=value ...] [--check] [--debug]'
    parser.add_argument("words", nargs="*", metavar="WORD", help="MODEL, the question in quotes, and key=value")
    parser.add_argument("--check", action="store_true", help="check all of it, and start nothing")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    model, question, overrides = asked(options.words)
    if question is None and not sys.stdin.isatty() and not options.check:
        question = _read_question()
    if question is not None:
        _demand_text(question)
    config = ASKING.ready(ASKING.composed([f"model.path={_quoted(weights_of(model))}", *overrides]))
    begin("sample")
    from mcore_rl.controller.programs.sample import run_sample

    written = {each.partition("=")[0].lstrip("+") for each in overrides}
    return asyncio.run(run_sample(config, question, written, options.check))


def asked(words: list[str]) -> tuple[str, str | None, list[str]]:
    """(model, question, overrides) of a command line.  Raises ConfigError where it has no model, or too many words."""
    overrides = [each for each in words if OVERRIDE.fullmatch(each)]
    names = [each for each in words if each not in overrides]
    if not names or not names[0].strip():
        problem = "names no model"
        raise ConfigError([Violation("MODEL", "", problem, f"Write a directory, an id of the Hub or a run: {EXAMPLE}")])
    model, *questions = names
    if len(questions) > 1:
        problem = f"are {len(questions)} words after MODEL, and one question is asked"
        raise ConfigError([Violation("QUESTION", " ".join(questions), problem, f"Put it in quotes: {EXAMPLE}")])
    return model, questions[0] if questions else None, overrides


def weights_of(model: str) -> str:
    """The directory or id with the weights of ``model``: of a run, those that it exported last.

    Raises ConfigError where only a conversion makes what an engine reads.
    """
    place = Path(model).expanduser()
    if (place / "config.json").is_file():
        return model
    for made, option in (("manifest.json", "--run"), ("run.json", "--run"), (".metadata", "--megatron")):
        if (place / made).is_file() or (option == "--run" and (place.parent / made).is_file()):
            problem = "is a checkpoint in Megatron's form, which no engine reads"
            remedy = f"Write mcore-rl convert to-hf {option} {model} --out DIR, and then DIR here"
            raise ConfigError([Violation("model.path", model, problem, remedy)])
    if not (place / "config.yaml").is_file():
        return model
    for name in EXPORTED:
        exported = place / "hf" / name
        if (exported / "config.json").is_file():
            return str(exported)
    remedy = f"Write mcore-rl convert to-hf --run {model}/checkpoints/step_N --out DIR, and then DIR here"
    raise ConfigError([Violation("model.path", model, "is a run that has not exported its weights", remedy)])


def _read_question() -> str:
    """What stands on the standard input, all of it."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        problem = f"the standard input is no text: {error.reason}"
        raise ConfigError([Violation("QUESTION", "", problem, "Write it as UTF-8")]) from error


def _demand_text(question: str) -> None:
    if not question.strip():
        remedy = f"Write it in quotes, {EXAMPLE}, or on the standard input"
        raise ConfigError([Violation("QUESTION", "", "is empty", remedy)])
    if not question.isascii() and any("\ud800" <= letter <= "\udfff" for letter in question):
        raise ConfigError([Violation("QUESTION", question[:80], "holds bytes that are no UTF-8", "Write it as UTF-8")])


def _quoted(path: str) -> str:
    """``path`` as hydra reads it, whatever characters it has."""
    return "'" + path.replace("'", "\\'") + "'"
