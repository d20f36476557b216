"""docs/from_trl.ipynb runs from its first cell to its last, where an event loop runs already, as in a notebook.

Then the same run again, with a callback that ends it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tracking.jsonl import read_metrics
from tests.house.source import ROOT

NOTEBOOK = ROOT / "docs" / "from_trl.ipynb"
# Jupyter's kernel runs cells in its event loop; what it adds to Python itself (! and %) no cell uses.
KERNEL = """
import asyncio, json, sys

async def cells():
    names = {"__name__": "__main__"}
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    settings = names["settings"] | {"trainer": names["settings"]["trainer"] | {"default_local_dir": sys.argv[2]}}
    stopped = names["mcore_rl"].train(settings, callbacks=[lambda step, metrics: step == 1])
    told = [line["step"] for line in stopped.metrics]
    print("SEEN", json.dumps([names["seen"], names["result"].finished, told, stopped.finished]))

if __name__ == "__main__":
    asyncio.run(cells())
"""


def test_it_is_a_notebook_without_outputs() -> None:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["metadata"] == {}
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_every_cell_runs(tmp_path: Path, processes: None) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    command = [sys.executable, str(tmp_path / "kernel.py"), str(NOTEBOOK), str(tmp_path / "stopped")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(done.stdout.partition("SEEN ")[2].splitlines()[0]) == [[0, 1, 2, 3], True, [0, 1], False]
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step_*")] == ["step_1"]
    steps = read_metrics(tmp_path / "runs" / "from_trl" / "run" / "metrics.jsonl")[1:]
    rates = [5e-4 * (1 + math.cos(math.pi * step / 2)) for step in (0, 1)]  # after one step of warm-up
    assert [line["actor/lr"] for line in steps] == pytest.approx([1e-3, *rates], abs=1e-12)
    for line in steps:
        parts = 2.0 * line["reward/part/right"] + 0.5 * line["reward/part/brevity"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-6) and line["reward/part/brevity"] < 0
    assert "Parts of the reward" in (tmp_path / "runs" / "from_trl" / "run" / "report.html").read_text()
