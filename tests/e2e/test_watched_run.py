"""A run from the command line that pushes to a Hub and is asked by Prometheus; a Hub that refuses changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load

from mcore_rl.tracking.jsonl import read_metrics
from tests.support.hub_server import TOKEN, HubServer, hub_server
from tests.support.run_task import SPEED, overrides, write_task
from tests.tracking.test_prometheus_sink import free_port

pytestmark = [pytest.mark.timeout(1500), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]
STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={STEPS}", "trainer.test_freq=1", "trainer.val_before_train=false",
    "rollout.val_kwargs.temperature=1.0",
)  # fmt: skip


def served(port: int) -> dict[str, float]:
    """The samples that a run serves, by their names; {} where nobody listens."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {each.name: each.value for family in families for each in family.samples}
    return {}


def watched(task: Path, hub: HubServer, name: str) -> tuple[Path, str, dict[str, float]]:
    """(directory, what was said, the last samples that it served) of a run that pushes to ``NAME/tuned``."""
    directory, port = task.parent / name, free_port()
    more = [*SETTINGS, f"trainer.push_to_hub={name}/tuned", f"trainer.prometheus.port={port}"]
    environment = os.environ | hub.environment(str(task.parent / "hf_home"), HF_TOKEN=TOKEN)
    log = task.parent / f"{name}.log"
    last: dict[str, float] = {}
    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.cli", "train", *overrides(task, directory, *more)],
            cwd=task.parent, env=environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while run.poll() is None:
            last = served(port) or last
            time.sleep(0.2)
    assert run.returncode == 0, log.read_text()[-4000:]
    return directory, log.read_text(), last


def test_a_run_that_is_watched_pushes_its_best_and_its_last(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    with hub_server() as hub:
        directory, said, last = watched(task, hub, "team")
        refused, told, _ = watched(task, hub, "closed")
    repo, lines = hub.repos["models/team/tuned"], read_metrics(directory / "metrics.jsonl")
    assert repo.private and repo.files["model.safetensors"] == (directory / "hf/final/model.safetensors").read_bytes()
    assert repo.of("best")["model.safetensors"] == (directory / "hf/best/model.safetensors").read_bytes()
    assert load(repo.files["model.safetensors"]) and b"# tuned" in repo.files["README.md"]
    scores = [line["val/arithmetic/reward"] for line in lines]
    best = 1 + scores.index(max(scores))
    assert f"pushed: step {best}, the best: {hub.url}/team/tuned/commit/{repo.heads['best']}" in said
    assert f"pushed: step {STEPS}, the last: {hub.url}/team/tuned/commit/{repo.head}" in said

    step = round(last["mcore_rl_step"])
    assert step > 0 and last["mcore_rl_total_steps"] == STEPS
    assert last["mcore_rl_reward_mean"] == lines[step - 1]["reward/mean"]
    assert last["mcore_rl_val_reward"] == lines[step - 1]["val/arithmetic/reward"]

    assert (
        f"not pushed: step {STEPS}, the last; upload it with: hf upload closed/tuned {refused / 'hf/final'} --private"
        in told
    )
    assert "does not let you write there (403)" in told
    same = [{key: value for key, value in line.items() if not key.startswith((*SPEED, "rollout/"))} for line in lines]
    for ours, theirs in zip(same, read_metrics(refused / "metrics.jsonl"), strict=True):
        assert ours == {key: theirs[key] for key in ours}, "a Hub that refuses changes nothing"
    for path in (path for run in (directory, refused) for path in run.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in said + told and "model.safetensors: " not in said, "no bars of the client's"
