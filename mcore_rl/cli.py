"""``mcore-rl COMMAND``: one command line for all of it.

This module has the table of commands and what they share; a command is imported when it is asked for.  Every mistake
of the user's is one message and exit code 2, without a traceback; ``--debug`` shows it.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn, Protocol, cast

from mcore_rl import __version__
from mcore_rl.config.names import NO_KEY
from mcore_rl.config.options import check_options, spelt_as_options
from mcore_rl.config.resources import MODEL_CONFIGS, PAGES
from mcore_rl.ground.errors import ConfigError, McoreRLError, shortened
from mcore_rl.tracking.messages import HarmlessFormatter

ABOUT = "Reinforcement learning for large language models, on Megatron-core: from the first plan to the report."
PROGRAMS = ("train", "sft", "prefer", "reward", "generate", "evaluate")
COMMANDS = {
    "train": "reinforcement learning: PPO, GRPO, RLOO and their relatives",
    "sft": "supervised fine-tuning on conversations",
    "prefer": "learning from preferred answers: DPO, IPO, SimPO, ORPO, KTO",
    "reward": "training a reward model on pairs of answers, numbers or outcomes",
    "generate": "responses to the prompts of parquet files",
    "evaluate": "grade generated responses: score, accuracy, pass@k, maj@k",
    "sample": "ask a model a question, and read its answer",
    "plan": "does a run fit, where does each byte go, how long is a step",
    "rehearse": "one rank of a run at full size, without its machine",
    "submit": "run a recipe on a Slurm cluster",
    "prepare": "make the data that runs read, or a tiny model to try them with",
    "convert": "a checkpoint from Hugging Face to Megatron, or back",
    "verify": "prove that a model's weights go right: Hugging Face to Megatron to vLLM",
    "compare": "vLLM's log-probs against those of transformers and Megatron",
    "audit": "prove that a run trained every prompt once in each epoch",
    "report": "the page of a run, or one that compares several",
    "engines": "the rollout engines of a run that goes on; let some join or leave",
    "doctor": "measure this machine or cluster, and say what is wrong before a run does",
    "from-verl": "a command or configuration of verl's into a yaml file of ours",
    "recipes": "the recipes there are, or one of them",
    "models": "the models that are known by name, or one of them",
}
WRONG, INTERRUPTED = 2, 130  # exit codes: a mistake of the user's; Ctrl-C, as a shell says it


class Command(Protocol):
    """A module of ``mcore_rl/commands``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options and the help; ``--debug`` is there already.

        ``key=value`` words are an argument called ``words``.  A default ``spelt`` says how refusals name options.
        """

    def run(self, options: argparse.Namespace) -> int:
        """Does it, and returns the exit code.  Raises McoreRLError for what is the user's to mend."""


def command(name: str) -> Command:
    """The command called ``name``, imported."""
    if name in PROGRAMS:
        from mcore_rl.commands import programs

        return programs.PROGRAMS[name]
    return cast(Command, import_module(f"mcore_rl.commands.{name.replace('-', '_')}"))


def overview() -> argparse.ArgumentParser:
    """What is before the first command: ``--help`` and ``--version``."""
    table = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
    pages = f"mcore-rl COMMAND --help says more, and the pages in {PAGES} all."
    top = _Parser(
        prog="mcore-rl",
        description=f"{ABOUT}\n\n{table}",
        epilog=pages,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of these")
    top.add_argument("--version", action="version", version=f"mcore-rl {__version__}")
    return top


def parser(name: str, asked: Command) -> argparse.ArgumentParser:
    """The options of the command ``asked``, which is called ``name``."""
    made = _Parser(prog=f"mcore-rl {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    made.set_defaults(spelt={})
    asked.add_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code: 0, 1 where it says so, 2 on a user's mistake, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        top = overview()
        if words and not words[0].startswith("-"):
            top.error(f"there is no command {words[0]}.{_nearest(words[0], COMMANDS) or ' --help lists them'}")
        top.parse_args(words)
        top.error("the command comes first")
    if logging.lastResort is not None:  # what prints warnings where nobody configured logging
        logging.lastResort.setFormatter(HarmlessFormatter())
    asked = command(words[0])
    taken = parser(words[0], asked)
    options, more = taken.parse_known_args(words[1:])  # argparse takes no key=value after an option by itself
    if more and ("words" not in options or any(text.startswith("-") for text in more)):
        dashed = [text.partition("=")[0] for text in more if text.startswith("--")]
        taken.error(f"unrecognized arguments: {' '.join(more)}.{_meant(dashed, taken)}".removesuffix("."))
    if more:
        options.words += more
    try:
        check_options(options, taken)
        return asked.run(options)
    except McoreRLError as error:
        if options.debug:
            raise
        _tell(f"error: {spelt_as_options(_offered(error, words[0]), options.spelt)}", error)
        return WRONG
    except OSError as error:
        if options.debug or words[0] in PROGRAMS:  # there it may be a bug of ours, and the traceback tells
            raise
        _tell(f"error: {shortened(str(error))}", error)
        return WRONG
    except KeyboardInterrupt as interrupt:
        told = words[0] not in PROGRAMS and _notes(interrupt)  # what a command says of what it leaves
        _tell("" if told else "Stopped.", interrupt)
        return INTERRUPTED


_CHOICE = re.compile(r"invalid choice: '(?P<written>[^']*)' \(choose from (?P<choices>.*)\)")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong without words that are longer than anybody reads, and what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """See ``argparse.ArgumentParser``."""
        if wrong := _CHOICE.search(message):
            message += _nearest(wrong["written"], re.findall(r"[\w.-]+", wrong["choices"]))
        super().error(shortened(message))


def _nearest(written: str, known: Iterable[str]) -> str:
    near = get_close_matches(written, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _meant(dashed: Iterable[str], parser: argparse.ArgumentParser) -> str:
    """What to write in the place of options that are not known; settings are given as such to other trainers."""
    from mcore_rl.config.trl_names import trl_remedy

    takes_keys = any(action.metavar == "key=value" for action in parser._actions)
    near = {name: _nearest(name, _options(parser)) for name in dashed}
    keys = [name.lstrip("-").replace("-", "_") for name, option in near.items() if takes_keys and not option]
    told = list(filter(None, near.values()))
    told += [" Keys are written KEY=VALUE, without dashes."] if keys else []
    told += [f" {remedy}." for key in keys if (remedy := trl_remedy(key))]
    return "".join(dict.fromkeys(told))


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of ``parser``; argparse has no public way to ask for them."""
    return [name for action in parser._actions for name in action.option_strings]


def _offered(error: McoreRLError, name: str) -> McoreRLError:
    """``error`` of a command, with remedies of other rooms: Hub ids of known models, and our keys for verl's."""
    if not isinstance(error, ConfigError):
        return error
    from mcore_rl.families.checkpoints import offered

    violations = list(error.violations)
    if name not in PROGRAMS[1:] and any(each.problem == NO_KEY for each in violations):
        from mcore_rl.from_verl.hints import hinted

        violations = hinted(violations)
    return ConfigError(offered(violations, MODEL_CONFIGS))


def _notes(error: BaseException) -> list[str]:
    return [str(note) for note in error.__dict__.get("__notes__", ())]


def _tell(text: str, error: BaseException) -> None:
    """Shows ``text`` and the notes of ``error``, without secrets."""
    from mcore_rl.ground.secrets import redacted
    from mcore_rl.tracking.messages import say

    say(redacted("\n".join(filter(None, [text, *_notes(error)]))))


if __name__ == "__main__":
    sys.exit(main())
