"""Jobs on a real Slurm of three nodes: told to leave, preempted, robbed of a node, and whole in the end.

The tiny task of ``tests/support/run_task.py`` runs over two nodes, one training process on each.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import psutil
import pytest

from tests.support.run_task import write_task
from tests.support.skips import NOT_INSTALLED
from tests.support.slurm_cluster import NoSlurm, SlurmCluster, SlurmJob, processes_with, slurm_cluster, suppressed

STEPS = "trainer.total_training_steps=3"
LEAST_LEFT_S = 50  # for a step, a checkpoint and the end of Ray, on a busy machine
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[SlurmCluster]:
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    except NoSlurm as error:
        pytest.skip(f"{NOT_INSTALLED}Slurm: {error}")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def assert_complete(job: SlurmJob, restarts: int, steps: int = 3) -> None:
    """It goes on and ends well, after ``restarts``, with every step told of once, and nothing of it is left."""
    job.go_on()
    facts = job.finish()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert int(facts["Restarts"]) == restarts, job.log
    assert job.steps() == list(range(1, steps + 1))
    assert (job.run / "checkpoints" / f"step_{steps}" / "manifest.json").is_file()
    assert "the run is complete" in job.log
    assert job.left() == []


@pytest.mark.tier("test")
def test_a_run_over_two_nodes_ends_well(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    """The one job of the tier `test`: a node with a low limit, and a model that is copied to the nodes first."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    shutil.copytree(task / "model", model)
    staged = [f"model.path={model}", f"cluster.slurm.stage_model={disk}"]
    resource.prlimit(slurm.daemon("n2"), resource.RLIMIT_NOFILE, (LOW, LOW))  # for good: only privilege raises it
    with few_open_files(1024):  # srun hands on what sbatch found
        job = slurm.start(task, tmp_path / "run", "trainer.total_training_steps=2", *staged)
    job.until(lambda: job.log.count(f"{disk}/mcore-rl-{job.id}-model") == 2)  # one of them made it: a disk for both
    (model / "model.safetensors").write_bytes(b"whoever reads this now fails")
    job.until(job.steps)
    assert sorted(job.hosts()) == ["n1", "n2"], "one training process on each node"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert open_files_of_ray(job) == {"n1": min(most, 65536), "n2": LOW}
    assert_complete(job, restarts=0, steps=2)
    assert re.search(rf"n2 \([^)]*\): a process may have {LOW:,} files open, and 65,536 were asked for", job.log)
    logs = job.run / "logs" / "slurm" / f"{job.id}.0"
    assert "Ray runtime started" in (logs / "n2.log").read_text()
    identity = json.loads((job.run / "checkpoints" / "step_2" / "run.json").read_text())
    assert identity["config"]["model"]["path"] == str(model), "who the run is does not depend on where it ran"
    assert list(disk.iterdir()) == []


LOW = 8192


@contextmanager
def few_open_files(soft: int) -> Iterator[None]:
    """Within: this process, and what it starts, may have so many files open, and may raise that again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_files_of_ray(job: SlurmJob) -> dict[str, int]:
    """node -> that its raylet may have open."""
    limits = {}
    for each in processes_with("SLURM_JOB_ID", job.id):
        with suppressed():
            if each.name() == "raylet":
                limits[each.environ()["SLURMD_NODENAME"]] = resource.prlimit(each.pid, resource.RLIMIT_NOFILE)[0]
    return limits


@pytest.mark.tier("full")
def test_every_node_is_examined_before_ray_starts_and_an_ill_one_ends_the_job(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    more = ["cluster.slurm.doctor=nodes", "cluster.host_memory_gib=9999"]
    job = slurm.start(task, tmp_path / "run", *more)
    facts = job.finish()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0"), job.log
    assert "no run was started on n1 n2: mend what the doctor calls FAIL" in job.log
    assert job.log.count("host_memory_gib=9999, and the node has ") == 2, "each node's own table"
    assert not (job.run / "logs" / "slurm" / f"{job.id}.0" / "n1.log").exists() and "Ray runs on all" not in job.log
    assert job.left() == []


@pytest.mark.tier("full")
def test_a_run_on_nodes_that_are_well_leaves_the_copy_that_it_is_told_to_keep(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "my disks"
    keep = [f"cluster.slurm.stage_model='{disk}'", "cluster.slurm.keep_staged=true", "cluster.slurm.doctor=nodes"]
    job = slurm.start(task, tmp_path / "run", "trainer.total_training_steps=1", *keep)
    assert_complete(job, restarts=0, steps=1)
    for node in ("n1", "n2"):
        values = json.loads((job.run / "doctor" / node / "doctor.json").read_text())
        assert values["num_nodes"] == 1 and "FAIL" not in {each["verdict"] for each in values["diagnoses"]}
    (copy,) = disk.iterdir()
    assert {each.name: each.read_bytes() for each in copy.iterdir()} == {
        each.name: each.read_bytes() for each in (task / "model").iterdir()
    }


@pytest.mark.tier("full")
def test_copies_that_not_all_nodes_could_make_are_removed_and_the_job_ends(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    (tmp_path / "n2").touch()
    job = slurm.start(task, tmp_path / "run", f"cluster.slurm.stage_model='{tmp_path}/$SLURMD_NODENAME'")
    facts = job.finish()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0"), job.log
    assert f"n2: error: 1 problem in the configuration:\n  - cluster.slurm.stage_model={tmp_path}/n2: " in job.log
    assert "no run was started: the model could not be copied to every node" in job.log
    assert list((tmp_path / "n1").iterdir()) == [] and "Ray runs on all" not in job.log
    (tmp_path / "n2").unlink()
    job = slurm.start(task, tmp_path / "again", f"cluster.slurm.stage_model='{tmp_path}/$SLURMD_NODENAME'")
    assert job.finish()["ExitCode"] == "2:0"
    assert "/$SLURMD_NODENAME is not one folder on all nodes: " in job.log
    assert [*(tmp_path / "n1").iterdir(), *(tmp_path / "n2").iterdir()] == []


@pytest.mark.tier("full")
def test_a_run_leaves_at_its_time_limit_is_queued_again_and_goes_on(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    job = slurm.start(task, tmp_path / "run", STEPS)
    job.until(job.steps)
    assert sorted(job.hosts()) == ["n1", "n2"], "one training process on each node"
    hours, minutes, seconds = (int(each) for each in job.facts()["RunTime"].rpartition("-")[2].split(":"))
    job.allow(hours * 60 + minutes + ceil((seconds + LEAST_LEFT_S) / 60))  # about the grace period of 100 s, or less
    job.until(lambda: "queued again; it goes on from" in job.log)
    assert "left after step" in job.log and "on SIGUSR1" in job.log and "with exit code 75" in job.log
    job.until(lambda: job.state == "PENDING" or job.attempted(1))
    job.allow(50)
    assert_complete(job, restarts=1)
    for attempt in (0, 1):
        logs = job.run / "logs" / "slurm" / f"{job.id}.{attempt}"
        assert {"n1.log", "n2.log"} <= {path.name for path in logs.iterdir()}
        assert "Ray runtime started" in (logs / "n2.log").read_text()


@pytest.mark.tier("full")
def test_the_doctor_examines_both_nodes_before_the_run(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    """The nodes of this Slurm have addresses of 127.*, which is what the doctor must call FAIL: no run begins."""
    job = slurm.start(task, tmp_path / "run", "cluster.slurm.doctor=quick")
    facts = job.finish()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0"), job.log
    assert "no run was started: mend what the doctor calls FAIL" in job.log and job.steps() == []
    values = json.loads((job.run / "doctor" / "doctor.json").read_text())
    failed = {each["check"] for each in values["diagnoses"] if each["verdict"] == "FAIL"}
    assert failed == {"interface"}, values
    assert {each["node"] for each in values["diagnoses"] if each["check"] == "interface"} == {"n1", "n2"}
    assert values["num_nodes"] == 2 and values["rates"]["inter_node_gb_s"] > 0, "over both, all the same"
    assert job.left() == []


def test_what_slurm_would_refuse_is_refused_before_anything_is_queued(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    done = slurm.submit(task, tmp_path / "run", "cluster.slurm.partition=gpus")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Slurm refuses it: invalid partition specified: gpus" in done.stderr
    assert "the partitions are main (3 nodes, 1:00:00), low (3 nodes, 1:00:00)" in done.stderr
    done = slurm.submit(task, tmp_path / "run", nodes=4)
    assert done.returncode == 2 and "Requested node configuration is not available" in done.stderr
    assert slurm.command("squeue", "--noheader", "--states=PENDING") == ""


def test_addresses_that_no_other_node_reaches_end_the_job_at_once(
    slurm: SlurmCluster, task: Path, tmp_path: Path
) -> None:
    """The loopback's, and one of an interface that is not there."""
    for interface, said in {
        "lo": "error: n1 is at 127.0.0.1, which no other node reaches. Write cluster.slurm.interface=NAME",
        "ib7": "error: n1 has no IPv4 address on ib7. Write cluster.slurm.interface=NAME",
    }.items():
        job = slurm.start(task, tmp_path / interface, f"cluster.slurm.interface={interface}")
        facts = job.finish()
        assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0")
        assert said in job.log and job.left() == []


@pytest.mark.tier("full")
def test_nodes_meet_on_the_interface_that_is_asked_for(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    addresses = {name: [each.address for each in all_of if each.family == socket.AF_INET]
                 for name, all_of in psutil.net_if_addrs().items() if name != "lo"}  # fmt: skip
    name, address = next((name, of_it[0]) for name, of_it in addresses.items() if of_it)
    job = slurm.start(task, tmp_path / "run", "trainer.total_training_steps=1", f"cluster.slurm.interface={name}")
    assert_complete(job, restarts=0, steps=1)
    assert f"Ray runs on all of 2 nodes, at {address}:" in job.log


@pytest.mark.tier("full")
def test_a_port_in_use_is_named_with_its_node(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as held:
        port = held.getsockname()[1]
        job = slurm.start(task, tmp_path / "run", f"cluster.slurm.port={port}")
        facts = job.finish()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0")
    assert f"cannot start Ray's head at 127.0.0.2:{port}: Address already in use. See who listens" in job.log
    assert "n1 (" in job.log and job.left() == []


@pytest.mark.tier("full")
def test_a_preempted_run_saves_makes_room_and_goes_on(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    job = slurm.start(task, tmp_path / "run", STEPS, "cluster.slurm.partition=low")
    job.until(job.steps)
    slurm.command("sbatch", "--partition=main", "--nodes=3", f"--output={tmp_path}/other", "--wrap", "sleep 1")
    job.until(lambda: "queued again; it goes on from" in job.log)
    assert "on SIGTERM" in job.log
    assert_complete(job, restarts=1)


@pytest.mark.tier("full")
def test_a_run_goes_on_without_a_node_that_was_lost(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    job = slurm.start(task, tmp_path / "run", STEPS, "trainer.save_freq=1")
    job.until(lambda: (job.run / "checkpoints" / "step_1").is_dir())
    slurm.lose("n2")
    (left,) = Path("/tmp").glob(f"mcore-rl-{job.id}-n2-*")  # nobody is left there to do it
    shutil.rmtree(left)
    try:
        assert_complete(job, restarts=1)
        assert "on n1 n3" in job.log
    finally:
        slurm.bring_back("n2")


@pytest.mark.tier("full")
def test_a_run_whose_ray_dies_on_one_node_begins_again(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    job = slurm.start(task, tmp_path / "run", STEPS, "trainer.save_freq=1")
    job.until(lambda: (job.run / "checkpoints" / "step_1").is_dir())
    for each in processes_with("SLURM_JOB_ID", job.id):
        with suppressed():
            if each.name() == "raylet" and each.environ()["SLURMD_NODENAME"] == "n2":
                each.kill()
    assert_complete(job, restarts=1)
    assert "Ray ended on a node before the run did" in job.log


@pytest.mark.tier("full")
def test_a_run_that_is_cancelled_saves_and_is_not_queued_again(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    job = slurm.start(task, tmp_path / "run", STEPS)
    job.until(job.steps)
    slurm.command("scancel", job.id)
    assert job.finish()["JobState"] == "CANCELLED"
    assert job.left() == []
    assert not job.attempted(1)
