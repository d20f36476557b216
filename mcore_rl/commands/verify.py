"""Prove, without a GPU, that a model's weights go right: Hugging Face to Megatron to vLLM, under given layouts.

    mcore-rl verify recipe=mixtral_8x22b_rloo
    mcore-rl verify --model mixtral-8x22b --layout tp=8,pp=4,ep=8 --rollout tp=8
    mcore-rl verify --hf Qwen2.5-7B-Instruct --layout tp=2,pp=2 --rollout tp=4,dp=2 --json
    mcore-rl verify --model deepseek-v3 --preset h200_141gb
    mcore-rl verify --mutate

Builds the Megatron modules of every rank on the meta device at full size.  At reduced size and in the same layouts it
numbers every element of a checkpoint, and demands that each is where a statement written by hand says for Megatron,
and where vLLM's own load puts it; of a recipe with LoRA, the adapters' elements too.  docs/weights.md says what that
proves.  --mutate makes every wrong table that is one rule away from a right one, and demands that each is found, of
adapters too.  Exits with 0 where everything is proven, 1 where something fails, 2 on a mistake of the command line.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Lines

from mcore_rl.config.bounds import InputModel, Ranks
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.options import typed
from mcore_rl.config.parallel import ParallelConfig, parse_layers, parse_layout
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout, rollout_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.config_changes import add_change_options, changes_asked
from mcore_rl.families.config_json import read_config
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.parallel.layout import Layout, layout_text, layout_violations
from mcore_rl.planning.recipes import run_config_json
from mcore_rl.weights.rollout_adapters import published_form
from mcore_rl.weights.table import Table

if TYPE_CHECKING:
    from mcore_rl.proofs.verify import ProofReport

MAX_SHOWN = 20
TINY = "tiny-{}"  # the small model of a family in model_configs/
SPELT = {"parallel.pipeline_layers": "--pipeline-layers", "parallel.": "--layout ", "rollout.": "--rollout "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.set_defaults(spelt=SPELT)
    words = "recipe=NAME and overrides: its model, layouts and processes"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words)
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", help="by name (mcore-rl models lists them), its published config.json; nothing is downloaded"
    )
    model.add_argument(
        "--hf",
        type=typed(InputModel),
        help="a directory with config.json and *.safetensors, or a Hub id, whose tensors are held too",
    )
    model.add_argument(
        "--mutate",
        nargs="?",
        const="all",
        metavar="FAMILY",
        help="the mutation score of a family (all): survivors must be 0",
    )
    parser.add_argument("--layout", type=typed(parse_layout), default="", help="of training, as tp=8,pp=4,ep=8")
    chunks = "layers of each of the pp*vpp chunks, as 16,15,15,15"
    parser.add_argument("--pipeline-layers", type=typed(parse_layers), help=chunks)
    parser.add_argument("--world-size", type=typed(Ranks), help="training processes; by default one replica")
    rollout = "of vLLM, as tp=8,dp=4,ep=8; without it nothing is proven of the reshard"
    parser.add_argument("--rollout", type=typed(parse_rollout_layout), help=rollout)
    parser.add_argument("--preset", help="layouts and processes of the model's preset instead, as h100_80gb")
    add_change_options(parser)
    pictures = "of a vision-language model prove the whole, with its vision tower; else its text part"
    parser.add_argument("--pictures", action="store_true", help=pictures)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--check", action="store_true", help="see that the layouts suit the model, and prove nothing")


@dataclass(frozen=True)
class Asked:
    """What is to be proven.

    config: of Hugging Face.  rollout: None, and nothing is proven of the reshard.  lora: in which form the engines get
    adapters; None: none are trained.  pictures: with the vision tower.
    """

    config: Mapping[str, Any]
    parallel: ParallelConfig
    world_size: int
    rollout: RolloutLayout | None
    lora: PublishedLora | None = None
    pictures: bool = False


def demand_one_subject(arguments: argparse.Namespace) -> None:
    """Raises ConfigError unless either a recipe is named or a model."""
    named = any(each is not None for each in (arguments.model, arguments.hf, arguments.mutate))
    if bool(arguments.words) == named:
        problem = "names a second model" if named else "is not given"
        remedy = "Write one of recipe=NAME, --model NAME, --hf DIR, --mutate"
        raise ConfigError([Violation("recipe", " ".join(arguments.words), problem, remedy)])


def asked_for(arguments: argparse.Namespace) -> Asked:
    """What the command line asks for, of a recipe or of a model."""
    if not arguments.words:
        return Asked(wanted_config(arguments), *read_layouts(arguments), pictures=arguments.pictures)
    from mcore_rl.config.launch import load_words

    run, _, _ = load_words(arguments.words)
    rollout = run.rollout.layout if isinstance(run, RunConfig) else None
    config = changes_asked(arguments).apply(run_config_json(run))
    form = run.rollout.published_lora if isinstance(run, RunConfig) else PublishedLora.merged
    pictures = arguments.pictures or run.sees_pictures
    family, model = model_of(config, pictures=pictures)
    lora = published_form(run.actor.lora, form, Table(family, model)) if run.actor.lora.rank else None
    return Asked(config, run.actor.parallel, run.trainer.world_size, rollout, lora, pictures)


def wanted_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The Hugging Face configuration that was asked for, with what is changed of it."""
    if arguments.model is not None:
        config = published_config(find_checkpoint(arguments.model, MODEL_CONFIGS), MODEL_CONFIGS)
    else:
        config = read_config(arguments.hf)
    return changes_asked(arguments).apply(config)


def read_layouts(arguments: argparse.Namespace) -> tuple[ParallelConfig, int, RolloutLayout | None]:
    """(training layout, training processes, rollout layout) that were asked for."""
    if arguments.preset is not None:
        presets = find_checkpoint(arguments.model, MODEL_CONFIGS).presets if arguments.model else {}
        if arguments.preset not in presets:
            problem = "is no preset of it"
            remedy = f"Write one of {', '.join(presets)}, or --layout and --rollout"
            raise ConfigError([Violation("preset", arguments.preset, problem, remedy)])
        preset = presets[arguments.preset]
        return preset.training, preset.num_gpus, preset.rollout
    parallel = replace(arguments.layout, pipeline_layers=arguments.pipeline_layers)
    replica = lcm(parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp)
    return parallel, arguments.world_size or replica, arguments.rollout


def demand_suited(
    config: Mapping[str, Any],
    parallel: ParallelConfig,
    world_size: int,
    rollout: RolloutLayout | None,
    *,
    pictures: bool,
) -> tuple[Family, ModelConfig]:
    """The family and the model of ``config``.  Raises ConfigError where a layout does not suit it."""
    family, model = model_of(config, pictures=pictures)
    violations = layout_violations(model, parallel, world_size)
    refuse_if_any(violations + (rollout_violations(model, rollout) if rollout else []))
    return family, model


def prove(
    config: Mapping[str, Any],
    parallel: ParallelConfig,
    world_size: int,
    rollout: RolloutLayout | None,
    hf: Path | None,
    console: Console,
    lora: PublishedLora | None = None,
    *,
    pictures: bool = False,
) -> tuple[ProofReport, ModelConfig]:
    """The report at full and at reduced size.  Raises ConfigError where a layout does not fit."""
    family, model = demand_suited(config, parallel, world_size, rollout, pictures=pictures)
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # what Megatron would like to be installed
        from mcore_rl.checkpoints.published import open_weights  # torch and Megatron, when all is checked
        from mcore_rl.proofs.prove import ProofSubject, prove
        from mcore_rl.rollout.vllm.oracle import VllmProcess
        from mcore_rl.training.meta import meta_rank

        vllm = stack.enter_context(VllmProcess())
        subject = ProofSubject(
            config=config,
            family=family,
            parallel=parallel,
            world_size=world_size,
            rollout=rollout,
            megatron=meta_rank,
            vllm=vllm.placements,
            adapted=lora is not None,
            applied=vllm.adapter_placements if lora is PublishedLora.adapter else None,
        )
        status = stack.enter_context(console.status("..."))
        checkpoint = open_weights(hf, pictures=pictures) if hf else None
        return prove(subject, checkpoint=checkpoint, notice=status.update), model


def mutate(name: str, arguments: argparse.Namespace, console: Console) -> int:
    """Print the mutation score of family ``name``, or of all; return the exit code."""
    if name != "all" and name not in FAMILIES:
        remedy = f"Write one of {', '.join(FAMILIES)}, or nothing for all"
        raise ConfigError([Violation("mutate", name, "is no family", remedy)])
    names = list(FAMILIES) if name == "all" else [name]
    configs = [
        published_config(find_checkpoint(TINY.format(each.replace("_", "-")), MODEL_CONFIGS), MODEL_CONFIGS)
        for each in names
    ]
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        from mcore_rl.proofs.adapter_mutation import adapter_score
        from mcore_rl.proofs.mutation import MutantVerdict, family_score
        from mcore_rl.rollout.vllm.oracle import VllmProcess
        from mcore_rl.training.meta import meta_rank

        vllm = stack.enter_context(VllmProcess())
        scores = [
            score
            for config in configs
            for score in (
                family_score(config, meta_rank, vllm.placements),
                adapter_score(config, meta_rank, vllm.adapter_placements),
            )
        ]
    if arguments.json:
        json.dump([score.as_json() for score in scores], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        lines = Lines("family", "table", "mutants", "FAILED", "change nothing", "survived", box=None, pad_edge=False)
        for score in scores:
            for table, counts in score.counts.items():
                numbers = (
                    counts[each] for each in (MutantVerdict.failed, MutantVerdict.unchanged, MutantVerdict.survived)
                )
                lines.add_row(score.family, table, str(counts.total()), *map(str, numbers))
        console.print(lines)
        for reason, count in sum((score.reasons for score in scores), start=Counter[str]()).most_common():
            console.print(f"{count} change nothing: {reason}", markup=False, highlight=False, soft_wrap=True)
    problems = [problem for score in scores for problem in score.failures]
    problems += [f"{score.family}: {each.mutant}: {each.why}" for score in scores for each in score.survived]
    for problem in [] if arguments.json else problems:
        console.print(f"[red]FAILED[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    return 1 if problems else 0


def show(report: ProofReport, model: ModelConfig, parallel: ParallelConfig, console: Console) -> None:
    """The verdict, to read."""
    layout = Layout.of(parallel, report.world_size)
    console.print(
        f"{report.family}, {model.num_layers} layers: training on {report.world_size} ranks as "
        f"dp={layout.dp},{layout_text(parallel)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if report.rollout:
        console.print(f"rollout as {report.rollout}", highlight=False)
    lines = Lines("", "proven", "found", "s", box=None, pad_edge=False)
    for one in report.checks:
        mark = "[red]FAILED[/red]" if one.failures else "[green]ok[/green]"
        lines.add_row(mark, one.proves, one.found, f"{one.seconds:.1f}")
    console.print(lines)
    if report.traffic:
        sent = report.traffic
        gib = 2**30
        console.print(
            f"reshard: {sent.total / gib:,.2f} GiB, {sent.over_bound:.2f} of the least; a training rank sends "
            f"{sent.sent_mean / gib:.2f} GiB, at most {sent.sent_max / gib:.2f}; a rollout rank receives "
            f"{sent.received_mean / gib:.2f}, at most {sent.received_max / gib:.2f}",
            highlight=False,
            soft_wrap=True,
        )
    for one in report.checks:
        for failure in one.failures[:MAX_SHOWN]:
            console.print(f"[red]FAILED[/red] {escape(failure)}", highlight=False, soft_wrap=True)
        if len(one.failures) > MAX_SHOWN:
            console.print(f"and {len(one.failures) - MAX_SHOWN} more of: {one.proves}", highlight=False)
    verdict = "[green]PROVEN[/green]" if report.proven else "[red]NOT PROVEN[/red]"
    console.print(f"{verdict} in {report.seconds:.1f} s", highlight=False)


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 0 where all is proven, else 1."""
    console = Console()
    demand_one_subject(options)
    if options.mutate is not None:
        return mutate(options.mutate, options, console)
    asked = asked_for(options)
    if options.check:
        demand_suited(asked.config, asked.parallel, asked.world_size, asked.rollout, pictures=asked.pictures)
        console.print("the layouts suit the model. Nothing was proven", highlight=False)
        return 0
    report, model = prove(
        asked.config,
        asked.parallel,
        asked.world_size,
        asked.rollout,
        options.hf,
        Console(stderr=True, emoji=False),
        asked.lora,
        pictures=asked.pictures,
    )
    if options.json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(report, model, asked.parallel, console)
    return 0 if report.proven else 1
