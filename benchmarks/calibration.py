"""The planner's seconds beside measured ones, and its constants fitted again without each row.

    python -m benchmarks.calibration [--leave-one-out] [--gains]

The first table has every row of ``mcore_rl/planning/measured_runs.yaml``.  --leave-one-out fits the constants once to
all rows, and once without each: the errors of a row by the constants that have not seen it.  --gains simulates the
modes, some minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import exp, log
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.compose import compose
from mcore_rl.config.engine import EngineConfig, Precision, Recompute
from mcore_rl.config.launch import load_cluster
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.families.flops import forward_flops
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.planning import modes, timing
from mcore_rl.planning.measured_runs import (
    WITHIN,
    MeasuredGain,
    MeasuredRun,
    MeasuredUpdate,
    measured_gains,
    measured_runs,
    measured_updates,
)
from mcore_rl.planning.modes import ModeResult
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import other_models, run_model
from mcore_rl.planning.simulation import ONE_STEP_OFF, SYNC_COLOCATED
from mcore_rl.planning.timing import Rates
from mcore_rl.planning.training import RolePlan, Work

# The fitted constants, as timing.py has them; and those of devices, by words of their names.
# What they were before any row was known, or hardly anything where they were not there: a constant of which the other
# rows say nothing goes back to it.
BEFORE = {
    "EXPERT_COLUMN_FLOPS": 1e12,
    "LOCAL_EFFICIENCY": 1.0,
    "LOCAL_EXPERT_EFFICIENCY": 0.67,
    "LAYER_LATENCY_S": 8e-6,
    "NODES_LATENCY_S": 3e-5,
    "EXPERT_DECODE_S": 1e-5,
    "EAGER_LAYER_S": 1e-4,
}
DEVICES = {"MI300X": 1.0, "GB200": 1.0}
ROUNDS = 3
NUDGE = 1.1
PRIOR = 0.02  # how much that counts against a row


@cache
def composed_row(name: str) -> tuple[RunConfig, ModelConfig, ClusterConfig]:
    """The run of this name in ``measured_runs()``, its model and its cluster."""
    run = next(each for each in measured_runs() if each.name == name)
    cluster, *overrides = run.cluster
    config = compose(RunConfig, "train", run.words)
    return config, run_model(config), load_cluster(cluster, overrides)


def planned_parts(run: MeasuredRun) -> dict[str, float]:
    """The planned seconds by the parts of ``MeasuredRun.seconds``; ``step`` is without ``sync``."""
    config, model, cluster = composed_row(run.name)
    seconds = dict(plan(config, model, cluster, other_models(config)).seconds)
    sync = seconds.pop("sync")
    generate = seconds.pop("generate")
    update = sum(each for part, each in seconds.items() if part.startswith("update"))
    scored = sum(seconds.values()) - update
    parts = {"generate": generate, "logprobs": scored, "update": update, "sync": sync}
    return parts | {"step": generate + update + scored}


def planned_mfu(update: MeasuredUpdate) -> float:
    """The planned MFU of an update on one device."""
    cluster = load_cluster(update.cluster)
    engine = EngineConfig(
        precision=Precision.bfloat16,
        layer_spec=update.layer_spec,
        recompute=Recompute.none,
        microbatch_tokens=update.microbatch_tokens,
    )
    work = Work(sequences=update.sequences, longest=2_048, mean=update.mean)
    role = RolePlan("actor", update.model, engine, ParallelConfig(), 1, work, accelerator=True)
    rates = Rates.of(cluster, 1, Precision.bfloat16)
    peak = peak_tflops(cluster.device_name, Precision.bfloat16)
    assert peak is not None, "the data sheet is known"
    flops = 3 * forward_flops(update.model, [round(update.mean)]) * update.sequences
    return flops / timing.update_s(role, rates, update.sequences, 1) / (peak * 1e12)


def planned_gain(gain: MeasuredGain) -> tuple[ModeResult, ModeResult]:
    """(one after another on shared devices, one step off on the published split), each with its fastest layouts."""
    config, model, cluster = composed_row(gain.run)
    with patch.object(modes, "splits_of", lambda nodes: (gain.engine_nodes,)):
        result = modes.compare_modes(
            config, model, cluster, others=other_models(config), modes=(ONE_STEP_OFF,), steps=2
        )
    by_mode = {row.mode: row for row in result.rows}
    return by_mode[SYNC_COLOCATED], by_mode[ONE_STEP_OFF]


def ratios() -> dict[tuple[str, str], float]:
    """(row, part) -> planned over measured, of all that counts; of an update by MFU, measured over planned."""
    known = {}
    for run in measured_runs():
        if counted := run.counted:
            parts = planned_parts(run)
            known |= {(run.name, part): parts[part] / seconds for part, seconds in counted.items()}
    for update in measured_updates():
        known[update.name, "update"] = update.mfu / planned_mfu(update)
    return known


def rows() -> Iterator[list[str]]:
    """Every part of every row."""
    for run in measured_runs():
        parts = planned_parts(run)
        counted = run.counted
        for part, seconds in run.seconds.items():
            value = counted.get(part, seconds)
            why = "counts" if part in counted else run.why if part in run.out else "another program's"
            yield [run.name, part, f"{value:.4g}", f"{parts[part]:.4g}", f"{parts[part] / value:.2f}", why]
    for update in measured_updates():
        planned = planned_mfu(update)
        yield [update.name, "MFU", f"{update.mfu:.2f}", f"{planned:.2f}", f"{planned / update.mfu:.2f}", "counts"]


def show(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    shown = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for line in lines:
        shown.add_row(*line)
    Console(width=200).print(shown)


class _Constants:
    """The fitted constants in place of the planner's, while inside."""

    def __init__(self, values: Mapping[str, float]) -> None:
        devices = {word: values[word] for word in DEVICES}
        self._patches = [patch.object(timing, name, values[name]) for name in BEFORE]
        self._patches.append(
            patch.object(
                timing, "device_efficiency", lambda name: next((v for w, v in devices.items() if w in name), 1.0)
            )
        )

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()


def begun() -> dict[str, float]:
    """The planner's constants."""
    return {name: getattr(timing, name) for name in BEFORE} | {word: timing.device_efficiency(word) for word in DEVICES}


def fitted(without: str = "") -> dict[str, float]:
    """The constants that fit all rows but one best: least squares of logarithms, a row's parts together as one."""
    first = BEFORE | DEVICES
    values = begun()
    for _ in range(ROUNDS):
        with _Constants(values):
            here = ratios()
        keys = [key for key in here if key[0] != without]
        weights = [sum(name == other for other, _ in keys) ** -0.5 for name, _ in keys]
        columns = []
        for name in values:
            with _Constants(values | {name: values[name] * NUDGE}):
                moved = ratios()
            columns.append([log(moved[key] / here[key]) / log(NUDGE) for key in keys])
        slopes = np.array(columns).T * np.array(weights)[:, None]
        errors = np.array([log(here[key]) for key in keys]) * weights
        strayed = np.array([log(values[name] / each) for name, each in first.items()])
        stays = PRIOR**0.5 * np.eye(len(values))
        move, *_ = np.linalg.lstsq(
            np.vstack([slopes, stays]), -np.concatenate([errors, PRIOR**0.5 * strayed]), rcond=None
        )
        values = {name: each * exp(by) for (name, each), by in zip(values.items(), move, strict=True)}
    return values


def left_out(names: Sequence[str]) -> Iterator[list[str]]:
    """Of each row its ratios by constants that were fitted without it."""
    for name in names:
        with _Constants(fitted(name)):
            known = {part: ratio for (each, part), ratio in ratios().items() if each == name}
        yield [name, ", ".join(f"{part} {ratio:.2f}" for part, ratio in known.items())]


def main() -> None:
    """Show what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--gains", action="store_true")
    options = parser.parse_args()
    show(("run", "part", "measured", "planned", "ratio", ""), rows())
    known = ratios()
    mean = exp(sum(abs(log(each)) for each in known.values()) / len(known)) - 1
    print(f"{len(known)} values of {len({name for name, _ in known})} rows count; their mean error is {mean:.0%}")
    print(f"outside {WITHIN:.0%}: {[key for key, each in known.items() if abs(each - 1) > WITHIN] or 'none'}")
    if options.leave_one_out:
        print("fitted to all:", json.dumps({name: float(f"{each:.3g}") for name, each in fitted().items()}))
        show(("run left out", "its ratios"), left_out(list(dict.fromkeys(name for name, _ in known))))
    if options.gains:
        gains = []
        for gain in measured_gains():
            sync, other = (row.simulation.step_s for row in planned_gain(gain))
            gains.append([gain.name, f"{gain.sync_s / gain.other_s:.2f}", f"{sync / other:.2f}"])
        show(("devices", "one step off, measured", "planned"), gains)


if __name__ == "__main__":
    main()
