"""How long the tiers of the tests take, as multiples of a fixed piece of work of the same machine.

    python benchmarks/gate.py [check] [test] [ci] [full]

Machines of two cores differ by 2.6 times in the same tier, so minutes alone say little.  The fixed piece of work is
Python's own library, parsed and written out again by a process on each core at once; it is timed before and after the
tiers, and its mean is the unit.  Each tier is the make target that people type, in a set-up environment.

For each: minutes, processor seconds of the whole machine (run it with nothing else), and how many units both are.
Without a name: check and test.  Exits with 1 where a tier fails.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"check": "check", "test": "test", "ci": "test-ci", "full": "test-full"}
ROUNDS = 2


@dataclass(frozen=True)
class Taken:
    """Seconds on the clock, seconds of all processors, and pytest's closing words."""

    wall_s: float
    busy_s: float
    said: str = ""
    passed: bool = True


def busy_s() -> float:
    """Processor seconds of the whole machine since it started, without those in which nothing ran."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def parse_the_library(_: int) -> None:
    """Parse and write out the modules at the top of Python's own library."""
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        ast.unparse(ast.parse(path.read_bytes()))


def fixed_work() -> Taken:
    """What the fixed piece of work takes, on every core at once."""
    cores = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(int, range(cores), chunksize=1)  # so that all have started
        clock = time.perf_counter()
        busy = busy_s()
        pool.map(parse_the_library, range(cores * ROUNDS), chunksize=1)
        return Taken(time.perf_counter() - clock, busy_s() - busy)


def run_tier(name: str) -> Taken:
    """What ``make`` of a tier takes.  Its output goes where ours does."""
    clock = time.perf_counter()
    busy = busy_s()
    tests = subprocess.Popen(["make", TARGETS[name]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    closing = []
    for line in tests.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if match := re.search(r"=+ (.*\d+ passed.*?) in \d", line):
            closing.append(match[1])
    passed = tests.wait() == 0
    return Taken(time.perf_counter() - clock, busy_s() - busy, "; then ".join(closing), passed)


def main() -> int:
    """Measure, and print a row for each tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=f"one of {', '.join(TARGETS)}")
    tiers = parser.parse_args().tiers or ["check", "test"]
    if unknown := [name for name in tiers if name not in TARGETS]:
        parser.error(f"there is no tier {unknown[0]}: choose of {', '.join(TARGETS)}")
    before = fixed_work()
    taken = {name: run_tier(name) for name in tiers}
    after = fixed_work()
    unit = (before.wall_s + after.wall_s) / 2
    print(f"\n{os.cpu_count()} cores; the fixed work: {before.wall_s:.1f} s before, {after.wall_s:.1f} s after")
    print(f"{'tier':8}{'minutes':>9}{'units':>8}{'cpu min':>9}{'busy':>7}  tests")
    for name, tier in taken.items():
        share = tier.busy_s / tier.wall_s / (os.cpu_count() or 1)
        units = f"{tier.wall_s / 60:9.1f}{tier.wall_s / unit:8.1f}{tier.busy_s / 60:9.1f}{share:7.0%}"
        print(f"{name:8}{units}  {tier.said}{'' if tier.passed else '  FAILED'}")
    return 0 if all(tier.passed for tier in taken.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
