"""A command, script or configuration of verl's into a yaml file of ours, and the list of what is different.

    mcore-rl from-verl run_qwen2-7b_math_megatron.sh --out my_recipes/qwen2.yaml
    mcore-rl from-verl 'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=2 ...'
    mcore-rl from-verl outputs/2026-01-05/.hydra/config.yaml --out mine.yaml
    mcore-rl plan recipe=my_recipes/qwen2.yaml cluster=nvidia_h100           then: does it fit
    mcore-rl train --check recipe=my_recipes/qwen2.yaml                      and: does it begin

SOURCE is a shell script, which is read and never run (its variables take their values from your environment, as in
NNODES=4 mcore-rl from-verl run.sh), a yaml file, a file of key=value words, a command in quotes, or - for standard
input.
Read are verl 0.4 to 0.9, with Megatron or FSDP: main_ppo becomes a recipe of train, main_generation of generate,
main_eval of evaluate.  The newest version is taken that has all keys, unless --version says another.

The list has every key that is not here, that means something else, whose default is another, or that is not needed.
Where verl's default decides what is trained and ours is another, it is written into the yaml.

Exit status: 0 our run does all that verl's does; 1 something that was asked for is not here, or was not understood, and
is left out of the yaml; 2 there is nothing to translate.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mcore_rl.config.bounds import OutputFile
from mcore_rl.config.options import typed
from mcore_rl.errors import ConfigError, Violation

if TYPE_CHECKING:
    from mcore_rl.config.verl.answer import Entry, ModelFacts
    from mcore_rl.config.verl.translate import Translation
    from mcore_rl.config.verl.written import Verl

LEFT_OUT = 1  # the exit code if something is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("source", metavar="SOURCE", help="a file, a command in quotes, or - for standard input")
    parser.add_argument(
        "--out", type=typed(OutputFile), metavar="FILE", help="the yaml file to write (default: printed)"
    )
    parser.add_argument("--version", default="", help="of verl, such as 0.6.1 (default: the newest that has all keys)")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.config.verl.facts import versions
    from mcore_rl.config.verl.translate import translate
    from mcore_rl.config.verl.yaml_text import yaml_of

    if options.version and options.version not in versions():
        remedy = f"Write one of {', '.join(versions())}"
        raise ConfigError([Violation("--version", options.version, "is no version of verl that is known", remedy)])
    verl = read(options.source, options.version)
    translation = translate(verl, model_facts(str(verl["actor_rollout_ref.model.path"] or "")))
    head = f"Made by mcore-rl from-verl of verl {verl.version}, {verl.config}."
    text = yaml_of(translation.program, translation.algorithm, translation.settings, head)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    console = Console(stderr=True)
    show(console, translation)
    if options.out:
        console.print(next_step(translation.program, options.out), markup=False, highlight=False, soft_wrap=True)
    return 0 if translation.is_whole else LEFT_OUT


def read(source: str, version: str) -> Verl:
    """verl's configuration of a file, a command, or standard input."""
    from mcore_rl.config.verl.shell import arguments
    from mcore_rl.config.verl.shell_words import UnclosedError
    from mcore_rl.config.verl.written import MAX_BYTES, of_overrides, of_tree, read_tree
    from mcore_rl.config.yaml_files import read_limited

    path = Path(source)
    is_file = "\n" not in source and len(source) < 4096 and path.is_file()
    if is_file and path.suffix in (".yaml", ".yml"):
        try:
            return of_tree(read_tree(path), version)
        except ValueError as error:
            raise _nothing(source, str(error)) from None
    text = sys.stdin.read(MAX_BYTES) if source == "-" else read_limited(path, MAX_BYTES) if is_file else source
    try:
        module, words = arguments(text, os.environ)
    except UnclosedError as error:
        raise _nothing(source, f"{error} is never closed") from None
    verl = of_overrides(module, words, version)
    if not verl.written:
        raise _nothing(source, "has neither a command of verl's nor key=value words")
    return verl


def _nothing(source: str, problem: str) -> ConfigError:
    shown = source if len(source) < 80 else f"{source[:77]}..."
    remedy = "Name a script, a yaml file, or write 'python3 -m verl.trainer.main_ppo key=value ...' in quotes"
    return ConfigError([Violation("SOURCE", shown, problem, remedy)])


def model_facts(path: str) -> ModelFacts:
    """What is known of the model at ``path``: of its config.json if it is there, else of its name."""
    from mcore_rl.config.resources import MODEL_CONFIGS
    from mcore_rl.config.verl.answer import ModelFacts
    from mcore_rl.families.checkpoints import known_checkpoints, published_config
    from mcore_rl.families.config_json import CONFIG, read_config
    from mcore_rl.families.registry import model_of

    known = known_checkpoints(MODEL_CONFIGS).values()
    name = Path(path).name.lower()
    checkpoint = next((each for each in known if name in (each.name, each.hf_id.rpartition("/")[2].lower())), None)
    alike = checkpoint or next((each for each in known if plain(each.name) == plain(name)), None)
    try:
        if (Path(path) / CONFIG).is_file():
            config = read_config(Path(path))
        elif alike is not None:
            config = published_config(alike, MODEL_CONFIGS)
        else:
            return ModelFacts()
        model = model_of(config)[1]
    except ConfigError:  # the run says what is wrong with it
        return ModelFacts()
    return ModelFacts(model.num_layers, model.moe is not None, checkpoint.name if checkpoint else "")


def plain(name: str) -> str:
    """The name of a checkpoint without what it was tuned for: its layers are those of its relatives."""
    return re.sub(r"-(?:base|instruct|chat|it)(?=-v\d|$)", "", name)


def show(console: Console, translation: Translation) -> None:
    """The list, under its headings."""
    from mcore_rl.config.verl.answer import Difference
    from mcore_rl.config.verl.facts import versions_with

    verl, lines = translation.verl, list[str]()
    known = versions_with(verl.config, verl.written)
    span = f"{known[0]} to {known[-1]}" if len(known) > 1 else "".join(known) or "no single version"
    lines.append(f"{len(verl.written)} keys of {verl.config}, which {span} has; defaults of verl {verl.version}")
    for kind in Difference:
        told: dict[tuple[str, str], list[Entry]] = {}
        for each in translation.of_kind(kind):
            told.setdefault((each.ours if kind is not Difference.default else each.verl, each.text), []).append(each)
        lines += ["", f"{kind.value}:"] if told else []
        for entries in told.values():
            lines += said(entries)
    if translation.violations:
        lines += ["", "Refused by ours:", *(f"  {each}" for each in translation.violations)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def said(entries: list[Entry]) -> list[str]:
    """The lines of entries of which the same is said."""
    from mcore_rl.config.verl.answer import Difference
    from mcore_rl.config.verl.yaml_text import shown

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
