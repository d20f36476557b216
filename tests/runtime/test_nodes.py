"""What is said of nodes that cannot run together, and who has not come."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from mcore_rl.runtime.nodes import (
    Facts,
    NodesError,
    limit_warnings,
    main,
    node_problems,
    read_facts,
    shell_lines,
    wait_for,
)

MARKER = Path("/run/here")
GOOD = Facts(
    node="n1",
    host="n1.cluster",
    version="1",
    python="3.11.7",
    num_cores=96,
    num_devices=8,
    device_name="AMD Instinct MI300X",
    driver="6.12.12",
)
NODES = ["n1", "n2", "n3"]
ALIKE = [replace(GOOD, node=node, host=f"{node}.cluster") for node in NODES]


def problems(*facts: Facts, gpus: int = 8) -> list[str]:
    return node_problems(facts, NODES, gpus, MARKER)


def test_nodes_that_are_alike_pass() -> None:
    assert problems(*ALIKE) == []


def test_every_node_that_is_wrong_is_named_with_its_remedy() -> None:
    fewer = replace(ALIKE[1], num_devices=7)
    assert problems(ALIKE[0], fewer, ALIKE[2]) == [
        "n2 has 7 accelerators, and 8 were asked for. "
        "Mend cluster.gpus_per_node, or leave it out with cluster.slurm.extra=[--exclude=n2]"
    ]
    (driver,) = problems(ALIKE[0], ALIKE[1], replace(ALIKE[2], driver="6.10.5"))
    assert driver.startswith("n3 has driver 6.10.5, and others have 6.12.12. Make them alike, or leave it out with ")
    (model,) = problems(replace(ALIKE[0], device_name="AMD Instinct MI250X"), *ALIKE[1:])
    assert model.startswith("n1 has accelerator AMD Instinct MI250X, and others have AMD Instinct MI300X")
    (absent,) = problems(*ALIKE[:2])
    assert absent.startswith("n3 did not answer. Look at it with scontrol show node n3")
    (blind,) = problems(*ALIKE[:2], replace(ALIKE[2], sees_run=False))
    assert blind.startswith("n3 does not see the run directory: there is no /run/here. Write a trainer.default_local")
    (taken,) = problems(replace(ALIKE[0], port_taken="10.0.0.1:6379: Address already in use"), *ALIKE[1:])
    assert taken.startswith("n1 cannot start Ray's head at 10.0.0.1:6379: Address already in use. See who listens")


def test_all_problems_are_told_at_once_and_a_broken_node_only_once() -> None:
    broken = Facts(node="n2", host="elsewhere", error="device=rocm: torch 2.13.0 is built for cpu")
    told = problems(replace(ALIKE[0], num_devices=4), broken, replace(ALIKE[2], python="3.12.1", version="2"))
    assert [each.partition(" ")[0] for each in told] == ["n1", "n2", "n3", "n3"]
    assert told[1] == "n2 (elsewhere): device=rocm: torch 2.13.0 is built for cpu"


def test_limits_that_are_too_low_are_told_with_who_can_raise_them() -> None:
    assert limit_warnings([replace(each, open_files=65536) for each in ALIKE], 65536) == []
    assert limit_warnings(ALIKE, 65536) == [], "no limit at all"
    locked = replace(ALIKE[1], locked_bytes=64 * 2**20)
    (told,) = limit_warnings([ALIKE[0], locked], 65536)
    assert told.startswith("n2: a process may lock 64 MiB of memory. Collectives over InfiniBand and RoCE fail at it")
    assert told.endswith("administrators raise (LimitMEMLOCK=infinity in slurmd.service)")
    assert limit_warnings([locked], 65536) == [], "one node sends nothing over a network"
    assert limit_warnings([replace(each, num_devices=0, locked_bytes=1) for each in ALIKE], 65536) == []
    (told,) = limit_warnings([ALIKE[0], replace(ALIKE[2], open_files=4096)], 65536)
    assert told.startswith("n3: a process may have 4,096 files open, and 65,536 were asked for")
    assert "LimitNOFILE=65536 in slurmd.service" in told
    (told,) = limit_warnings([replace(each, open_files=4096) for each in ALIKE], 65536)
    assert told.startswith("n1, n2, n3: a process may have 4,096 files open"), "one line for all nodes"


def test_facts_are_read_from_among_other_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes.jsonl"
    lines = ["a module greets you", *(json.dumps(asdict(each)) for each in ALIKE[:2]), ""]
    path.write_text("\n".join(lines))
    assert read_facts(path) == ALIKE[:2]
    arguments = ["check", "--facts", str(path), "--gpus", "8", "--marker", str(MARKER)]
    assert main([*arguments, "n1", "n2"]) == 0
    assert main([*arguments, *NODES]) == 2
    assert "error: these nodes cannot run together:\n  - n3 did not answer." in capsys.readouterr().err


def test_ray_starts_with_one_mask_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    wanted = {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": None, "X": "a b"}
    lines = shell_lines(wanted)
    assert "unset WANDB_API_KEY" in lines and not any("RAY_AUTH_TOKEN" in line for line in lines)
    assert {"export HIP_VISIBLE_DEVICES=0,1", "unset ROCR_VISIBLE_DEVICES", "export X='a b'"} <= set(lines)
    path = tmp_path / "nodes.jsonl"
    path.write_text("\n".join(json.dumps(asdict(replace(each, environment=wanted))) for each in ALIKE))
    assert main(["environment", "--facts", str(path), "n2"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.fixture(scope="module")
def two_nodes(processes: None) -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "n1"})
    cluster.add_node(num_cpus=1, node_name="n2")
    yield cluster.address
    cluster.shutdown()


def test_all_nodes_are_waited_for_and_the_one_that_does_not_come_is_named(two_nodes: str, tmp_path: Path) -> None:
    wait_for(two_nodes, ["n1", "n2"], 60.0, tmp_path)
    (tmp_path / "n3.log").write_text("starting\nConnection refused by firewall\n")
    with pytest.raises(NodesError) as error:
        wait_for(two_nodes, ["n1", "n2", "n3", "n4"], 0.1, tmp_path)
    said = str(error.value)
    assert f"Ray's head at {two_nodes} waited 0.1 s, and not all nodes came:\n  - n3: Connection refused by" in said
    assert "  - n4: it wrote nothing (" in said and "n1:" not in said and "n2:" not in said
    assert "--exclude=n3,n4" in said


def test_a_head_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(NodesError, match="  - n1: it wrote nothing"):
            wait_for(address, NODES, 0.1, tmp_path)
