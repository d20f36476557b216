"""How much of the token budget packing leaves unused on lengths like those of GSM8K, and how long it takes.

    python benchmarks/packing.py [--gsm8k ../shared/data/gsm8k] [--json results.json]

Lengths: where the folder with GSM8K's train.jsonl and test.jsonl is there, the characters of question and answer over
3.5, shuffled; and a log-normal with mean 230 and standard deviation 90 tokens, like a chat template, a question and a
sampled answer.  Waste is ``1 - tokens / (microbatches * budget)``.  The floor is what no packing can avoid: sequences
are given, and the last of ``ceil(tokens / budget)`` microbatches is as full as it happens to be.

Target: at most 2 % waste, or no microbatch more than ``ceil(tokens / budget)``.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl.data.packing import pack, pack_into

TARGET = 0.02
NUM_SEQUENCES = (1_024, 8_192)
BUDGETS = (4_096, 8_192, 16_384)
LARGE = 100_000
CHARACTERS_PER_TOKEN = 3.5
DEFAULT_GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Microbatches that each way needs for one set of lengths."""

    source: str
    num_sequences: int
    budget: int
    tokens: int
    packed: int
    first_fit: int
    padded: int
    spread_tokens: int

    @property
    def fewest(self) -> int:
        """No packing needs fewer microbatches."""
        return math.ceil(self.tokens / self.budget)

    def waste(self, num_microbatches: int) -> float:
        """The share of the budget of ``num_microbatches`` that holds no token."""
        return 1 - self.tokens / (num_microbatches * self.budget)

    @property
    def passed(self) -> bool:
        """Whether the target is met."""
        return self.waste(self.packed) <= TARGET or self.packed == self.fewest


def gsm8k_lengths(folder: Path) -> list[int]:
    """Approximate tokens of every question with its answer, in a fixed random order."""
    lengths = []
    for name in ("train.jsonl", "test.jsonl"):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            lengths.append(math.ceil((len(row["question"]) + len(row["answer"])) / CHARACTERS_PER_TOKEN))
    random.Random(0).shuffle(lengths)
    return lengths


def lognormal_lengths(num_sequences: int, mean: float = 230, deviation: float = 90) -> list[int]:
    """Log-normal lengths between 16 and 2,048 tokens."""
    variance = math.log(1 + (deviation / mean) ** 2)
    rng = random.Random(0)
    drawn = (rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)) for _ in range(num_sequences))
    return [min(max(round(length), 16), 2_048) for length in drawn]


def first_fit_in_order(lengths: Sequence[int], budget: int) -> int:
    """Microbatches of the usual loop: each sequence into the first one that has room."""
    rooms: list[int] = []
    for length in lengths:
        place = next((place for place, room in enumerate(rooms) if room >= length), len(rooms))
        if place == len(rooms):
            rooms.append(budget)
        rooms[place] -= length
    return len(rooms)


def padded_to_longest(lengths: Sequence[int], budget: int) -> int:
    """Microbatches of as many rows of the longest length as the budget holds."""
    return math.ceil(len(lengths) / (budget // max(lengths)))


def evaluate(source: str, lengths: Sequence[int], budget: int) -> Result:
    """One row of the table."""
    packed = pack(lengths, budget)
    loads = [sum(lengths[index] for index in members) for members in pack_into(lengths, len(packed), budget)]
    return Result(
        source=source,
        num_sequences=len(lengths),
        budget=budget,
        tokens=sum(lengths),
        packed=len(packed),
        first_fit=first_fit_in_order(lengths, budget),
        padded=padded_to_longest(lengths, budget),
        spread_tokens=max(loads) - min(loads),
    )


def result_table(results: Sequence[Result]) -> Table:
    """Waste beside the floor and the baselines."""
    table = Table(title=f"share of the token budget left unused (target: <= {TARGET:.0%}, or the floor)")
    columns = (
        "lengths",
        "sequences",
        "mean",
        "budget",
        "microbatches",
        "fewest",
        "waste",
        "floor",
        "first-fit in order",
    )
    for heading in (*columns, "padded to longest", "pack_into: spread", "verdict"):
        table.add_column(heading, justify="left" if heading == "lengths" else "right")
    for result in results:
        wastes = [result.waste(count) for count in (result.packed, result.fewest, result.first_fit, result.padded)]
        table.add_row(
            result.source,
            f"{result.num_sequences:,}",
            f"{result.tokens / result.num_sequences:.0f}",
            f"{result.budget:,}",
            str(result.packed),
            str(result.fewest),
            *(f"{waste:.2%}" for waste in wastes),
            f"{result.spread_tokens} tokens",
            "[green]pass[/green]" if result.passed else "[red]MISSED[/red]",
        )
    return table


def seconds(run: Callable[[], object]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def time_table() -> tuple[Table, dict[str, float]]:
    """Seconds for ``LARGE`` sequences: of the usual kind, and where next to nothing fits together and all stay open."""
    lengths = lognormal_lengths(LARGE)
    budget = 8_192
    halves = [1, *(budget // 2 + 1 + index % (budget // 2) for index in range(LARGE - 1))]
    count = len(pack(lengths, budget))
    times = {
        "pack": seconds(lambda: pack(lengths, budget)),
        "pack, all but one longer than half the budget": seconds(lambda: pack(halves, budget)),
        "pack_into, as few as pack needs": seconds(lambda: pack_into(lengths, count, budget)),
        "pack_into, one more": seconds(lambda: pack_into(lengths, count + 1, budget)),
    }
    table = Table(title=f"time for {LARGE:,} sequences, budget {budget:,}")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for name, value in times.items():
        table.add_row(name, f"{value:.3f}")
    return table, times


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description="waste and speed of packing")
    parser.add_argument("--gsm8k", type=Path, default=DEFAULT_GSM8K, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    sources = {"log-normal 230 ± 90": lognormal_lengths(max(NUM_SEQUENCES))}
    if options.gsm8k.is_dir():
        sources = {"GSM8K": gsm8k_lengths(options.gsm8k)} | sources
    results = [
        evaluate(source, lengths[:num_sequences], budget)
        for source, lengths in sources.items()
        for num_sequences in NUM_SEQUENCES
        for budget in BUDGETS
    ]
    console = Console(width=max(Console().width, 170))
    console.print(result_table(results))
    table, times = time_table()
    console.print(table)
    if options.json is not None:
        rows = [
            asdict(result) | {"waste": result.waste(result.packed), "floor": result.waste(result.fewest)}
            for result in results
        ]
        options.json.write_text(json.dumps({"results": rows, "seconds": times}, indent=2) + "\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
