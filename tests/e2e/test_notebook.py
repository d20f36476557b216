"""docs/from_trl.ipynb runs from its first cell to its last, where an event loop runs already, and its model learns.

Then the same run again, with a callback that ends it, and from there on.
"""

from __future__ import annotations

import json
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
            exec(compile("".join(cell["source"]), f"cell {len(names)}", "exec"), names)
    shown = names["result"]._repr_html_()
    settings = names["settings"]
    settings["trainer"] |= {"default_local_dir": sys.argv[2], "total_training_steps": 2, "test_freq": 0}
    given = {name: names[name] for name in ("model", "dataset")} | {"reward": names["different_words"]} | settings
    given["custom_reward_function"] = {}
    train = names["mcore_rl"].train
    ends = [train(**given, callbacks=[lambda step, metrics: step == 1]).finished]
    exec("def different_words(completions, **columns):" + FUNCTION, names)  # the cell run again
    ends.append(train(**given | {"reward": names["different_words"]}).finished)
    print("SEEN", json.dumps([names["seen"], names["result"].finished, ends, "Reward" in shown]))

if __name__ == "__main__":
    asyncio.run(cells())
"""


def test_it_is_a_notebook_without_outputs() -> None:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["metadata"] == {}
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def source_of(name: str) -> str:
    """What follows the signature of a function of the notebook."""
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (body,) = ("".join(each["source"]).partition(f"def {name}(completions, **columns):")[2] for each in cells
               if f"def {name}" in "".join(each["source"]))  # fmt: skip
    return body.partition("\n\n\n")[0]


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_every_cell_runs_and_the_model_learns(tmp_path: Path, processes: None) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL.replace("FUNCTION", repr(source_of("different_words"))))
    command = [sys.executable, str(tmp_path / "kernel.py"), str(NOTEBOOK), str(tmp_path / "stopped")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [*range(21)]
    assert json.loads(done.stdout.partition("SEEN ")[2].splitlines()[0]) == [steps, True, [False, True], True]
    assert "goes on from" in done.stdout + done.stderr
    lines = read_metrics(tmp_path / "runs" / "from_trl" / "metrics.jsonl")
    assert lines[-1]["val/dataset/reward"] > lines[0]["val/dataset/reward"] + 0.4
    for line in lines[1:]:
        parts = line["reward/part/late_letters"] + 0.2 * line["reward/part/different_words"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-6)
    assert lines[-1]["reward/part/late_letters"] > 0.8 > 0.5 > lines[1]["reward/part/late_letters"]
    assert "Parts of the reward" in (tmp_path / "runs" / "from_trl" / "report.html").read_text()
    assert (tmp_path / "runs" / "from_trl" / "hf" / "final" / "model.safetensors").is_file()
