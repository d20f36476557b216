"""What dynamic context parallelism could bring at most, by the planner's rates, beside what the balance brings already.

    python benchmarks/dynamic_cp.py [--cluster nvidia_h100] [--devices 64] [--sequences 1024] [--room 16384]

Context parallelism is one number for a run: as many ranks as the longest response needs.  A dynamic one gives each
sequence as many ranks as itself needs (Megatron-core 0.19's hybrid context parallelism; ByteScale, arXiv:2502.21231),
so that short ones are not cut, and their keys and values not gathered.  Counted is an update of a step: forward and
backward, by the FLOP and the bytes that ``planning.timing`` counts, on Qwen2.5-7B with tp=2.

in order: data ranks get sequences as they come.  balanced: as ``data.balance`` gives them, by their cost.
dynamic: its bound, with all work spread perfectly and without a wait for anybody.  Neither counts that kernels of short
pieces reach less, nor what groups of changing sizes cost.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config.engine import Precision
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.model import ModelConfig
from mcore_rl.data.balance import balance, workload
from mcore_rl.families.flops import forward_flops
from mcore_rl.planning.recipes import recipe_model
from mcore_rl.planning.timing import Rates, compute_flops_rate

RECIPE = "qwen2_7b_grpo"
TP = 2
BYTES = 2
PASSES = 3  # forward, and backward twice; keys and values are gathered twice and their gradients scattered once


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of sequences, in tokens; longer ones are cut off at ``longest``."""

    name: str
    mean: float
    sigma: float
    longest: int

    def drawn(self, count: int) -> list[int]:
        """The lengths of one step, the same in every run."""
        rng = random.Random(0)
        middle = math.log(self.mean) - self.sigma**2 / 2
        return [min(self.longest, max(64, round(rng.lognormvariate(middle, self.sigma)))) for _ in range(count)]


CASES = (
    Lengths("GSM8K", 400, 0.4, 2_048),
    Lengths("DAPO, 20k", 4_000, 0.9, 20_480),
    Lengths("reasoning, 32k", 8_000, 0.9, 32_768),
    Lengths("agents, 64k", 12_000, 1.0, 65_536),
    Lengths("agents, 128k", 16_000, 1.2, 131_072),
)


def ranks_for(length: int, room: int) -> int:
    """The context ranks that a sequence needs, a power of two.  room: tokens of a microbatch on a rank."""
    return 1 << max(0, math.ceil(math.log2(length / room)))


def sequence_s(model: ModelConfig, rates: Rates, length: int, cp: int) -> tuple[float, float]:
    """Seconds that a sequence takes on ``cp`` ranks, times ``cp``: (of computing, of gathering keys and values)."""
    compute = PASSES * forward_flops(model, [length]) / TP / compute_flops_rate(model, rates)
    width = 2 * BYTES * model.num_query_groups / TP * model.head_dim * cp
    gather = PASSES * length * rates.ring(width, cp, TP) * model.num_attention_layers
    return compute, gather


def slowest_s(costs: Sequence[float], shares: Sequence[Sequence[int]], cp: int) -> float:
    """Seconds until the last data rank is done.  costs: of each sequence, times ``cp``."""
    return max(sum(costs[index] for index in share) for share in shares) / cp


def row(case: Lengths, model: ModelConfig, rates: Rates, given: argparse.Namespace) -> list[str]:
    lengths = case.drawn(given.sequences)
    units = given.devices // TP
    cp = ranks_for(case.longest, given.room)
    dp = units // cp
    each = [sequence_s(model, rates, length, cp) for length in lengths]
    costs = [compute + gather for compute, gather in each]
    in_order = slowest_s(costs, [range(rank, len(lengths), dp) for rank in range(dp)], cp)
    balanced = slowest_s(costs, balance(workload(lengths, model.hidden_size), dp), cp)
    own = [sum(sequence_s(model, rates, length, ranks_for(length, given.room))) for length in lengths]
    gathering = sum(gather for _, gather in each) / sum(costs)
    dynamic = sum(own) / units
    values = (in_order, balanced, dynamic)
    return [
        case.name,
        str(cp),
        *(f"{value:.1f}" for value in values),
        f"{gathering:.1%}",
        f"{in_order / balanced:.2f}",
        f"{balanced / dynamic:.2f}",
    ]


def main() -> int:
    """Prints the table of docs/performance.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="nvidia_h100")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=1_024)
    parser.add_argument("--room", type=int, default=16_384, help="tokens of a microbatch on a context rank")
    given = parser.parse_args()
    cluster = load_cluster(given.cluster)
    rates = Rates.of(cluster, cluster.gpus_per_node, Precision.bfloat16)
    model = recipe_model(load_recipe(RECIPE))
    print("| lengths | cp | in order, s | balanced, s | dynamic, s | gathering | balance brings | dynamic at most |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        print("| " + " | ".join(row(case, model, rates, given)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
