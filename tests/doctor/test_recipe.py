"""A recipe fits on the cluster of its yaml, and no longer where a device has less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.doctor.checks import Subject, Verdict
from mcore_rl.doctor.recipe import CHECKS
from tests.doctor.test_software import H100


def test_a_recipe_is_planned_with_what_a_device_has(tmp_path: Path) -> None:
    (check,) = CHECKS
    subject = Subject(
        platform=H100, directory=tmp_path, cluster=load_cluster("nvidia_h100"), recipe=load_recipe("qwen25_7b_remax")
    )
    (diagnosis,) = check.run(subject, 60.0)
    assert diagnosis.verdict is Verdict.PASS and " of 79.6 GiB" in diagnosis.measured
    (diagnosis,) = check.run(replace(subject, platform=replace(H100, memory_total_bytes=40 << 30)), 60.0)
    assert diagnosis.verdict is Verdict.FAIL and "of 40.0 GiB" in diagnosis.measured
    assert "mcore-rl plan --search" in diagnosis.remedy
    assert check.lacking(replace(subject, recipe=None)) == "needs a run to plan: --recipe NAME"
    assert check.lacking(replace(subject, cluster=None)) == "needs a cluster: --cluster NAME"
