"""``mcore-rl doctor`` as a user runs it, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from mcore_rl.cli import main
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.launch import load_cluster
from mcore_rl.doctor.command import ALL_CHECKS
from mcore_rl.planning.overheads import CPU_PROCESS_BYTES
from mcore_rl.planning.plan import Phase, plan
from tests.planning.test_plan import cpu_run
from tests.support import models
from tests.support.run_task import nothing_left

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "doctor.md"


def test_every_check_has_a_row_in_the_page_and_a_name_of_its_own() -> None:
    names = [check.name for check in ALL_CHECKS]
    assert len(set(names)) == len(names)
    rows = {line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("|")}
    assert set(names) - rows == set()


def test_what_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "2", "--only", "matmull", "cluster.device=cpu", "device=cpu"]) == 2
    err = capsys.readouterr().err
    assert "--only=matmull: there is no such check. Did you mean matmul" in err
    assert "--nodes=2: needs a Ray cluster over the nodes" in err
    assert "cluster.device=cpu=: changes a cluster, and none is named" in err
    assert "device=cpu=: is no override" in err and "Traceback" not in err
    assert main(["doctor", "--cluster", "nvidia_h10"]) == 2
    assert "Did you mean nvidia_h100" in capsys.readouterr().err
    assert main(["doctor", "--cluster", "cpu", "cluster.cpus=2"]) == 2
    assert "cpus=2: there is no such key" in capsys.readouterr().err


def test_help_teaches_and_list_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert "mcore-rl doctor --quick" in said and "PASS, WARN, FAIL or SKIP" in said and "Exit code 1" in said
    assert main(["doctor", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{check.name}: {check.about}" in said for check in ALL_CHECKS)
    assert "run over nodes: " in said and "(needs time, nodes)" in said


def doctor(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The program's end, and what it wrote."""
    command = [sys.executable, "-m", "mcore_rl.cli", "doctor", "--out", str(out), *arguments]
    with nothing_left():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    path = out / "doctor.json"
    return done, json.loads(path.read_text()) if path.is_file() else {}


def verdicts(values: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["verdict"] for each in values["diagnoses"]}


@pytest.mark.tier("test")
def test_a_laptop_in_seconds(tmp_path: Path, processes: None) -> None:
    done, values = doctor(tmp_path / "out", "--quick")
    assert done.returncode == 0, done.stdout
    said = verdicts(values)
    its_own = {"matmul", "memory", "process memory"}  # this machine may be busy, and have other libraries
    assert all(said.pop(name) in ("PASS", "WARN") for name in its_own)
    assert {name for name, verdict in said.items() if verdict == "PASS"} == {
        "platform", "versions", "libraries", "limits", "shared memory", "interface", "all-reduce in a node",
        "all-to-all in a node",
    }  # fmt: skip
    skipped = {each["check"]: each["measured"] for each in values["diagnoses"] if each["verdict"] == "SKIP"}
    assert skipped["pinned copies"] == skipped["driver"] == "needs an accelerator"
    assert skipped["engine"] == skipped["colocated run"] == "left out by --quick"
    assert values["quick"] is True and values["rates"]["intra_node_gb_s"] > 0
    assert "doctor: matmul ..." in done.stderr, "progress, in a log too"
    assert f"cluster.measured={tmp_path}/out/doctor.json" in done.stdout.replace("\n", "")
    cluster = load_cluster("cpu", [f"measured={tmp_path}/out/doctor.json"])
    assert cluster.reached.intra_node_gb_s == values["rates"]["intra_node_gb_s"]
    changes_a_plan_by_the_difference(values["residuals"]["host_trainer_mib"], cluster)


def changes_a_plan_by_the_difference(trainer_mib: float, measured: ClusterConfig) -> None:
    """A run of one training process: that much more or less in every phase, and nothing else."""
    assert 100 < trainer_mib < 2000
    ours, assumed = (plan(cpu_run(), models.dense(), cluster) for cluster in (measured, load_cluster("cpu")))
    more = round(trainer_mib * 2**20) - CPU_PROCESS_BYTES
    phases = [phase for phase in Phase if assumed.peak(phase) is not None]
    assert phases == [Phase.rollout, Phase.logprobs, Phase.update]
    for phase in phases:
        one, other = ours.peak(phase), assumed.peak(phase)
        assert one is not None and other is not None
        assert one.num_bytes - other.num_bytes == more * cpu_run().trainer.n_gpus_per_node
        assert "processes, measured" in [row.part for row in one.rows]


@pytest.mark.tier("full")
def test_a_machine_that_is_not_what_the_yaml_says_is_a_failure(tmp_path: Path, processes: None) -> None:
    only = ["--only", "the cluster's yaml", "--only", "topology"]
    done, values = doctor(tmp_path, "--cluster", "cpu", "cluster.cpus_per_node=4000", *only)
    assert done.returncode == 1 and verdicts(values)["the cluster's yaml"] == "FAIL"
    assert "cpus_per_node=4000, and " in " ".join(done.stdout.split())
    assert "FAIL: 1 FAIL, 1 PASS, 1 SKIP: mend the cluster's yaml before you start a run" in done.stdout


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_everything_that_a_machine_without_accelerators_can_show(tmp_path: Path, processes: None) -> None:
    done, values = doctor(tmp_path)
    said = verdicts(values)
    for name in ("layers", "engine", "colocated run", "separate run", "run with a killed engine"):
        assert said[name] == "PASS", done.stdout
    lacking = {each["measured"] for each in values["diagnoses"] if each["verdict"] == "SKIP"}
    assert lacking == {
        "needs an accelerator", "Transformer Engine is not installed", "needs two nodes: --nodes N",
        "needs a cluster: --cluster NAME", "needs a run to plan: --recipe NAME",
    }  # fmt: skip
    assert done.returncode == 0
    (run,) = [each for each in values["diagnoses"] if each["check"] == "colocated run"]
    assert run["numbers"]["logprob_difference"] < 1e-3 and run["numbers"]["step_s"] > 0
    assert (tmp_path / "colocated_run" / "run" / "metrics.jsonl").is_file()


@pytest.fixture
def two_nodes(processes: None) -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "n1"})
    cluster.add_node(num_cpus=1, node_name="n2")
    yield cluster.address
    cluster.shutdown()


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_two_nodes_of_a_ray_that_is_there(two_nodes: str, tmp_path: Path) -> None:
    """Both are this machine, whose name is 127.*: the doctor must say that other nodes would not reach it."""
    only = ["matmul", "interface", "collectives between nodes", "run over nodes", "colocated run"]
    chosen = [word for name in only for word in ("--only", name)]
    done, values = doctor(tmp_path, "--nodes", "2", "--address", two_nodes, *chosen)
    rows = {(each["check"], each["node"]): each for each in values["diagnoses"]}
    assert {node for check, node in rows if check == "matmul"} == {"n1", "n2"}, "each by itself"
    assert done.returncode == 1 and {rows["interface", node]["verdict"] for node in ("n1", "n2")} == {"FAIL"}
    between = [rows[f"{kind} between nodes", ""] for kind in ("all-reduce", "all-to-all")]
    assert all(each["verdict"] == "PASS" for each in between), between
    slowest = min(next(iter(each["numbers"].values())) for each in between)
    assert values["rates"]["inter_node_gb_s"] == pytest.approx(slowest, rel=1e-3)
    assert rows["run over nodes", ""]["verdict"] == "PASS", done.stdout
    assert all(rows["colocated run", node]["verdict"] == "PASS" for node in ("n1", "n2")), "a Ray inside of Ray"
