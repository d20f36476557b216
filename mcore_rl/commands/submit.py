"""Run a recipe on a Slurm cluster: check it, write one sbatch script, and submit that.

    mcore-rl submit recipe=qwen2_7b_grpo cluster=nvidia_h100 model.path=MODEL cluster.slurm.partition=gpu
    mcore-rl submit recipe=qwen2_7b_grpo cluster=nvidia_h100 nodes=4 --dry-run      the script, no job

recipe=     by name (mcore-rl recipes lists them), or the path of a yaml file
cluster=    by name, as nvidia_h100, or the path of a yaml file; cluster.KEY=VALUE overrides what is in it, as
            cluster.slurm.time_limit=4:00:00 or cluster.container.image=IMAGE
nodes=N     the same as trainer.nnodes=N
KEY=VALUE   anything else is an override of the run, as mcore-rl train takes them

Before anything is queued: the recipe composes, is valid, finds its model and data, fits on the cluster (mcore-rl plan
shows the numbers), and Slurm takes the script.  Paths are looked up from here, unless the job runs in a container,
whose paths are its own; --check warns of what is missing.  The job saves and is queued again at its time limit, when it
is preempted and when a node dies, and goes on from its newest checkpoint.  docs/slurm.md has more.
cluster.slurm.doctor=quick examines the nodes before the run (docs/doctor.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from mcore_rl.ground.errors import refuse_if_any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("words", nargs="*", metavar="key=value", help="see above")
    parser.add_argument(
        "--check", "--dry-run", dest="dry_run", action="store_true", help="check, print the script, and submit nothing"
    )


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.families.config_json import CONFIG
    from mcore_rl.runtime.slurm_job import absent, is_known, read_job, render, submit

    errors = Console(stderr=True, emoji=False, soft_wrap=True, highlight=False)
    job = read_job(options.words, Path.cwd())
    missing = absent(job)
    refuse_if_any([] if options.dry_run else missing)
    for each in missing:
        errors.print(f"warning: {each}", markup=False)
    if not is_known(job.run):
        unknown = f"model.path={job.run.model.path} has no {CONFIG} here, and recipe.checkpoint names no checkpoint"
        errors.print(f"warning: the run is not planned: {unknown}", markup=False)
    if options.dry_run:
        sys.stdout.write(render(job))
        return 0
    number, script = submit(job)
    log = script.with_name(f"{number}.log")
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"job {number}: {job.recipe.stem} on {job.num_nodes} nodes of {job.cluster.name}", markup=False)
    console.print(f"  script  {script}\n  log     {log}\n  nodes   {script.parent}/{number}.0/NODE.log", markup=False)
    console.print(f"  watch   tail -F {log}; squeue -j {number}; it ends with scancel {number}", markup=False)
    return 0
