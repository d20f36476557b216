"""Compares the ledger of a run with its other records, both ways: each must have what the other tells of.

Of the last step a run that goes on, or was killed, may have written some records and not yet others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.json_text import read_json
from mcore_rl.tracking.jsonl import step_rows
from mcore_rl.tracking.run_files import parsed_config, setting
from mcore_rl.tracking.samples import sample_files
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledGroup, ScheduledStep

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
SHOWN = 5  # steps or numbers that a line names


def record_violations(run_dir: Path, steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """Where the records of the run contradict its ledger, or lack what it tells of."""
    config = read_settings(run_dir)
    yield from _doubled(run_dir / SCHEDULE)
    yield from _metrics(run_dir / METRICS, steps)
    yield from _settings(config, steps)
    if steps:
        yield from _samples(run_dir, config, steps)


def unproven(run_dir: Path, steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """What nothing in ``run_dir`` proves."""
    yield "what the steps computed, with which settings and in how many updates (trainer.replay trains them again)"
    yield "which responses were masked, and that the data have as many prompts"
    if not read_settings(run_dir):
        yield f"mode, batch and bound of the lines, since {CONFIG} cannot be read"
    absent = [step.step for step in steps if step.step not in sample_files(run_dir, "rollouts")]
    if absent:
        yield f"what was drawn in {_named(absent)}, of which rollouts/ has no file"
    if not (run_dir / METRICS).is_file():
        yield f"when steps ended, since there is no {METRICS}"


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The configuration in the run directory; {} where it cannot be read."""
    try:
        return parsed_config((run_dir / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _doubled(path: Path) -> Iterator[str]:
    """A run writes one line a step; what it trains again after a resume replaces the old line."""
    counts = Counter(row["step"] for row in step_rows(path))
    for step in sorted(step for step, count in counts.items() if count > 1):
        yield f"step {step}: {path.name} has {counts[step]} lines of it"


def _metrics(path: Path, steps: Sequence[ScheduledStep]) -> Iterator[str]:
    yield from _doubled(path)
    rows = [row for row in step_rows(path) if row["step"] > 0]
    told, known = {row["step"] for row in rows}, {step.step for step in steps}
    last = max(known, default=0)
    for step in sorted(each for each in told if each > last):
        yield f"step {step}: {METRICS} tells of it, and the ledger does not"
    if silent := sorted(known - told - {last}):
        yield f"{_named(silent)}: the ledger tells of {'it' if len(silent) == 1 else 'them'}, and {METRICS} does not"
    for row in rows:
        if wrong := sorted(name for name, value in row.items() if value is not None and not _is_number(value)):
            yield f"step {row['step']}: {METRICS} has {', '.join(wrong[:SHOWN])} that is no number"


def _settings(config: Mapping[str, Any], steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """Lines that differ in what their settings say, and a last line that is not of the configuration."""
    said = dict[str, tuple[int, tuple[Any, ...]]]()  # by checksum of settings, the first step and what it has
    for step in steps:
        has = (step.mode, step.batch, step.bound, step.num_prompts)
        first, had = said.setdefault(step.settings, (step.step, has))
        if has != had:
            names = ("mode", "batch", "bound", "num_prompts")
            other = [
                f"{name} {now}, not {then}" for name, now, then in zip(names, has, had, strict=True) if now != then
            ]
            yield f"step {step.step}: has {', '.join(other)} as step {first} of the same settings"
    if not config or not steps:
        return
    last, of_config = steps[-1], _of_config(config)
    for name, wanted in of_config.items():
        if wanted is not None and getattr(last, name) != wanted:
            yield f"step {last.step}: has {name} {getattr(last, name)}, and {CONFIG} says {wanted}"


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Mode, batch and bound by the configuration; None where it does not say."""
    mode = setting(config, "trainer.mode")
    group = "async" if "async" in config else "async_"  # the key, or its field
    stale = setting(config, f"{group}.max_staleness")
    bounds = {"sync": 0, "one_step_off": 1, "async": stale}
    bound = stale if setting(config, "rollout.partial") else bounds.get(mode)
    return {"mode": mode, "batch": setting(config, "data.train_batch_size"), "bound": bound}


def _samples(run_dir: Path, config: Mapping[str, Any], steps: Sequence[ScheduledStep]) -> Iterator[str]:
    known, last = {step.step: step for step in steps}, steps[-1].step
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    files, records = sample_files(run_dir, "rollouts"), sample_files(run_dir, "record")
    wanted = trainer.get("save_rollouts", bool(files)), trainer.get("record_rollouts", bool(records))
    for folder, held, asked in (("rollouts", files, wanted[0]), ("record", records, wanted[1])):
        absent = [step for step in known if step not in held and step != last]
        if asked and absent:
            yield f"{_named(absent)}: {folder}/ has no file of {'it' if len(absent) == 1 else 'them'}"
        for step in held:
            if step not in known and not 1 <= step <= last + 1:
                yield f"step {step}: {folder}/ has a file of it, and the ledger ends with step {last}"
    for step, path in files.items():
        if step in known:
            yield from _sample_violations(path, f"step {step}: rollouts/{path.name}", known[step])


def _sample_violations(path: Path, name: str, step: ScheduledStep) -> Iterator[str]:
    """What the samples of a step say otherwise than its line."""
    try:
        table = pq.read_table(path)
        rows = table.select([each for each in COLUMNS if each in table.column_names]).to_pylist()
        of_prompt = defaultdict[str, list[dict[str, Any]]](list)
        for row in rows:
            of_prompt[row["prompt_id"]].append(row)
    except (OSError, pa.ArrowException, LookupError) as error:
        yield f"{name} cannot be read: {type(error).__name__}"
        return
    if other := {row["step"] for row in rows if "step" in row} - {step.step}:
        yield f"{name} has responses of step {sorted(map(str, other))[0]}"
    groups = defaultdict[str, list[ScheduledGroup]](list)  # a prompt may be there in two epochs
    for group in step.groups:
        groups[group.id].append(group)
    for prompt in sorted(of_prompt.keys() | groups.keys()):
        drawn, stated = of_prompt.get(prompt, []), groups.get(prompt, [])
        if len(drawn) != sum(group.samples for group in stated):
            yield f"{name} has other responses than the ledger, of {prompt}"
            return
        lost = [row for row in drawn if row.get("finish") == "abort"]
        of_ledger = sum(group.lost for group in stated)
        # Of several turns some may have been trained before the last was given up.
        other_count = len(lost) < of_ledger or (len(lost) > of_ledger and "segments" not in table.column_names)
        if drawn and "finish" in drawn[0] and other_count:
            yield f"{name} has {len(lost)} lost responses of {prompt}, and the ledger another number"
        versions = [version for row in drawn if row.get("finish") != "abort" for version in _versions(row)]
        drawing = [group for group in stated if group.lost < group.samples]
        ends = [each for group in drawing for each in (group.oldest, group.newest) if each is not None]
        said = f"{min(ends)} to {max(ends)}" if len(ends) == 2 * len(drawing) and ends else "none"
        if versions and drawing and said != f"{min(versions)} to {max(versions)}":
            told = f"{min(versions)} to {max(versions)}, and the ledger says {said}"
            yield f"{name}: prompt {prompt} has tokens of versions {told}"


COLUMNS = ("step", "prompt_id", "finish", "versions")


def _versions(row: Mapping[str, Any]) -> list[int]:
    try:
        spans = read_json(row["versions"])
        return [span["version"] for span in spans]
    except (LookupError, ValueError, TypeError):
        return []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _named(steps: Sequence[int]) -> str:
    """ "step 3", or "steps 3, 4, 5 and 20 more"."""
    shown = ", ".join(map(str, steps[:SHOWN]))
    more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
    return f"step{'s' * (len(steps) > 1)} {shown}{more}"
