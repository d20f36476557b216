"""Rehearse one rank of a run at full size, without its machine: memory, communication, operations, waits.

    mcore-rl rehearse recipe=mixtral_8x22b_rloo [rank=0] [cluster=nvidia_h200] [trainer.nnodes=16 ...]
    mcore-rl rehearse recipe=qwen25_05b_ppo role=critic out=critic.json page=critic.html

The engine, its optimizer and the pipeline's schedule build, score and train two steps on tensors without data, in about
half a minute and half a gigabyte.  recipe, cluster and overrides: as for mcore-rl plan.  rank: 0 where left out.
role: one of the trained ones; all, one after another, where left out.  out: a JSON file.  page: an HTML file with the
memory over time.  docs/rehearsal.md says what it shows, and what it cannot see.

Exit status: 0; 2 if something is wrong with what was written.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from mcore_rl.config.files import output_problem
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.planning.overheads import GIB
from mcore_rl.planning.recipes import other_models, run_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="recipe=, rank=, role=, out=, page=, and overrides"
    )
    parser.add_argument("--check", action="store_true", help="plan the rank, and build nothing")


def rank_of(text: str) -> int:
    """The rank that was written."""
    if not re.fullmatch("[0-9]{1,6}", text):
        raise ConfigError([Violation("rank", text, "is no number of a rank", "Write rank=0, say")])
    return int(text)


def rehearsed(words: Sequence[str], console: Console, progress: Console, *, check: bool) -> None:
    """Rehearse, print, and write the files that were asked for; or only check that this can be done."""
    from mcore_rl.config.launch import load_words

    run, cluster, named = load_words(words, "rank", "role", "out", "page")
    places = ((key, output_problem(named[key])) for key in ("out", "page") if key in named)
    refuse_if_any([Violation(key, named[key], *problem) for key, problem in places if problem])
    model = run_model(run)
    others = other_models(run)
    rank = rank_of(named.get("rank", "0"))
    from mcore_rl.rehearsal.part import part_of, trained_roles
    from mcore_rl.rehearsal.rank import rehearse
    from mcore_rl.rehearsal.report import rehearsal_page, rehearsal_tables, rehearsal_values

    results = []
    for role in trained_roles(run, named.get("role", "")):
        part, planned = part_of(run, model, cluster, role, rank, others)
        if check:
            progress.print(f"{role.name}: rank {rank} is planned with {planned.peak / GIB:.1f} GiB; nothing was built")
            continue
        result = rehearse(part, partial(_tell, progress, role.name))
        console.print(rehearsal_tables(result, planned), soft_wrap=False)
        results.append((result, planned))
    if check:
        return
    title = run.recipe.title or run.trainer.experiment_name
    if "out" in named:
        values = {"title": title, "roles": [rehearsal_values(*each) for each in results]}
        Path(named["out"]).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if "page" in named:
        Path(named["page"]).write_text(rehearsal_page(title, results), encoding="utf-8")


def _tell(progress: Console, role: str, doing: str) -> None:
    progress.print(f"{role}: {doing} ...")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    warnings.simplefilter("ignore")  # Megatron's, of kernels that are not there
    rehearsed(options.words, Console(), Console(stderr=True, emoji=False), check=options.check)
    return 0
