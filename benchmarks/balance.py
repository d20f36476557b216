"""How even data-parallel ranks are after balancing, and how long that takes, beside verl's way.

    python benchmarks/balance.py [--gsm8k ../shared/data/gsm8k] [--json results.json]

Lengths: as in benchmarks/packing.py, GSM8K's where the folder is there, and a log-normal with mean 230 and standard
deviation 90 tokens.  Balance is the largest total of a rank over the mean.  verl's way is Karmarkar and Karp's largest
differencing method (1982) with equal counts, as verl balances batches, written again here; it needs counts that divide.

Targets: at most 1.02 with 8 or more sequences a rank, and at most 1 s for 100,000 sequences over 1,024 ranks.  Exits
with 1 where one is missed.  With fewer sequences a rank, the lengths themselves may leave nothing to balance with.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packing import DEFAULT_GSM8K, gsm8k_lengths, lognormal_lengths  # stands beside this file
from rich.console import Console
from rich.table import Table

from mcore_rl.data.balance import balance, imbalance

TARGET = 1.02
TARGET_S = 1.0
LARGE = (100_000, 1_024)
CASES = ((128, 16), (1_024, 8), (1_024, 64), (1_024, 128), (1_024, 256), (8_192, 64), (8_192, 1_024), LARGE)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One set of lengths over one number of ranks; ``verl`` is None where the count does not divide."""

    source: str
    num_sequences: int
    num_ranks: int
    ours: float
    ours_s: float
    any_count: float
    any_count_s: float
    verl: float | None
    verl_s: float | None
    in_order: float

    @property
    def passed(self) -> bool | None:
        """None where nothing is promised."""
        fast = (self.num_sequences, self.num_ranks) != LARGE or self.ours_s <= TARGET_S
        return fast and self.ours <= TARGET if self.num_sequences >= 8 * self.num_ranks else None


def karmarkar_karp(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Largest differencing: the two partial solutions with the widest spread are joined, heavy sets with light ones."""
    ascending = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    states = []
    for start in range(0, len(costs), num_ranks):
        sets = [(costs[index], [index]) for index in ascending[start : start + num_ranks]]
        states.append((sets[0][0] - sets[-1][0], start, sets[::-1]))  # minus the spread; sets from heavy to light
    heapq.heapify(states)
    while len(states) > 1:
        (_, _, one), (_, number, other) = heapq.heappop(states), heapq.heappop(states)
        joined = [(a + b, ours + theirs) for (a, ours), (b, theirs) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda pair: -pair[0])
        heapq.heappush(states, (joined[-1][0] - joined[0][0], number, joined))
    return [indices for _, indices in states[0][2]]


def seconds(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """The best of three, and what came out."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        shards = run()
        times.append(time.perf_counter() - start)
    return min(times), shards


def evaluate(source: str, lengths: Sequence[int], num_ranks: int) -> Result:
    """One row of the table."""
    ours_s, ours = seconds(lambda: balance(lengths, num_ranks))
    any_count_s, any_count = seconds(lambda: balance(lengths, num_ranks, equal_size=False))
    verl_s = None
    verl = None
    if len(lengths) % num_ranks == 0:
        verl_s, shards = seconds(lambda: karmarkar_karp(lengths, num_ranks))
        verl = imbalance(lengths, shards)
    bounds = [len(lengths) * rank // num_ranks for rank in range(num_ranks + 1)]
    in_order = [range(bounds[rank], bounds[rank + 1]) for rank in range(num_ranks)]
    return Result(
        source=source,
        num_sequences=len(lengths),
        num_ranks=num_ranks,
        ours=imbalance(lengths, ours),
        ours_s=ours_s,
        any_count=imbalance(lengths, any_count),
        any_count_s=any_count_s,
        verl=verl,
        verl_s=verl_s,
        in_order=imbalance(lengths, in_order),
    )


def result_table(results: Sequence[Result]) -> Table:
    table = Table(
        title=f"largest total over the mean (targets: <= {TARGET}, {LARGE[0]:,} sequences in {TARGET_S:.0f} s)"
    )
    for heading in (
        "lengths",
        "sequences",
        "ranks",
        "balance",
        "s",
        "any count",
        "s",
        "verl",
        "s",
        "in order",
        "verdict",
    ):
        table.add_column(heading, justify="left" if heading == "lengths" else "right")
    for result in results:
        table.add_row(
            result.source,
            f"{result.num_sequences:,}",
            f"{result.num_ranks:,}",
            f"{result.ours:.4f}",
            f"{result.ours_s:.3f}",
            f"{result.any_count:.4f}",
            f"{result.any_count_s:.3f}",
            "" if result.verl is None else f"{result.verl:.4f}",
            "" if result.verl_s is None else f"{result.verl_s:.3f}",
            f"{result.in_order:.2f}",
            {True: "[green]pass[/green]", False: "[red]MISSED[/red]", None: ""}[result.passed],
        )
    return table


def main() -> int:
    """Exit status: 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="balance over data-parallel ranks, and its speed")
    parser.add_argument("--gsm8k", type=Path, default=DEFAULT_GSM8K, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    sources = {"log-normal 230 ± 90": lognormal_lengths(LARGE[0])}
    if options.gsm8k.is_dir():
        gsm8k = gsm8k_lengths(options.gsm8k)
        sources = {"GSM8K": (gsm8k * (LARGE[0] // len(gsm8k) + 1))[: LARGE[0]]} | sources
    results = [
        evaluate(source, lengths[:num_sequences], num_ranks)
        for source, lengths in sources.items()
        for num_sequences, num_ranks in CASES
    ]
    Console(width=max(Console().width, 130)).print(result_table(results))
    if options.json is not None:
        rows = [asdict(result) | {"passed": result.passed} for result in results]
        options.json.write_text(json.dumps({"results": rows}, indent=2) + "\n")
    return 0 if all(result.passed is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
