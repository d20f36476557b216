"""How large the report of a long run is, how long it takes to write, and how long a browser takes to open it.

    python benchmarks/report.py [--steps 10000] [--keep DIR] [--json results.json]

The run: ``--steps`` steps of 60 metrics and six reward parts, a timeline, 64 rollouts of up to 6,000 characters every
25th step, and a validation of 200 prompts every 100th.  Chromium opens the page from its file, once to warm the disk's
cache and then three times; the time is its own, from the start of the navigation to the end of the load event.

Targets: below 3 MB, and open within 2 s.  Exits with 1 where one is missed; without Chromium only the size is judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mcore_rl.tracking.clock import TIMELINE, TimelineFile  # noqa: E402
from mcore_rl.tracking.report import write_report  # noqa: E402
from mcore_rl.tracking.report_server import LivePage  # noqa: E402
from mcore_rl.tracking.samples import write_samples  # noqa: E402
from tests.support.browser import CHROMIUM, browser  # noqa: E402
from tests.tracking.recorded_run import metrics_of, spans_of, validation_rows  # noqa: E402

MOST_MB = 3.0
MOST_S = 2.0
PARTS = ("format", "answer", "length", "language", "tags", "tools")
OTHERS = 36  # further metrics, so that there are as many as a run with a critic and a mixture of experts has
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def rollouts(step: int, noise: Random) -> list[dict[str, object]]:
    """64 samples, eight of each prompt."""
    rows = []
    for k in range(64):
        score = noise.random()
        rows.append(
            {
                "step": step,
                "data_source": "mathematics",
                "prompt_id": f"p{step}.{k // 8}",
                "prompt": f"Question {step}.{k // 8}: " + "how many are there? " * 20,
                "response": "and so it follows, " * noise.randrange(5, 316),
                "score": score,
                "correct": score > 0.5,
                "ground_truth": str(k),
                "num_tokens": noise.randrange(20, 1500),
                "finish": "stop",
                "error": None,
            }
        )
    return rows


def long_run(path: Path, steps: int) -> Path:
    """A run of that many steps, with numbers that are made up."""
    noise = Random(0)
    path.mkdir(parents=True)
    timeline = TimelineFile(path / TIMELINE, -1)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            metrics = metrics_of(step, steps, noise)
            metrics |= {f"reward/part/{name}": noise.random() for name in PARTS}
            metrics |= {f"router/statistic_{k}": noise.gauss(k, 1) for k in range(OTHERS)}
            file.write(json.dumps({"step": step} | metrics) + "\n")
            timeline.write(step, spans_of(metrics))
            if step % 25 == 0:
                write_samples(path, step, "rollouts", rollouts(step, noise))
            if step % 100 == 0:
                write_samples(path, step, "validation", validation_rows(step, steps))
    timeline.close()
    (path / "environment.json").write_text(json.dumps({"total_steps": steps}))
    return path


def measured(path: Path) -> dict[str, float]:
    """Megabytes and seconds of the page of the run in ``path``."""
    start = time.perf_counter()
    page = write_report(path)
    results = {"write_s": time.perf_counter() - start, "size_mb": page.stat().st_size / 1e6}
    live = LivePage(path)
    live.get()
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    start = time.perf_counter()
    live.get()
    results["live_s"] = time.perf_counter() - start
    if CHROMIUM is not None:
        opened = []
        with browser() as chromium:
            for _ in range(4):
                chromium.open(page.as_uri())
                opened.append(chromium.until(LOADED) / 1000)
        results["open_s"] = median(opened[1:])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="make the run here, and leave it")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measured(long_run(options.keep or Path(folder) / "run", options.steps))
    if options.json:
        options.json.write_text(json.dumps(results))
    shown = Table(f"the report of {options.steps:,} steps", "", "target", box=None)
    shown.add_row("size", f"{results['size_mb']:.2f} MB", f"{MOST_MB:g}")
    shown.add_row("opened by Chromium in", f"{results['open_s']:.2f} s" if CHROMIUM else "no Chromium", f"{MOST_S:g}")
    shown.add_row("written in", f"{results['write_s']:.1f} s", "")
    shown.add_row("made anew for a live page in", f"{results['live_s']:.1f} s", "")
    Console().print(shown)
    return int(results["size_mb"] > MOST_MB or results.get("open_s", 0.0) > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
