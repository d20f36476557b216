"""``cluster.measured=doctor.json``: its rates are planned with; a missing or a foreign file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.cluster import ReachedRates, ResidualMemory
from mcore_rl.config.launch import cluster_yaml, load_cluster
from mcore_rl.ground.errors import ConfigError

VALUES: dict[str, Any] = {
    "format": "mcore-rl doctor",
    "version": 1,
    "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "rates": {"intra_node_gb_s": 371.5, "host_link_gb_s": 52.0},
}


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(VALUES | changes))
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_cluster("nvidia_h100", [f"measured={path}"])
    (violation,) = error.value.violations
    assert (violation.key, violation.value) == ("cluster.measured", path)
    return str(violation)


def test_measured_rates_are_taken_and_written_ones_stay(tmp_path: Path) -> None:
    path = written(tmp_path)
    cluster = load_cluster("nvidia_h100", [f"measured={path}"])
    assert cluster.reached == ReachedRates(intra_node_gb_s=371.5, host_link_gb_s=52.0)
    cluster = load_cluster("nvidia_h100", [f"measured={path}", "reached.intra_node_gb_s=300"])
    assert cluster.reached == ReachedRates(intra_node_gb_s=300.0, host_link_gb_s=52.0)
    assert load_cluster("nvidia_h100").reached == ReachedRates()


def test_a_file_that_is_missing_foreign_or_empty(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(str(tmp_path / "absent.json"))
    (tmp_path / "text").write_text("PASS: 10 PASS")
    assert "is no JSON" in refusal(str(tmp_path / "text"))
    (tmp_path / "plan.json").write_text('{"title": "a plan"}')
    assert "is not what mcore-rl doctor writes" in refusal(str(tmp_path / "plan.json"))
    assert "is of format 2, and this is 1. Run mcore-rl doctor again" in refusal(written(tmp_path, version=2))
    assert "has nothing to plan with" in refusal(written(tmp_path, rates={}))
    other = refusal(written(tmp_path, device_name="NVIDIA A100-SXM4-80GB"))
    assert "was measured on NVIDIA A100-SXM4-80GB (cuda), and the cluster nvidia_h100 has NVIDIA H100 80GB" in other
    assert "(cpu), and the cluster nvidia_h100 has" in refusal(written(tmp_path, device="cpu", device_name="EPYC"))


def test_measured_memory_is_taken_and_written_stays(tmp_path: Path) -> None:
    path = written(tmp_path, rates={}, residuals={"device_context_mib": 512.5, "pinned_ratio": 1.02, "later": 7})
    cluster = load_cluster("nvidia_h100", [f"measured={path}"])
    assert cluster.residuals == ResidualMemory(device_context_mib=512.5, pinned_ratio=1.02)
    cluster = load_cluster("nvidia_h100", [f"measured={path}", "residuals.device_context_mib=600"])
    assert cluster.residuals == ResidualMemory(device_context_mib=600.0, pinned_ratio=1.02)
    with pytest.raises(ConfigError, match=r"residuals\.pinned_ratio=0\.0: must be positive"):
        load_cluster("nvidia_h100", [f"measured={written(tmp_path, residuals={'pinned_ratio': 0.0})}"])


def test_a_rate_that_is_not_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reached\.intra_node_gb_s=0\.0: must be positive"):
        load_cluster("nvidia_h100", [f"measured={written(tmp_path, rates={'intra_node_gb_s': 0.0, 'x': 1.0})}"])


def test_a_cluster_s_yaml_is_read_as_it_was(tmp_path: Path) -> None:
    wanted = [f"measured={written(tmp_path)}", "slurm.partition=gpu", "environment.A='1'", "slurm.doctor=quick"]
    cluster = load_cluster("nvidia_h100", wanted)
    path = tmp_path / "again.yaml"
    path.write_text(cluster_yaml(cluster))
    again = load_cluster(str(path))
    cluster.measured = ""
    assert again == cluster
