"""Checks that run ``mcore-rl train`` with a tiny model: colocated, separate, over nodes, and with an engine killed.

Each is the program itself in a process of its own, with every weight update compared tensor by tensor.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.doctor.checks import NODES, THOROUGH, TWO_RANKS, Diagnosis, HealthCheck, Subject, problem_diagnosis
from mcore_rl.doctor.tiny_task import task_overrides, write_task

POLL_S = 0.2
STOP_S = 30.0  # for a run that was told to end
LEAVE_S = 60.0  # of the limit: kept for that
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}  # mean of log-probs, sampler to trainer, nats
RESTARTED = "started again"
CACHE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """What a run was, and how it ended.

    metrics: by step.  output: of its program.  exit_code: None if it did not end in time.
    """

    name: str
    steps: int
    precision: str
    exit_code: int | None
    metrics: tuple[Mapping[str, Any], ...]
    output: str
    log: Path
    seconds: float


def tiny_overrides(subject: Subject, task: Path, directory: Path, placement: str, nodes: int, steps: int) -> list[str]:
    """The overrides of ``mcore-rl train``.  Over several nodes, with all of their devices."""
    accelerator = subject.platform.is_accelerator
    per_node = 1 if placement == "separate" else min(subject.num_ranks, 2)
    if nodes > 1:
        per_node = subject.platform.num_devices if accelerator else 1
    world = nodes * per_node
    batch = max(8, world)
    precision = _precision(subject)
    engines = world if placement == "colocated" and (accelerator or nodes > 1) else 1
    return [
        *task_overrides(
            task,
            directory,
            prompts=batch,
            per_node=per_node,
            ep=2 if world % 2 == 0 else 1,
            precision=precision,
            cache_bytes=CACHE_BYTES,
        ),
        f"rollout.dtype={precision}",
        f"rollout.dp={engines}",
        "rollout.gpu_memory_utilization=0.3",
        f"trainer.nnodes={nodes}",
        f"trainer.placement={placement}",
        f"trainer.device={subject.platform.kind.value}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
        "trainer.resume_mode='off'",
        "trainer.guards.check_weights_freq=1",
        *([f"ray_init.address={subject.address}"] if nodes > 1 else []),
    ]


def _precision(subject: Subject) -> str:
    return "bfloat16" if subject.platform.is_accelerator else "float32"


# ---- a run in a process of its own ----


def tiny_run(
    subject: Subject,
    name: str,
    placement: str,
    limit_s: float,
    *,
    nodes: int = 1,
    steps: int = 2,
    kill: bool = False,
    more: Sequence[str] = (),
) -> WatchedRun:
    """Runs the tiny task.  kill: its engine, after the first step.  more: overrides."""
    directory = subject.directory / name.replace(" ", "_")
    task = write_task(directory / "task", prompts=4 * max(8, nodes * subject.num_ranks))
    run = directory / "run"
    words = ["train", *tiny_overrides(subject, task, run, placement, nodes, steps), *more]
    log = directory / "output.log"
    return watched_run(name, words, run, log, limit_s, steps=steps, precision=_precision(subject), kill=kill)


def watched_run(
    name: str,
    words: Sequence[str],
    run: Path,
    log: Path,
    limit_s: float,
    *,
    steps: int,
    precision: str,
    kill: bool = False,
) -> WatchedRun:
    """Runs ``mcore-rl WORDS``, and ends it in time for ``limit_s``.  None of its processes is left.

    run: its directory.  log: gets its output.  steps, precision: as ``words`` say.  kill: its engine, after the first
    step.
    """
    command = [sys.executable, "-m", "mcore_rl.cli", *words]
    begun = time.monotonic()
    until = begun + limit_s - min(LEAVE_S, limit_s / 4)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            if kill:
                _until(lambda: bool(_metrics(run)), process, until)
                _kill_engine(process, run / "logs" / "engine-0.log")
            _until(lambda: False, process, until)
        finally:
            exit_code = process.poll()
            _end(process)
    return WatchedRun(
        name=name,
        steps=steps,
        precision=precision,
        exit_code=exit_code,
        metrics=_metrics(run),
        output=log.read_text(errors="replace"),
        log=log,
        seconds=time.monotonic() - begun,
    )


def _until(moment: Callable[[], bool], process: subprocess.Popen[bytes], until: float) -> None:
    """Returns at ``moment``, when the process has ended, or at ``until`` of the monotonic clock."""
    while process.poll() is None and time.monotonic() < until and not moment():
        time.sleep(POLL_S)


def _metrics(run: Path) -> tuple[Mapping[str, Any], ...]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return tuple(json.loads(line) for line in lines if line.endswith("}"))


def _kill_engine(process: subprocess.Popen[bytes], log: Path) -> None:
    """Kills the processes below ``process`` that write into the engine's log."""
    for each in _below(process):
        with suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{each.pid}/fd/1") == str(log.resolve()):
                each.kill()


def _below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and all that it has started: first by Ctrl-C, which lets it end its own."""
    if process.poll() is not None:
        return
    below = _below(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for each in [*below, *_below(process)]:
        with suppress(psutil.Error):
            each.kill()
    process.kill()
    process.wait()


# ---- judgement ----


def run_diagnosis(run: WatchedRun, *, restarted: bool = False) -> Diagnosis:
    """FAIL where it does not end well, a step is missing, or a number is not what it must be.

    restarted: an engine was killed, and must have been started again.
    """
    problems = [] if run.exit_code == 0 else [_ending(run)]
    if run.exit_code == 0:
        done = [each["step"] for each in run.metrics]
        if done != list(range(1, run.steps + 1)):
            problems.append(f"it did steps {done} of {run.steps}")
        for each in run.metrics:
            problems += _number_problems(each, MAX_DIFFERENCE[run.precision])
        if restarted and RESTARTED not in run.output:
            problems.append("the killed engine was not started again")
    seconds = [float(each.get("time/step", math.nan)) for each in run.metrics]
    shown = ", ".join(f"{each:.1f} s" for each in seconds)
    words = f"{run.steps} steps ({shown}) in {run.seconds:.0f} s, weights checked after each"
    numbers = {"run_s": run.seconds}
    if run.metrics and not problems:
        last = run.metrics[-1]
        numbers |= {"step_s": seconds[-1], "sync_s": float(last.get("time/sync", math.nan))}
        numbers["logprob_difference"] = float(last["rollout/logprob_diff_mean"])
        words += f", log-probs differ by {numbers['logprob_difference']:.1e}"
    expected = f"{run.steps} steps, sampler and trainer within {MAX_DIFFERENCE[run.precision]:g} nats"
    remedy = f"Read {run.log} and the logs beside it; docs/troubleshooting.md has the messages"
    return problem_diagnosis(run.name, list(dict.fromkeys(problems)), words, expected, remedy, numbers=numbers)


def _number_problems(metrics: Mapping[str, Any], limit: float) -> Iterator[str]:
    step = metrics["step"]
    norm = float(metrics.get("actor/grad_norm", math.nan))
    if not (math.isfinite(norm) and norm > 0):
        yield f"step {step}: the gradient's norm is {norm:g}"
    difference = float(metrics.get("rollout/logprob_diff_mean", math.nan))
    if not difference <= limit:
        yield f"step {step}: log-probs of sampler and trainer differ by {difference:.1e}"


def _ending(run: WatchedRun) -> str:
    lines = [line.strip() for line in run.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    last = (errors or lines or ["it wrote nothing"])[-1][:300]
    how = "did not end in time" if run.exit_code is None else f"ended with exit code {run.exit_code}"
    return f"{how} after {len(run.metrics)} steps: {last}"


# ---- the checks ----


def _run(subject: Subject, limit_s: float, name: str, placement: str) -> Iterator[Diagnosis]:
    yield run_diagnosis(tiny_run(subject, name, placement, limit_s))


def _over_nodes(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    yield run_diagnosis(tiny_run(subject, "run over nodes", "colocated", limit_s, nodes=subject.num_nodes))


def _killed(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    run = tiny_run(subject, "run with a killed engine", "colocated", limit_s, steps=3, kill=True)
    yield run_diagnosis(run, restarted=True)


CHECKS = (
    HealthCheck(
        name="colocated run",
        about="two steps, trainer and engine on the same devices",
        limit_s=420,
        run=partial(_run, name="colocated run", placement="colocated"),
        needs=(THOROUGH,),
    ),
    HealthCheck(
        name="separate run",
        about="two steps, trainer and engine on devices of their own",
        limit_s=420,
        run=partial(_run, name="separate run", placement="separate"),
        needs=(THOROUGH, TWO_RANKS),
    ),
    HealthCheck(
        name="run with a killed engine",
        about="three steps; the engine is killed after the first",
        limit_s=420,
        run=_killed,
        needs=(THOROUGH,),
    ),
    HealthCheck(
        name="run over nodes",
        about="two steps over all nodes, engines beside the trainer",
        limit_s=600,
        run=_over_nodes,
        needs=(THOROUGH, NODES),
        on_each_node=False,
    ),
)
