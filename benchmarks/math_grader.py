r"""How often the math grader is right, by kind of spelling and of change, and how fast, beside math-verify's defaults.

    python benchmarks/math_grader.py [--answers 10] [--golds golds.json] [--no-library] [--json results.json]

Answers: ``--answers`` of each kind of ``tests/support/math_corpus.py``, or published ones: ``--golds`` names a JSON
file {data set: [answers as LaTeX]}, none of which comes with this project.  Each is spelled again in every way that
applies, which has to be right, and changed in every way that applies, which has to be wrong.

Targets: 99.5 % of the spellings right, 99.5 % of the changes wrong, all answers right as they are, and 20,000 scores a
second of a process where the answer is a plain number.  Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mcore_rl.config.reward import RewardConfig  # noqa: E402
from mcore_rl.rewards.math import grade_math  # noqa: E402
from mcore_rl.rewards.score import RewardRequest  # noqa: E402
from tests.support.math_corpus import Case, cases_of, golds  # noqa: E402

TARGET = 0.995
TARGET_RATE = 20_000
NUM_PLAIN = 20_000
SHOWN_MISSES = 40
Grader = Callable[[str, str], bool]


@dataclass
class Rate:
    """Of one way: how often a grader judged rightly, out of ``total``."""

    total: int = 0
    ours: int = 0
    library: int = 0


@dataclass
class Results:
    """ways: (data set, whether it has to be right, way) -> rate.  missed: misjudged by us.  *_per_s: plain numbers."""

    ways: dict[tuple[str, bool, str], Rate] = field(default_factory=lambda: defaultdict(Rate))
    missed: list[Case] = field(default_factory=list)
    ours_per_s: float = 0.0
    library_per_s: float = 0.0


def ours(response: str, gold: str) -> bool:
    """This project's grader."""
    return grade_math(RewardRequest(("p", 0), "math", response, gold), RewardConfig()).value == 1.0


def library() -> Grader:
    """math-verify as its README shows it."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def grade(response: str, gold: str) -> bool:
        return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(response)))

    return grade


def corpus(arguments: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """(data set or "own", case)."""
    if arguments.golds is None:
        for kind, gold in golds(arguments.answers):
            yield from (("own", case) for case in cases_of(kind, gold))
        return
    for name, answers in json.loads(Path(arguments.golds).read_text()).items():
        for gold in dict.fromkeys(each.strip() for each in answers):
            yield from ((name, case) for case in cases_of(name, gold))


def plain_rate(grade: Grader, count: int) -> float:
    """Scores a second of processor time, of responses that end in a plain number, half of them right."""
    random = Random(0)
    pairs = []
    for _ in range(count):
        gold = random.randint(0, 9999)
        other = random.randint(0, 9999)
        text = f"We add the terms and find $x = {other}$, so the answer is $\\boxed{{{gold if other % 2 else other}}}$."
        pairs.append((text, str(gold)))
    started = time.process_time()
    for response, gold in pairs:
        grade(response, gold)
    return count / (time.process_time() - started)


def measure(arguments: argparse.Namespace) -> Results:
    """Grades every case and measures the speed."""
    results = Results()
    other = None if arguments.no_library else library()
    results.ours_per_s = plain_rate(ours, NUM_PLAIN)
    for name, case in corpus(arguments):
        rate = results.ways[name, case.right, case.way]
        rate.total += 1
        right = ours(case.response, case.gold) == case.right
        rate.ours += right
        if not right:
            results.missed.append(case)
        if other is not None:
            rate.library += other(case.response, case.gold) == case.right
    if other is not None:
        results.library_per_s = plain_rate(other, NUM_PLAIN // 20)
    return results


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.2f}" if total else "-"


def _sum(rates: list[Rate]) -> Rate:
    return Rate(*(sum(getattr(each, name) for each in rates) for name in ("total", "ours", "library")))


def tables(results: Results) -> Iterator[Table]:
    """The table of the data sets, and that of the ways."""
    sets = Table("data set", "has to be", "graded", "ours %", "math-verify %", title="by data set")
    for name in dict.fromkeys(name for name, _, _ in results.ways):
        for what, rates in groups(results, name).items():
            rate = _sum(rates)
            sets.add_row(name, what, str(rate.total), _share(rate.ours, rate.total), _share(rate.library, rate.total))
    yield sets
    ways = Table("way", "has to be", "graded", "ours %", "math-verify %", title="by way")
    by_way: dict[tuple[bool, str], list[Rate]] = defaultdict(list)
    for (_, right, way), rate in results.ways.items():
        by_way[right, way].append(rate)
    for (right, way), rates in by_way.items():
        rate = _sum(rates)
        shares = (_share(rate.ours, rate.total), _share(rate.library, rate.total))
        ways.add_row(way, "right" if right else "wrong", str(rate.total), *shares)
    yield ways


def groups(results: Results, name: str | None = None) -> dict[str, list[Rate]]:
    """The rates of a data set, or of all, by what is promised of them."""
    grouped: dict[str, list[Rate]] = {"right as it is": [], "right": [], "wrong": []}
    for (of, right, way), rate in results.ways.items():
        if name in (None, of):
            grouped["wrong" if not right else "right as it is" if way == "as it is" else "right"].append(rate)
    return grouped


def passed(results: Results) -> bool:
    """Whether every target is met."""
    shares = {what: (rate := _sum(rates)).ours / max(1, rate.total) for what, rates in groups(results).items()}
    return (
        shares["right as it is"] == 1.0
        and min(shares["right"], shares["wrong"]) >= TARGET
        and results.ours_per_s >= TARGET_RATE
    )


def main() -> int:
    """Measure, print, and return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10, help="of each kind")
    parser.add_argument("--golds", help="a JSON file {data set: [answers]}")
    parser.add_argument("--no-library", action="store_true", help="without math-verify's defaults, which take longer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments)
    console = Console()
    for table in tables(results):
        console.print(table)
    for case in results.missed[:SHOWN_MISSES]:
        wanted = "right" if case.right else "wrong"
        console.print(f"has to be {wanted}: {case.way}: {case.gold!r}: {case.response!r}", markup=False, soft_wrap=True)
    console.print(f"plain numbers: {results.ours_per_s:,.0f} scores/s; math-verify {results.library_per_s:,.0f}")
    if arguments.json is not None:
        rows = [{"data set": n, "right": r, "way": w, **asdict(rate)} for (n, r, w), rate in results.ways.items()]
        rates = {"ours_per_s": results.ours_per_s, "library_per_s": results.library_per_s}
        arguments.json.write_text(json.dumps({"ways": rows, **rates}, indent=2) + "\n")
    return 0 if passed(results) else 1


if __name__ == "__main__":
    sys.exit(main())
