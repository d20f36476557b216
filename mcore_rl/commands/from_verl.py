"""A command, script or configuration of verl's into a yaml file of ours, and the list of what is different.

    mcore-rl from-verl run_qwen2-7b_math_megatron.sh --out my_recipes/qwen2.yaml
    mcore-rl from-verl 'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=2 ...'
    mcore-rl from-verl outputs/2026-01-05/.hydra/config.yaml --out mine.yaml
    mcore-rl plan recipe=my_recipes/qwen2.yaml cluster=nvidia_h100           then: does it fit
    mcore-rl train --check recipe=my_recipes/qwen2.yaml                      and: does it begin

SOURCE is a shell script, a yaml file, a file of key=value words, a command in quotes, or - for standard input.  bash
itself expands a script, in a cage: it starts no program, reaches no network, writes and reads no file of yours.  What
follows SOURCE are the script's arguments, and variables of your environment that it names count, as in
NNODES=4 mcore-rl from-verl run.sh 8 out/.
Read are verl 0.4 to 0.10, with Megatron or FSDP: main_ppo, fully_async_main and one_step_off become a recipe of train,
sft_trainer of sft, main_generation of generate, main_eval of evaluate.  The newest version is taken that has all keys,
unless --version says another.

The list has every key that is not here, that means something else, whose default is another, or that is not needed.
Where verl's default decides what is trained and ours is another, it is written into the yaml.

Exit status: 0 our run does all that verl's does; 1 something that was asked for is not here, or was not understood, and
is left out of the yaml; 2 there is nothing to translate.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mcore_rl.config.bounds import OutputFile
from mcore_rl.config.options import typed
from mcore_rl.ground.errors import ConfigError, Violation

if TYPE_CHECKING:
    from mcore_rl.from_verl.answer import Entry
    from mcore_rl.from_verl.translate import Translation
    from mcore_rl.from_verl.written import Verl

LEFT_OUT = 1  # the exit code if something is
# Programs that change nothing of what a script gives to verl.
SILENT = {"python", "python3", "pip", "pip3", "uv", "ray", "conda", "wandb", "hf", "huggingface-cli"} | {
    "mkdir",
    "rm",
    "cp",
    "mv",
    "ln",
    "touch",
    "chmod",
    "chown",
    "sleep",
    "tee",
    "clear",
    "ls",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("source", metavar="SOURCE", help="a file, a command in quotes, or - for standard input")
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the script is given as $1, $2, ...")
    parser.add_argument(
        "--out", type=typed(OutputFile), metavar="FILE", help="the yaml file to write (default: printed)"
    )
    parser.add_argument("--version", default="", help="of verl, such as 0.6.1 (default: the newest that has all keys)")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.from_verl.answer import yaml_of
    from mcore_rl.from_verl.facts import versions
    from mcore_rl.from_verl.models import model_facts
    from mcore_rl.from_verl.translate import translate
    from mcore_rl.ground.secrets import redacted

    if options.version and options.version not in versions():
        remedy = f"Write one of {', '.join(versions())}"
        raise ConfigError([Violation("--version", options.version, "is no version of verl that is known", remedy)])
    verl, aside = read(options.source, options.words, options.version)
    translation = translate(verl, model_facts(verl.model_path))
    head = f"Made by mcore-rl from-verl of verl {verl.version}, {verl.config}."
    text = redacted(yaml_of(translation.program, translation.algorithm, translation.settings, head))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    console = Console(stderr=True)
    show(console, translation, aside)
    if options.out:
        console.print(next_step(translation.program, options.out), markup=False, highlight=False, soft_wrap=True)
    return 0 if translation.is_whole else LEFT_OUT


def read(source: str, words: Sequence[str], version: str) -> tuple[Verl, list[str]]:
    """(verl's configuration of a file, a command, or standard input; what a script would have run besides)."""
    from mcore_rl.config.yaml_files import read_limited
    from mcore_rl.from_verl.shell import Expanded, expand, words_of
    from mcore_rl.from_verl.written import MAX_BYTES, Launch, launch_of, of_launch, of_tree, read_tree

    path = Path(source)
    is_file = "\n" not in source and len(source) < 4096 and path.is_file()
    if is_file and path.suffix in (".yaml", ".yml"):
        try:
            return of_tree(read_tree(path), version), []
        except ValueError as error:
            raise _nothing(source, str(error)) from None
    text = sys.stdin.read(MAX_BYTES) if source == "-" else read_limited(path, MAX_BYTES) if is_file else source
    plain = None if words else words_of(text)
    expanded = (
        Expanded([plain])
        if plain is not None
        else expand(text, path if is_file else None, words, environment=os.environ)
    )
    launches = [launch for each in expanded.programs if (launch := launch_of(each))]
    if not launches:  # a.b=1 is none of bash's assignments, and taken for a program
        launches = [Launch("", each) for each in expanded.programs if each and "=" in each[0]]
    if not launches:
        problem = f"stops before it starts verl: {expanded.stopped}" if expanded.stopped else ""
        raise _nothing(source, problem or "has neither a command of verl's nor key=value words")
    read_ones = [launch for launch in launches if launch.program]
    if not read_ones:
        problem = f"is a program of verl's that is not translated: {launches[0].module}"
        raise ConfigError([Violation("SOURCE", _shown(source), problem, launches[0].remedy)])
    verl = of_launch(read_ones[0], version)
    others = Counter(launch.module for launch in launches if launch is not read_ones[0])
    for module, count in others.items():
        times = f"{count} times, " if count > 1 else ""
        verl.unread.append((module, f"is started too, {times}and only the first is translated: give it by itself"))
    if expanded.broken:
        verl.unread.append((_shown(source), expanded.stopped))
    if not launches[0].module and not verl.written:
        raise _nothing(source, "has neither a command of verl's nor key=value words")
    return verl, besides(expanded.programs)


def besides(programs: Sequence[Sequence[str]]) -> list[str]:
    """Programs other than verl's that decide what a script does, and the files that it did not read."""
    from mcore_rl.from_verl.written import launch_of

    names = list[str]()
    for words in programs:
        name = Path(words[0]).name
        if launch_of(words) is None and name not in SILENT and "=" not in name:
            names.append(" ".join(words[:2]) if name in ("source", "bash") else name)
    return list(dict.fromkeys(names))


def _nothing(source: str, problem: str) -> ConfigError:
    remedy = "Name a script, a yaml file, or write 'python3 -m verl.trainer.main_ppo key=value ...' in quotes"
    if ": unbound variable" in problem:
        remedy = "Set it, as in NAME=VALUE mcore-rl from-verl run.sh, or give the script its arguments behind it"
    elif problem.startswith("stops"):
        remedy = "Give the script its arguments behind it, or the command that it ends in, in quotes"
    return ConfigError([Violation("SOURCE", _shown(source), problem, remedy)])


def _shown(source: str) -> str:
    return source if len(source) < 80 else f"{source[:77]}..."


def show(console: Console, translation: Translation, aside: Sequence[str]) -> None:
    """The list, under its headings.  aside: programs that a script would have run, too."""
    from mcore_rl.from_verl.answer import Difference
    from mcore_rl.from_verl.facts import versions_with
    from mcore_rl.ground.secrets import redacted

    verl = translation.verl
    lines = list[str]()
    known = versions_with(verl.config, verl.written)
    span = f"{known[0]} to {known[-1]}" if len(known) > 1 else "".join(known) or "no single version"
    lines.append(f"{len(verl.written)} keys of {verl.config}, which {span} has; defaults of verl {verl.version}")
    if aside:
        lines.append(f"Not run, and taken to succeed: {', '.join(sorted(aside))}")
    for kind in Difference:
        told: dict[tuple[str, str], list[Entry]] = {}
        for each in translation.of_kind(kind):
            told.setdefault((each.ours if kind is not Difference.default else each.verl, each.text), []).append(each)
        lines += ["", f"{kind.value}:"] if told else []
        for entries in told.values():
            lines += said(entries)
    if translation.violations:
        lines += ["", "Refused by ours:", *(f"  {each}" for each in translation.violations)]
    console.print(redacted("\n".join(lines)), markup=False, highlight=False, soft_wrap=True)


def said(entries: list[Entry]) -> list[str]:
    """The lines of entries of which the same is said."""
    from mcore_rl.from_verl.answer import Difference, shown

    first = entries[0]
    if first.kind is Difference.default:
        aside = f" ({first.text})" if first.text else ""
        return [f"  {first.verl}: {shown(first.value)} in verl, here {first.ours}{aside}"]
    written = [f"{each.verl}={shown(each.value)}" if each.value != "" else each.verl for each in entries]
    arrow = f" -> {first.ours}" if first.ours else ""
    return [*(f"  {each}" for each in written[:-1]), f"  {written[-1]}{arrow}", f"      {first.text}"]


def next_step(program: str, out: Path) -> str:
    """The command that takes the yaml file."""
    if program == "train":
        return f"Written: {out}.  Next: mcore-rl plan recipe={out} cluster=nvidia_h100"
    return f"Written: {out}.  Next: mcore-rl {program} --check --config-dir {out.parent} --config-name {out.stem}"
