"""The verdict on a tiny run, and its end when it hangs; real ones are in tests/doctor/test_command.py."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.doctor import runs
from mcore_rl.doctor.checks import Subject, Verdict
from mcore_rl.doctor.runs import WatchedRun, run_diagnosis, tiny_overrides
from mcore_rl.parallel.device import detect
from tests.doctor.test_software import H100

METRICS = tuple(
    {"step": step, "actor/grad_norm": 0.5, "rollout/logprob_diff_mean": 1e-6, "time/step": 2.0, "time/sync": 0.2}
    for step in (1, 2)
)
GOOD = WatchedRun(
    name="colocated run", steps=2, precision="float32", exit_code=0, metrics=METRICS, output="", log=Path("log"),
    seconds=30.0,
)  # fmt: skip


def measured(run: WatchedRun, *, restarted: bool = False) -> tuple[Verdict, str]:
    diagnosis = run_diagnosis(run, restarted=restarted)
    assert bool(diagnosis.remedy) == (diagnosis.verdict is Verdict.FAIL)
    return diagnosis.verdict, diagnosis.measured


def test_a_run_that_is_well() -> None:
    verdict, words = measured(GOOD)
    assert verdict is Verdict.PASS
    assert words == "2 steps (2.0 s, 2.0 s) in 30 s, weights checked after each, log-probs differ by 1.0e-06"
    assert run_diagnosis(GOOD).numbers["sync_s"] == 0.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": METRICS[:1]}, "it did steps [1] of 2"),
        ({"exit_code": 2, "output": "x\nerror: no device\n"}, "ended with exit code 2 after 2 steps: error: no device"),
        ({"exit_code": None, "output": "", "metrics": ()}, "did not end in time after 0 steps: it wrote nothing"),
        ({"metrics": (METRICS[0], METRICS[1] | {"actor/grad_norm": 0.0})}, "step 2: the gradient's norm is 0"),
        ({"metrics": (METRICS[0], METRICS[1] | {"actor/grad_norm": float("nan")})}, "step 2: the gradient's norm is n"),
        ({"metrics": (METRICS[0] | {"rollout/logprob_diff_mean": 0.01}, METRICS[1])}, "step 1: log-probs of sampler"),
    ],
)
def test_a_run_that_is_not(changes: dict[str, object], words: str) -> None:
    verdict, said = measured(replace(GOOD, **changes))  # type: ignore[arg-type]
    assert verdict is Verdict.FAIL and words in said


def test_bfloat16_may_differ_more() -> None:
    rough = tuple(each | {"rollout/logprob_diff_mean": 0.01} for each in METRICS)
    assert measured(replace(GOOD, metrics=rough, precision="bfloat16"))[0] is Verdict.PASS


def test_a_killed_engine_must_have_been_started_again() -> None:
    assert measured(GOOD, restarted=True) == (Verdict.FAIL, "the killed engine was not started again")
    again = replace(GOOD, output="engine 0: started again, 1 of 3 restarts (trainer.max_restarts)")
    assert measured(again, restarted=True)[0] is Verdict.PASS


@pytest.mark.parametrize(("placement", "nodes"), [("colocated", 1), ("separate", 1), ("colocated", 2)])
@pytest.mark.parametrize("platform", [detect(Device.cpu), H100, replace(H100, num_devices=1)], ids=["cpu", "8", "1"])
def test_every_tiny_run_is_a_valid_one(placement: str, nodes: int, platform: object, tmp_path: Path) -> None:
    subject = Subject(platform=platform, directory=tmp_path, num_nodes=nodes, address="10.0.0.1:6379")  # type: ignore[arg-type]
    config = compose(RunConfig, "train", tiny_overrides(subject, tmp_path, tmp_path / "run", placement, nodes, 2))
    assert run_violations(config) == []
    assert config.trainer.guards.check_weights_freq == 1
    assert config.ray_init.address == ("10.0.0.1:6379" if nodes > 1 else None)


HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
try:
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(300)
"""


def test_a_run_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STOP_S", 0.5)
    process = subprocess.Popen([sys.executable, "-c", HANGS], start_new_session=True)
    while not (below := psutil.Process(process.pid).children()):
        time.sleep(0.02)
    runs._end(process)
    assert process.poll() is not None
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below)
