"""A run with keys in its environment, in its configuration, on its command line and in what its grader says.

Nothing that it writes in its directory holds one, and none of its processes but the controller and wandb's is given
one that it was not promised.  Of the same run: which ports it opens, and what it leaves in /tmp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from tests.support import listening_ports
from tests.support.private_tmp import can_have_one, in_private_tmp
from tests.support.run_task import overrides, write_task
from tests.support.skips import KERNEL

pytestmark = pytest.mark.tier("full")
SECRETS = {
    "JUDGE_API_KEY": "sk-fake-judge-2718281828",
    "WANDB_API_KEY": "fake31415926535897932384626433832795028841",  # of the length that wandb demands
    "OPENAI_API_KEY": "sk-fake-openai-1618033988",
    "AWS_SECRET_ACCESS_KEY": "fake/aws+1414213562",
    "PGPASSWORD": "fake-opensesame-1732050807",
}
REWARD = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    others = [name for name in NAMES if name in os.environ]
    assert others == ["JUDGE_API_KEY"], others
    key = os.environ["JUDGE_API_KEY"]
    if len(solution_str) % 3 == 0:
        raise ConnectionError(f"401: the key {key} is refused")
    return {"score": sum(map(ord, solution_str)) % 5 / 4, "pred": f"asked with {key}"}
""".replace("NAMES", repr(sorted(SECRETS)))


@dataclass
class Observed:
    """What was seen of a run.

    directory: of the run.  output: of its command.  environments: command line -> environment, of its processes.
    listening: (who, address) of each port.  open_to_others: what in /tmp other users could enter.
    left: names in /tmp afterwards; None: it had no /tmp of its own.
    """

    directory: Path
    output: str = ""
    environments: dict[str, bytes] = field(default_factory=dict)
    listening: set[tuple[str, str]] = field(default_factory=set)
    open_to_others: set[str] = field(default_factory=set)
    left: list[str] | None = None

    def look(self, top: psutil.Process) -> None:
        with suppress(psutil.Error):
            for process in top.children(recursive=True):
                with suppress(psutil.Error, OSError):
                    command = process.cmdline()
                    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                    of_shell = can_have_one() and process.ppid() == top.pid  # the controller, and mount, mkdir, ls
                    if command and command == process.cmdline() and not of_shell:  # else it becomes another program
                        self.environments[f"{process.pid} {' '.join(command)}"] = environment
                    self.listening |= set(listening_ports.of(process))
        if can_have_one():
            own = Path("/proc", str(top.pid), "root", "tmp")
            with suppress(OSError):
                if own.stat().st_dev == Path("/tmp").stat().st_dev:
                    return  # it is not mounted yet
                for path in own.iterdir():
                    if path.name != self.directory.parents[-3].name and path.stat().st_mode & 0o077:
                        self.open_to_others.add(path.name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Observed:
    task = write_task(tmp_path_factory.mktemp("task"))
    (task / "reward.py").write_text(REWARD)
    observed = Observed(tmp_path_factory.mktemp("run"))
    command = [sys.executable, "-m", "mcore_rl.cli", "train", *overrides(task, observed.directory)]
    command += [
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.logger=[console,wandb,tensorboard]",
        "trainer.log_val_generations=4",
        f"trainer.project_name=project-{SECRETS['OPENAI_API_KEY']}",
        "trainer.experiment_name=${oc.env:PGPASSWORD}",
        "custom_reward_function.env=[JUDGE_API_KEY]",
    ]
    output, names = observed.directory.with_name("output"), observed.directory.with_name("left")
    if can_have_one():
        command = in_private_tmp(command, tmp_path_factory.getbasetemp(), names)
    # Torch sets this one when it is imported, as it was here.
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    with output.open("wb") as file:
        top = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**inherited, **SECRETS, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
        )
        try:
            while top.poll() is None:
                observed.look(psutil.Process(top.pid))
                time.sleep(0.2)
        finally:
            top.kill()
    observed.output = output.read_text(errors="replace")
    if can_have_one():
        kept = Path(os.path.relpath(tmp_path_factory.getbasetemp(), "/tmp")).parts[0]
        observed.left = [name for name in names.read_text().split() if name != kept]
    assert top.returncode == 0, observed.output[-3000:]
    return observed


def values_in(content: bytes) -> list[str]:
    return [name for name, value in SECRETS.items() if value.encode() in content]


def test_no_file_of_the_run_directory_holds_a_value(run: Observed) -> None:
    files = [path for path in run.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "report.html", "engine-0.log"} <= names
    assert any(path.suffix == ".wandb" for path in files) and any("tfevents" in path.name for path in files)
    assert {str(path): secrets for path in files if (secrets := values_in(path.read_bytes()))} == {}


def test_what_was_written_shows_that_something_stood_there(run: Observed) -> None:
    assert "experiment_name: '***'" in (run.directory / "config.yaml").read_text()
    assert "trainer.project_name=project-***" in json.loads((run.directory / "environment.json").read_text())["command"]
    rows = pq.read_table(run.directory / "rollouts" / "step_1.parquet").to_pylist()
    assert values_in(json.dumps(rows, default=str).encode()) == []  # the file itself is compressed
    errors = {row["error"] for row in rows}
    assert "raised: ConnectionError: 401: the key *** is refused" in errors


def test_no_process_is_given_one(run: Observed) -> None:
    commands = " ".join(run.environments)
    for part in ("raylet", "gcs_server", "RolloutWorker", "TrainWorker", "mcore_rl.rewards.worker", "wandb"):
        assert part in commands, part
    for command, environment in run.environments.items():
        if "wandb" in command:
            continue
        expected = ["JUDGE_API_KEY"] if "mcore_rl.rewards.worker" in command else []
        assert values_in(environment) == expected, command


def test_the_screen_shows_none_beside_what_the_user_typed(run: Observed) -> None:
    assert values_in(run.output.encode()) == []


def test_it_opens_the_ports_that_the_docs_name(run: Observed) -> None:
    """docs/security.md says who listens where in a run on one machine; neither more nor less is seen."""
    expected = listening_ports.documented()
    assert sorted(run.listening - expected) == [], "not in the table"
    assert sorted(expected - run.listening) == [], "in the table, and not in the run"


def test_nothing_is_left_in_tmp_and_nobody_else_could_enter_what_was_there(run: Observed) -> None:
    if run.left is None:
        pytest.skip(f"{KERNEL}this user cannot mount a /tmp of its own")
    assert run.left == []
    assert run.open_to_others == set()
