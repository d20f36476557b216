"""What a weight update of every recipe moves at full size, round by round, and how long that takes by the data sheets.

    python benchmarks/rounds.py [recipe ...] [--json FILE]

Counted from the rounds that all ranks would make: bytes between nodes, beside the least that any plan could send there
(what a node wants and none of its training ranks holds, once), and the time in which the slowest rank of each round
sends and receives, at the links of the recipe's cluster, with the planner's shares of their data sheets.  Nothing is
sent.  Not in it: what a round costs besides its bytes (the planner assumes it, ``ROUND_S``), and the hand-over on the
device.  A recipe on a CPU, and fine-tuning, have no rounds.

Target: 1.00 of the least bytes between nodes.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Lines

from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.families.registry import model_of
from mcore_rl.planning.recipes import recipe_config_json
from mcore_rl.planning.timing import Rates
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.rounds import Rounds
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table

RECIPES = Path(__file__).parents[1] / "launch" / "recipes"


@dataclass(frozen=True)
class Result:
    """Of one recipe.

    ranks: training and rollout.  between_gb, over_bound: bytes between nodes, in 1e9, and over the least.  seconds: of
    all rounds.  floor_s: if every rank were busy all the time.  planning_s: to make plan and rounds, on this machine.
    """

    recipe: str
    ranks: tuple[int, int]
    rounds: int
    between_gb: float
    over_bound: float
    seconds: float
    floor_s: float
    planning_s: float


def sites_of(run: RunConfig) -> Sites:
    """As Ray would place the ranks on nodes of the recipe's size."""
    per_node = run.trainer.n_gpus_per_node
    num_rollout = run.rollout.layout.world_size
    trainers = tuple(rank // per_node for rank in range(run.trainer.world_size))
    if run.trainer.placement is Placement.colocated:
        return Sites.colocated(trainers, num_rollout)
    return Sites(trainers, tuple(run.trainer.nnodes + rank // per_node for rank in range(num_rollout)))


def least_between_nodes(rounds: Rounds) -> int:
    """Bytes of the different pieces that a node wants and that no training rank on it holds."""
    plan = rounds.plan
    sites = rounds.sites
    trainers = np.array(sites.trainers)
    rule, layer, expert = plan.source_ids.decode(plan.source)
    shard = np.array([each.source_shard for each in plan.geometries])[plan.geometry]
    kinds, of_row = np.unique(np.stack([rule, shard, layer]), axis=1, return_inverse=True)
    sets = [
        plan.replicas.sets(plan.table.rules[number], int(at), [int(where)])[0] for number, at, where in kinds.T.tolist()
    ]
    width = max(map(len, sets))
    by_kind = np.array([np.resize(each, width) for each in sets])
    on_node = np.zeros((len(plan.replicas.members), sites.num_nodes), dtype=bool)
    for number, members in enumerate(plan.replicas.members):
        on_node[number, trainers[members]] = True
    node = np.array(sites.rollout)[plan.target_rank]
    lacking = ~on_node[by_kind[of_row.reshape(-1), expert], node]
    some = np.flatnonzero(lacking[rounds.row])
    row = rounds.row[some]
    sizes = (len(plan.source_ids), int(plan.contents.max()) + 1, int(rounds.window.max()) + 1)
    key = node[row].astype(np.int64)
    columns = (plan.source[row], plan.contents[plan.geometry[row]], rounds.window[some])
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    first = np.unique(key, return_index=True)[1]
    return int(rounds.num_bytes[some[first]].sum())


def measure(name: str) -> Result | None:
    """None: the recipe updates no engine on an accelerator."""
    run = load_recipe(name, [])
    cluster = load_cluster(run.recipe.cluster, []) if run.recipe.cluster else None
    if not isinstance(run, RunConfig) or cluster is None or not cluster.gpus_per_node:
        return None
    begun = time.perf_counter()
    family, model = model_of(recipe_config_json(run))
    table = Table(family, model, run.actor.parallel, run.trainer.world_size)
    plan = plan_reshard(table, RolloutTable(family, model, run.rollout.layout), 2, sites_of(run))
    rounds = Rounds(plan, UPDATE_BUCKET_BYTES // 2)
    planning_s = time.perf_counter() - begun
    rates = Rates.of(cluster, run.trainer.n_gpus_per_node, run.actor.precision)
    nodes = rounds.sites.nodes
    far = nodes[rounds.landing] != nodes[rounds.sender]
    near = ~far & (rounds.landing != rounds.sender)
    seconds = 0.0
    floor = 0.0
    for some, rate in ((far, rates.inter), (near, rates.intra)):
        loads = np.stack([_loads(rounds, some, who) for who in (rounds.sender, rounds.landing)])
        seconds += float(loads.max(axis=(0, 2)).sum()) / rate
        floor += float(loads.sum(axis=1).max()) / rate
    between = rounds.bytes_between_nodes
    over = between / least_between_nodes(rounds) if between else 1.0
    ranks = (run.trainer.world_size, run.rollout.layout.world_size)
    return Result(name, ranks, len(rounds), between / 1e9, over, seconds, floor, planning_s)


def _loads(rounds: Rounds, some: np.ndarray, who: np.ndarray) -> np.ndarray:
    """Bytes of each (round, member)."""
    size = (len(rounds), rounds.sites.members)
    place = rounds.round[some].astype(np.int64) * size[1] + who[some]
    return np.bincount(place, weights=rounds.num_bytes[some], minlength=size[0] * size[1]).reshape(size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="of launch/recipes (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    names = arguments.recipes or sorted(path.stem for path in RECIPES.glob("*.yaml"))
    results = [result for result in map(measure, names) if result is not None]
    lines = Lines("recipe", "ranks", "rounds", "GB", "over least", "s", "all busy", "to plan")
    for each in results:
        ranks = f"{each.ranks[0]} to {each.ranks[1]}"
        figures = (each.between_gb, each.over_bound)
        times = (each.seconds, each.floor_s, each.planning_s)
        lines.add_row(
            each.recipe,
            ranks,
            str(each.rounds),
            f"{figures[0]:.1f}",
            f"{figures[1]:.2f}",
            *(f"{second:.2f}" for second in times),
        )
    Console().print(lines)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")
    return 0 if all(round(each.over_bound, 2) == 1.0 for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
