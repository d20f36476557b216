"""Does a run fit, where does each byte go, and how long is a step?  Answers in a second, without a GPU.

    mcore-rl plan recipe=mixtral_8x22b_rloo [cluster=nvidia_h200] [trainer.nnodes=16 ...]
    mcore-rl plan recipe=mixtral_8x22b_rloo --search
    mcore-rl plan recipe=qwen3_30b_a3b_grpo trainer.nnodes=16 --modes [--search] [--lengths 512 | --lengths runs/mine]
    mcore-rl plan recipe=qwen3_30b_a3b_grpo data.mean_response_length=700    [or: --lengths 700 | --lengths runs/mine]
    mcore-rl plan --config-dir my_recipes --config-name gsm8k cluster=cpu

recipe, cluster: by name (mcore-rl recipes lists them), or paths of yaml files; a cluster that is left out
is the recipe's.  cluster.KEY=VALUE changes the cluster, any other key=value the run.  The model is that of model.path
where its config.json is there (of a Hub id that alone is downloaded), else recipe.checkpoint, by name (mcore-rl models
lists them).
cluster.measured=doctor.json plans with the rates that mcore-rl doctor measured, and prints each.

--modes simulates drawing and training one after another (sync) and at the same time (one_step_off, async), with the
run's devices shared, and split between engines and trainer: a quarter, a half and three quarters of the nodes for the
engines; with --search also the splits between, towards the fastest of each mode.
Each row has the layouts of its own with which it is fastest.  "times sync" is its speed over sync on shared
devices; staleness is in versions of the weights.

Responses are data.mean_response_length tokens long on average, or as --lengths says: a mean in tokens, or the directory
of a run; else half as long as data.max_response_length.  --modes draws lognormal lengths, or the groups of that run.
A step is a range of seconds, with the measured run that it was calibrated on.

Exit status: 0 it fits, 2 it does not, or something is wrong with what was written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.bounds import InputDirectory, OutputFile, PositiveInt
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.options import typed
from mcore_rl.config.run import RunConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.planning.lengths import Lengths, Lognormal, recorded_lengths
from mcore_rl.planning.mode_tables import mode_page, mode_tables, mode_values
from mcore_rl.planning.modes import compare_modes
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import other_models, run_model
from mcore_rl.planning.search import refusal, search
from mcore_rl.planning.tables import (
    as_written,
    measured_lines,
    plan_page,
    plan_tables,
    plan_values,
    search_page,
    search_tables,
    search_values,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("words", nargs="*", metavar="key=value", help="recipe=, cluster=, and overrides")
    parser.add_argument("--config-dir", type=typed(InputDirectory), help="of yaml files of your own")
    parser.add_argument("--config-name", help="the yaml file there to begin with")
    parser.add_argument("--search", action="store_true", help="the fastest layouts that fit; with --modes, splits")
    parser.add_argument(
        "--limit", type=typed(PositiveInt), default=10, help="layouts that --search shows (default: 10)"
    )
    parser.add_argument(
        "--modes",
        action="store_true",
        help="sync and async over splits of the devices, simulated",
    )
    parser.add_argument("--lengths", metavar="MEAN|RUN", help="of responses: a mean, or those of a run")
    parser.add_argument("--html", type=typed(OutputFile), metavar="FILE", help="write a page")
    parser.add_argument("--json", type=typed(OutputFile), metavar="FILE", help="write the numbers")


def composed(options: argparse.Namespace) -> tuple[RunConfig | OfflineConfig, ClusterConfig]:
    """The run and its cluster.  Raises ConfigError where either cannot be told."""
    from mcore_rl.config.launch import load_words

    recipe = ""
    if options.config_name:
        recipe = str((options.config_dir or Path()) / f"{options.config_name}.yaml")
    run, cluster, _ = load_words(options.words, recipe=recipe)
    return run, cluster


def write(options: argparse.Namespace, page: Callable[[], str], values: Callable[[], dict[str, Any]]) -> None:
    """The files that were asked for."""
    if options.html:
        options.html.write_text(page(), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(values(), indent=2) + "\n", encoding="utf-8")


def searched(options: argparse.Namespace, run: RunConfig | OfflineConfig, cluster: ClusterConfig) -> int:
    """``--search``: the best is planned and written, whether or not the run as it stands fits."""
    if not cluster.gpus_per_node:
        problem = "searches layouts of accelerators"
        raise ConfigError([Violation("--search", "", problem, "Leave it out, or name a cluster with GPUs")])
    model = run_model(run)
    others = other_models(run)
    written = as_written(run, plan(run, model, cluster, others))
    result = search(run, model, cluster, others, limit=options.limit)
    Console().print(search_tables(result, written))
    if not result.best:
        return 2
    values = plan_values(result.best[0].plan) | {"search": search_values(result, written)}
    write(options, lambda: search_page(result, written), lambda: values)
    return 0


def with_lengths(
    options: argparse.Namespace, run: RunConfig | OfflineConfig
) -> tuple[RunConfig | OfflineConfig, Lengths | None]:
    """``run`` with the mean of ``--lengths`` in place of ``data.mean_response_length``, and these lengths.

    None where it is not given.  Raises ConfigError where it is neither a mean nor a run, or ``run`` has no responses.
    """
    if options.lengths is None:
        return run, None
    if not isinstance(run, RunConfig):
        problem = "are of responses, and fine-tuning draws none"
        raise ConfigError([Violation("--lengths", options.lengths, problem, "Leave it out")])
    lengths = lengths_of(options.lengths, run.data.max_response_length)
    mean = min(max(1, round(lengths.mean)), run.data.max_response_length)
    return replace(run, data=replace(run.data, mean_response_length=mean)), lengths


def lengths_of(written: str, longest: int) -> Lengths:
    """The lengths that ``--lengths`` names.  Raises ConfigError where they are neither a mean nor a run."""
    if not written.isdecimal():
        return recorded_lengths(Path(written))
    if not 1 <= int(written) <= longest:
        remedy = "Write a mean within it, or the directory of a run"
        raise ConfigError([Violation("--lengths", written, f"is not within 1 and {longest} tokens", remedy)])
    return Lognormal(int(written), longest)


def compared(
    options: argparse.Namespace, run: RunConfig | OfflineConfig, cluster: ClusterConfig, lengths: Lengths | None
) -> int:
    """``--modes``; 2 where no mode fits."""
    wrong = []
    if not isinstance(run, RunConfig):
        wrong.append(
            Violation("--modes", "", "compares how rollouts are drawn, and fine-tuning has none", "Leave it out")
        )
    if not cluster.gpus_per_node:
        remedy = "Leave it out, or name a cluster with GPUs"
        wrong.append(Violation("--modes", "", "searches layouts of accelerators", remedy))
    refuse_if_any(wrong)
    assert isinstance(run, RunConfig)
    others = other_models(run)
    result = compare_modes(run, run_model(run), cluster, lengths, others=others, searches=options.search)
    if not result.rows:
        raise ConfigError([Violation("--modes", "", "no layout fits: " + "; ".join(result.refused), "Take more nodes")])
    Console().print(mode_tables(result))
    title = result.best.candidate.plan.title
    write(options, lambda: mode_page(title, result), lambda: mode_values(result))
    return 0


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 2 also where nothing was found that fits."""
    planned_run, cluster = composed(options)
    planned_run, lengths = with_lengths(options, planned_run)
    for line in measured_lines(cluster):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    if options.modes:
        return compared(options, planned_run, cluster, lengths)
    if options.search:
        return searched(options, planned_run, cluster)
    model = run_model(planned_run)
    others = other_models(planned_run)
    planned = plan(planned_run, model, cluster, others)
    Console().print(plan_tables(planned))
    write(options, lambda: plan_page(planned), lambda: plan_values(planned))
    if planned.fits:
        return 0
    raise refusal(planned, planned_run, model, cluster, others)
