"""The table, the summary, and doctor.json."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import Diagnosis, Subject, Verdict
from mcore_rl.doctor.report import highest_residuals, lowest_rates, report_tables, summary, write_report
from mcore_rl.parallel.device import detect

GOOD = Diagnosis(check="matmul", verdict=Verdict.PASS, measured="700 TFLOP/s", expected="at least 445", node="n1")
NODES = [
    GOOD,
    replace(GOOD, check="memory", verdict=Verdict.SKIP, measured="needs an accelerator"),
    replace(GOOD, check="pinning", verdict=Verdict.SKIP, measured="needs an accelerator"),
    replace(GOOD, check="all-reduce in a node", numbers={"all_reduce_intra_node_gb_s": 370.0}),
    replace(GOOD, node="n2", verdict=Verdict.FAIL, measured="200 TFLOP/s", remedy="Look for [heat]"),
    replace(GOOD, node="n2", check="all-reduce in a node", numbers={"all_reduce_intra_node_gb_s": 350.0}),
    replace(GOOD, check="all-to-all in a node", numbers={"all_to_all_intra_node_gb_s": float("nan")}),
    replace(GOOD, check="pinned copies to the host", numbers={"device_to_host_gb_s": 52.0}),
]


def shown(diagnoses: list[Diagnosis]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report_tables(diagnoses))
    return console.export_text()


def test_a_row_has_the_worst_node_and_what_to_do() -> None:
    text = shown(NODES)
    (row,) = [line for line in text.splitlines() if "matmul" in line and "FAIL │" in line]
    assert "n2 of 2 nodes: 200 TFLOP/s" in row and "at least 445" in row
    assert "-> Look for [heat]" in text, "brackets are no markup"
    (skipped,) = [line for line in text.splitlines() if line.startswith("SKIP")]
    assert "needs an accelerator" in skipped and "memory, pinning" in skipped
    assert "n1 and 1 more of 2 nodes" in text
    assert text.rstrip().endswith("FAIL: 1 FAIL, 3 PASS, 2 SKIP: mend matmul before you start a run")


def test_the_summary_of_a_machine_that_is_well() -> None:
    assert summary([GOOD]) == "PASS: 1 PASS"
    assert summary([GOOD, replace(GOOD, check="memory", verdict=Verdict.WARN)]) == "WARN: 1 WARN, 1 PASS"


def test_rates_are_the_lowest_of_all_nodes() -> None:
    rates = lowest_rates(NODES[:6] + NODES[7:])
    assert rates == {"intra_node_gb_s": 350.0, "host_link_gb_s": 52.0}


def test_memory_of_processes_is_the_highest_of_all_nodes() -> None:
    nodes = [
        replace(GOOD, node=node, numbers={"host_trainer_mib": size, "x": 1.0})
        for node, size in (("a", 400.0), ("b", 390.0))
    ]
    assert highest_residuals([*nodes, replace(GOOD, numbers={"pinned_ratio": 1.02})]) == {
        "host_trainer_mib": 400.0, "pinned_ratio": 1.02,
    }  # fmt: skip


def test_doctor_json_holds_everything(tmp_path: Path) -> None:
    subject = Subject(platform=detect(Device.cpu), directory=tmp_path / "new", num_nodes=2)
    values = json.loads(write_report(NODES, subject).read_text(), parse_constant=lambda _: 1 / 0)
    assert values["format"] == "mcore-rl doctor" and values["verdict"] == "FAIL"
    assert (values["device"], values["num_nodes"], values["quick"]) == ("cpu", 2, False)
    assert [each["node"] for each in values["diagnoses"]].count("n2") == 2
    assert values["diagnoses"][4]["remedy"] == "Look for [heat]" and values["diagnoses"][4]["verdict"] == "FAIL"
    assert values["diagnoses"][6]["numbers"] == {}, "JSON has no nan"
