"""Convert a checkpoint from Hugging Face to Megatron or back, or say what one holds.

    mcore-rl convert to-megatron --hf Qwen2.5-7B-Instruct --out Qwen2.5-7B-megatron
    mcore-rl convert to-hf --megatron Qwen2.5-7B-megatron --out Qwen2.5-7B-again
    mcore-rl convert to-hf --run runs/gsm8k/checkpoints/step_100 --out gsm8k-100
    mcore-rl convert to-hf --run runs/gsm8k/checkpoints/step_100 --out gsm8k-100 --push-to-hub OWNER/NAME --private
    mcore-rl convert dequantise --hf gpt-oss-20b --out gpt-oss-20b-bf16
    mcore-rl convert merge --hf Qwen2.5-7B-Instruct --adapter my-lora --out merged
    mcore-rl convert extract --run runs/lora/checkpoints/step_100 --out my-lora
    mcore-rl convert inspect Qwen2.5-7B-megatron

Every tensor that was written is read back and held against the source by a checksum before the output gets its name;
until then, and when anything goes wrong, it is called OUT.incomplete.  Sources are only read.  docs/checkpoints.md
says more.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from mcore_rl.config.bounds import InputDirectory, InputModel, InputTokenizer, OutputDirectory
from mcore_rl.config.options import typed
from mcore_rl.config.parallel import parse_layout
from mcore_rl.families.config_changes import add_change_options, changed_directory, changes_asked
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import unread_fields
from mcore_rl.ground.errors import ConfigError, Violation

if TYPE_CHECKING:
    from mcore_rl.checkpoints.convert import Converted
    from mcore_rl.hub.push import Target

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CARD = "README.md"
SPELT = {"parallel.": "--layout "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.set_defaults(spelt=SPELT)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="to-megatron | to-hf | dequantise | merge | extract | inspect"
    )
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    changes = argparse.ArgumentParser(add_help=False, parents=[debug])
    add_change_options(changes)
    write = argparse.ArgumentParser(add_help=False, parents=[changes])
    write.add_argument(
        "--out", type=typed(OutputDirectory), required=True, help="the directory to make; it must not be there yet"
    )
    cast = "dtype to write; by default each tensor keeps its own (FP8 becomes bf16)"
    write.add_argument("--dtype", choices=list(DTYPES), help=cast)

    made = commands.add_parser("to-megatron", parents=[write], help="write a megatron-core distributed checkpoint")
    made.add_argument(
        "--hf", type=typed(InputModel), required=True, help="directory with config.json and *.safetensors, or a Hub id"
    )
    layout = "cut the files for this layout, as tp=2,ep=2: it then loads fastest; every other layout loads them too"
    made.add_argument("--layout", type=typed(parse_layout), default="", help=layout)

    back = commands.add_parser("to-hf", parents=[write], help="write sharded safetensors, config and tokenizer")
    megatron = "directory with .metadata and *.distcp, saved by this tool, by megatron-core, Megatron-LM or -Bridge"
    source = back.add_mutually_exclusive_group(required=True)
    source.add_argument("--megatron", type=typed(InputDirectory), help=megatron)
    run = "a checkpoint of a run, RUN/checkpoints/step_N, or a role in it; --dtype fp32 gives its main weights"
    source.add_argument("--run", type=typed(InputDirectory), help=run)
    config = "directory or Hub id with the model's config.json and tokenizer; not needed for what to-megatron wrote"
    base = "of a run with adapters: the model to merge them with, if it is no longer where the run read it"
    back.add_argument("--base", type=typed(InputModel), help=base)
    back.add_argument("--config", type=typed(InputTokenizer), help=config)
    push = "then upload it, with a model card, as this repository of the Hub; the token is HF_TOKEN or hf auth login's"
    back.add_argument("--push-to-hub", metavar="OWNER/NAME", help=push)
    back.add_argument("--private", action="store_true", help="a repository that is made for it is private")

    plain = commands.add_parser("dequantise", parents=[write], help="write an fp8 or mxfp4 checkpoint in bf16")
    plain.add_argument("--hf", type=typed(InputModel), required=True, help="the model, a directory or a Hub id")

    _add_adapters(commands, write, debug)

    look = commands.add_parser("inspect", parents=[changes], help="say what a checkpoint of either kind holds")
    look.add_argument("directory", type=typed(InputModel), metavar="DIR")
    look.add_argument("--config", type=typed(InputTokenizer), help=config)


def _add_adapters(commands: Any, write: argparse.ArgumentParser, debug: argparse.ArgumentParser) -> None:
    """The commands ``merge`` and ``extract``."""
    merging = commands.add_parser("merge", parents=[write], help="merge a model with adapters that PEFT saved")
    merging.add_argument("--hf", type=typed(InputModel), required=True, help="the model, a directory or a Hub id")
    adapter = "directory with adapter_config.json and adapter_model.safetensors"
    merging.add_argument("--adapter", type=typed(InputDirectory), required=True, help=adapter)

    extracting = commands.add_parser("extract", parents=[debug], help="write a run's adapters as PEFT does")
    run = "RUN/checkpoints/step_N of a run with adapters, or a role in it"
    extracting.add_argument("--run", type=typed(InputDirectory), required=True, help=run)
    extracting.add_argument("--out", type=typed(OutputDirectory), required=True, help="the directory to make")


class Bars:
    """A bar for each stage of the work, with bytes and GB/s."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:>12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def report(self, stage: str, num_bytes: int, total: int) -> None:
        """``num_bytes`` more of ``total`` are done in ``stage``."""
        if stage not in self._tasks:
            self._tasks[stage] = self.progress.add_task(stage, total=total)
        self.progress.advance(self._tasks[stage], num_bytes)


def change_config(arguments: argparse.Namespace, stack: ExitStack, console: Console) -> None:
    """Name a view with the changed config.json, which ``stack`` removes, instead of the directory that has the file.

    Raises ConfigError where there is something to change and no directory is named that has config.json.
    """
    if arguments.command == "extract":
        return
    option = "hf" if arguments.command in ("to-megatron", "dequantise", "merge") else "config"
    if arguments.command == "inspect" and arguments.config is None:
        option = "directory"
    source = getattr(arguments, option)
    changes = changes_asked(arguments)
    if changes and source is None:
        remedy = "Name the directory of the config.json with --config DIR"
        raise ConfigError([Violation("--config-override", "...", "there is no --config that it could change", remedy)])
    if changes:
        console.print(f"config.json: {changes.describe(read_config(source))}", markup=False, highlight=False)
        source = changed_directory(source, changes, stack)
        setattr(arguments, option, source)
    if source is not None and (source / CONFIG).is_file() and (unread := unread_fields(read_config(source))):
        said = f"config.json: nobody reads {', '.join(unread)}; it changes nothing"
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def convert(arguments: argparse.Namespace, console: Console) -> Converted:
    """Do what the command line says, behind bars."""
    import torch  # when all is checked

    from mcore_rl.checkpoints.convert import dequantise, extract, merge, to_hf, to_megatron

    if arguments.command == "extract":
        return extract(arguments.run, arguments.out)
    bars = Bars(console)
    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
    with bars.progress:
        if arguments.command == "to-megatron":
            return to_megatron(arguments.hf, arguments.out, parallel=arguments.layout, dtype=dtype, report=bars.report)
        if arguments.command == "dequantise":
            return dequantise(arguments.hf, arguments.out, dtype=dtype, report=bars.report)
        if arguments.command == "merge":
            return merge(arguments.hf, arguments.adapter, arguments.out, dtype=dtype, report=bars.report)
        source = arguments.run or arguments.megatron
        return to_hf(
            source, arguments.out, config=arguments.config, base=arguments.base, dtype=dtype, report=bars.report
        )


def show_contents(directory: Path, config: Path | None, console: Console) -> None:
    """A table of what ``directory`` holds."""
    from mcore_rl.checkpoints.contents import inspect

    contents = inspect(directory, config)
    table = Table("", str(directory), show_edge=False)
    table.add_row("kind", contents.kind)
    table.add_row("family", contents.family)
    table.add_row("layers", str(contents.num_layers))
    table.add_row("experts per layer", str(contents.num_experts) if contents.num_experts else "none")
    table.add_row("parameters", f"{contents.num_parameters:,}")
    table.add_row("dtype", ", ".join(f"{name} ({size / 1e9:.3f} GB)" for name, size in contents.dtypes.items()))
    table.add_row("bytes", f"{contents.num_bytes:,} ({contents.num_bytes / 1e9:.3f} GB)")
    table.add_row("tensors", f"{contents.num_tensors:,} in {contents.num_files:,} files")
    table.add_row("other entries", f"{contents.num_others:,}")
    for note in contents.notes:
        table.add_row("", note)
    console.print(table)


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 0 when the output was verified and has its name, or was shown."""
    console = Console()
    errors = Console(stderr=True, emoji=False, soft_wrap=True)
    started = time.perf_counter()
    try:
        with ExitStack() as stack:
            change_config(options, stack, errors)
            if options.command == "inspect":
                show_contents(options.directory, options.config, console)
                return 0
            goal = _goal(options)
            done = convert(options, errors)
    except KeyboardInterrupt as interrupt:
        left = options.out.with_name(options.out.name + ".incomplete") if "out" in options else None
        kept = f" What was written is in {left}: remove it before the next try." if left and left.exists() else ""
        interrupt.add_note(f"Interrupted: nothing has the final name.{kept}")
        raise
    seconds = time.perf_counter() - started
    size = done.num_bytes / 1e9
    verified = f"verified {done.num_tensors:,} tensors, {done.num_bytes:,} bytes, by checksum against the source"
    console.print(f"{done.directory}: {done.family}; {verified}", soft_wrap=True, highlight=False)
    console.print(f"{size:.3f} GB in {seconds:.1f} s ({size / seconds:.2f} GB/s with verification)", highlight=False)
    if goal is not None:
        from mcore_rl.tracking.model_card import model_card

        card = model_card(goal.name, options.run or options.megatron)
        (done.directory / CARD).write_text(card, encoding="utf-8")
        left = f"{done.directory} is complete; {goal.by_hand(done.directory)}"
        console.print(goal.push(done.directory, left), soft_wrap=True, highlight=False)
    return 0


def _goal(options: argparse.Namespace) -> Target | None:
    """The repository to write to, once somebody is logged in.  Raises ConfigError before anything is converted."""
    if options.command != "to-hf" or (options.push_to_hub is None and not options.private):
        return None
    if options.push_to_hub is None:
        raise ConfigError([Violation("--private", "", "says nothing without --push-to-hub", "Write OWNER/NAME there")])
    from mcore_rl.hub.push import target

    goal = target(options.push_to_hub, private=options.private)
    goal.demand_login()
    return goal
