"""Measure this machine or cluster, and say what is wrong before a run does.

Every check is PASS, WARN, FAIL or SKIP, with the number measured, the number expected and what to do.  Exit code 1 if
one is FAIL.  doctor.json in --out has all of it; mcore-rl plan plans with its rates: cluster.measured=doctor.json.

  mcore-rl doctor --quick                              seconds: nothing that starts engines
  mcore-rl doctor                                      this machine, with tiny runs of the whole program
  mcore-rl doctor cluster=nvidia_h100                  rates are compared with launch/clusters/nvidia_h100.yaml
  mcore-rl doctor recipe=qwen2_7b_grpo                 the recipe's own cluster, and whether the recipe fits
  mcore-rl doctor cluster=amd_mi300x cluster.inter_node_gb_s=25 --nodes 2 --address 10.0.0.1:6379
                                                       two nodes of a Ray that runs (docs/ray.md)
  mcore-rl doctor --only matmul --only "shared memory"
  mcore-rl submit ... cluster.slurm.doctor=quick       as the first step of a Slurm job

--cluster NAME and --recipe NAME say the same as cluster=NAME and recipe=NAME.  docs/doctor.md says what each check
measures, and which have been run on what.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

from mcore_rl.config.bounds import Interval, OutputDirectory, Ranks
from mcore_rl.config.engine import Device
from mcore_rl.config.options import typed

Minutes = Annotated[float, Interval("(0, 10080]")]  # a week


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    words = "recipe=, cluster=, and cluster.KEY=VALUE, which changes the cluster's yaml"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words)
    parser.add_argument("--cluster", default="", metavar="NAME", help="by name, or the path of a yaml file")
    parser.add_argument("--recipe", default="", metavar="NAME", help="by name or path: the run that is to follow")
    parser.add_argument(
        "--nodes", type=typed(Ranks), default=1, metavar="N", help="nodes to examine (default: this one)"
    )
    parser.add_argument("--address", default="", metavar="HOST:PORT", help="of the Ray that runs on them; or auto")
    parser.add_argument("--quick", action="store_true", help="leave out what starts engines or takes minutes")
    parser.add_argument(
        "--minutes", type=typed(Minutes), default=15.0, help="for all of it; what is late is SKIP (default: 15)"
    )
    parser.add_argument("--only", action="append", metavar="CHECK", help="this check alone; may be given several times")
    parser.add_argument("--list", action="store_true", help="the checks and what they need")
    parser.add_argument(
        "--device", default="", choices=[each.value for each in Device], help="instead of the cluster's, or auto"
    )
    parser.add_argument(
        "--out",
        type=typed(OutputDirectory),
        default=Path("runs/doctor"),
        metavar="DIR",
        help="of doctor.json and the logs; every node must see it (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 1 where a check failed."""
    from mcore_rl.doctor.command import run_doctor

    for word in list(options.words):
        key, _, value = word.partition("=")
        if key in ("recipe", "cluster"):
            setattr(options, key, value)
            options.words.remove(word)
    return run_doctor(options)
