"""The ledger of a run: every prompt is trained exactly once in each epoch, or dropped or lost for a reason with a name.

``audit`` proves it from schedule.jsonl, against the place in the data that each line states, and against what
config.yaml, metrics.jsonl and the samples say, both ways: each must have what the other tells of.  Of the last step a
run that goes on, or was killed, may have written some records and not yet others.  It trusts no counter of the run but
that place, and knows nothing of how prompts are drawn: it only counts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.json_text import read_json
from mcore_rl.tracking.jsonl import step_rows
from mcore_rl.tracking.run_files import parsed_config, setting
from mcore_rl.tracking.samples import sample_files
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledDrop, ScheduledGroup, ScheduledStep, read_schedule

REASONS = ("filter_groups", "surplus")  # for which a group that was drawn may be dropped
METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
MAX_STEPS = 5  # steps or numbers that a line names
COLUMNS = ("step", "prompt_id", "finish", "versions")  # of samples
SHOWN = 100  # prompts that are missing in one epoch, and named
# Why nothing of a group that was trained is in the loss.
LOST = "lost"
MASKED = "mask"
DataPlace = tuple[int, int]  # (epoch, number) of a prompt


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found.

    violations: one line each, with step and prompt; () if the ledger holds.
    steps: that the ledger has.  trained: groups.  untrained: groups that were dropped, lost or masked, by the reason.
    under_way: prompts that were drawn and that no step has.
    last_epoch: the epoch of the place after the last step.
    unproven: what the records do not tell.
    """

    violations: tuple[str, ...]
    steps: int = 0
    trained: int = 0
    untrained: dict[str, int] = field(default_factory=dict)
    under_way: int = 0
    last_epoch: int = 0
    unproven: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The audit in words."""
        if self.violations:
            count = len(self.violations)
            yield f"{count} violation{'s' * (count > 1)}:"
            yield from (f"  - {each}" for each in self.violations)
            return
        why = "".join(f"; {count:,} {reason}" for reason, count in sorted(self.untrained.items()))
        yield f"{self.steps:,} steps, {self.trained:,} groups trained{why}; {self.under_way:,} prompts under way"
        yield f"every prompt of {self.last_epoch} whole epochs and of the one that goes on is there exactly once"
        yield from (f"not proven: {each}" for each in self.unproven)


def audit(run_dir: Path) -> Audit:
    """The audit of the run in ``run_dir``, which may be going on or have been killed.

    ConfigError: it has no ledger.
    """
    steps, wrong = read_schedule(run_dir / SCHEDULE)
    violations = [f"step {step}: its line of {SCHEDULE} is not of this form, or of another version" for step in wrong]
    if not steps and not wrong:
        problem = f"holds no {SCHEDULE}, or no step in it"
        raise ConfigError([Violation("run_dir", run_dir, problem, "Give trainer.default_local_dir of a run of train")])
    violations += [*_step_violations(steps, wrong), *_prompt_violations(steps), *_record_violations(run_dir, steps)]
    untrained = Counter(each.reason for step in steps for each in step.dropped)
    for group in (group for step in steps for group in step.groups):
        if group.trained == 0:
            untrained[LOST if group.lost == group.samples else MASKED] += 1
    return Audit(
        violations=tuple(violations),
        steps=len(steps),
        trained=sum(group.trained > 0 for step in steps for group in step.groups),
        untrained=dict(untrained),
        under_way=len(steps[-1].again) if steps else 0,
        last_epoch=steps[-1].epoch if steps else 0,
        unproven=tuple(_unproven(run_dir, steps)),
    )


def _step_violations(steps: Sequence[ScheduledStep], wrong: Sequence[int]) -> Iterator[str]:
    """Steps that are missing, and what lines contradict by themselves."""
    present = {step.step for step in steps} | {*wrong}
    end = 0
    for step in sorted(present):
        if step == end + 2:
            yield f"step {end + 1}: {SCHEDULE} has no line of it"
        elif step > end + 2:
            yield f"steps {end + 1} to {step - 1}: {SCHEDULE} has no line of them"
        end = step
    for line in steps:
        yield from _line_violations(line)


def _line_violations(step: ScheduledStep) -> Iterator[str]:
    """What a line contradicts by itself."""
    if len(step.groups) != step.batch:
        yield f"step {step.step}: {len(step.groups)} groups, and data.train_batch_size was {step.batch}"
    if step.version != step.step - 1:
        yield f"step {step.step}: began with weights of version {step.version}, not {step.step - 1}"
    for group in step.groups:
        name = f"step {step.step}: prompt {group.id}"
        if group.newest is not None and group.newest > step.version:
            yield f"{name} has tokens of version {group.newest}, which was not there yet"
        if group.oldest is not None and step.version - group.oldest > step.bound:
            yield f"{name} has tokens of version {group.oldest}, more than {step.bound} before {step.version}"
        if not 0 <= max(group.lost, group.trained) <= group.lost + group.trained <= group.samples:
            yield f"{name}: {group.lost} lost and {group.trained} trained of {group.samples} responses"
    for drop in step.dropped:
        if drop.reason not in REASONS:
            yield f"step {step.step}: prompt {drop.id} was dropped for no known reason ({drop.reason})"


def _prompt_violations(steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """Prompts that an epoch has twice or not at all, and those of an epoch that had not begun."""
    seen: dict[DataPlace, list[int]] = defaultdict(list)  # steps
    ids = dict[int, str]()
    told = set[DataPlace]()
    gap = 0  # more prompts that were drawn than are known of
    before: ScheduledStep | None = None
    for step in steps:
        had: list[ScheduledGroup | ScheduledDrop] = [*step.groups, *step.dropped]
        for each in had:
            place = (each.epoch, each.number)
            seen[place].append(step.step)
            if not 0 <= each.number < step.num_prompts:
                yield f"step {step.step}: prompt {each.id} is number {each.number} of {step.num_prompts}"
            if not 0 <= each.epoch <= step.epoch:
                yield f"step {step.step}: prompt {each.id} is of epoch {each.epoch}, and epoch {step.epoch} goes on"
            if ids.setdefault(each.number, each.id) != each.id:
                yield f"step {step.step}: number {each.number} is prompt {each.id}, and was {ids[each.number]}"
            if len(seen[place]) > 1 and place not in told:
                told.add(place)
                yield f"epoch {each.epoch}: prompt {each.id} is there twice, in step {seen[place][0]} and {step.step}"
        again = Counter(step.again)
        for place in sorted(again):
            epoch, number = place
            if again[place] > 1 or place in seen:
                yield f"step {step.step}: {_name(place, ids)} is under way, and is there {again[place]} times or done"
            if not (0 <= epoch <= step.epoch and 0 <= number < step.num_prompts):
                yield f"step {step.step}: {_name(place, ids)} of epoch {epoch} is under way, and cannot have been drawn"
        if before is not None and before.step == step.step - 1:
            for place in sorted({*before.again} - again.keys() - seen.keys()):
                was = f"was under way after step {before.step}, and is neither done nor under way"
                yield f"step {step.step}: {_name(place, ids)} {was}"
        before = step
        drawn = step.epoch * step.num_prompts + step.position
        known = len(seen) + len(again)
        if drawn - known != gap:
            gap = drawn - known
            counts = f"{drawn} prompts were drawn, and {known} were trained, dropped or are under way"
            yield f"step {step.step}: {counts}: {abs(gap)} {'missing' if gap > 0 else 'too many'}"
    if steps:
        yield from _missing(steps[-1], seen.keys() | {*steps[-1].again}, ids)


def _missing(last: ScheduledStep, there: Set[DataPlace], ids: Mapping[int, str]) -> Iterator[str]:
    """Prompts of epochs that are over which are not ``there``; the first of many: a wrong line may say millions."""
    held = Counter(epoch for epoch, number in there if 0 <= epoch < last.epoch and 0 <= number < last.num_prompts)
    for epoch, count in sorted(held.items()):
        missing = last.num_prompts - count
        numbers = (number for number in range(last.num_prompts) if (epoch, number) not in there)
        for number in islice(numbers, min(missing, SHOWN)):
            yield f"epoch {epoch}: {_name((epoch, number), ids)} was neither trained nor dropped for a reason"
        if missing > SHOWN:
            yield f"epoch {epoch}: {missing - SHOWN} more were neither trained nor dropped for a reason"
    if len(held) < last.epoch:
        yield f"the ledger has no prompt of {last.epoch - len(held)} of the {last.epoch} epochs that are over"


def _name(place: DataPlace, ids: Mapping[int, str]) -> str:
    return f"prompt {ids[place[1]]}" if place[1] in ids else f"prompt number {place[1]}"


def _record_violations(run_dir: Path, steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """Where the records of the run contradict its ledger, or lack what it tells of."""
    config = _read_settings(run_dir)
    yield from _doubled(run_dir / SCHEDULE)
    yield from _metrics(run_dir / METRICS, steps)
    yield from _settings(config, steps)
    if steps:
        yield from _samples(run_dir, config, steps)


def _unproven(run_dir: Path, steps: Sequence[ScheduledStep]) -> Iterator[str]:
    """What nothing in ``run_dir`` proves."""
    yield "what the steps computed, with which settings and in how many updates (trainer.replay trains them again)"
    yield "which responses were masked, and that the data have as many prompts"
    if not _read_settings(run_dir):
        yield f"mode, batch and bound of the lines, since {CONFIG} cannot be read"
    absent = [step.step for step in steps if step.step not in sample_files(run_dir, "rollouts")]
    if absent:
        yield f"what was drawn in {_named(absent)}, of which rollouts/ has no file"
    if not (run_dir / METRICS).is_file():
        yield f"when steps ended, since there is no {METRICS}"


def _read_settings(run_dir: Path) -> dict[str, Any]:
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
    told = {row["step"] for row in rows}
    known = {step.step for step in steps}
    last = max(known, default=0)
    for step in sorted(each for each in told if each > last):
        yield f"step {step}: {METRICS} tells of it, and the ledger does not"
    if silent := sorted(known - told - {last}):
        yield f"{_named(silent)}: the ledger tells of {'it' if len(silent) == 1 else 'them'}, and {METRICS} does not"
    for row in rows:
        if wrong := sorted(name for name, value in row.items() if value is not None and not _is_number(value)):
            yield f"step {row['step']}: {METRICS} has {', '.join(wrong[:MAX_STEPS])} that is no number"


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
    last = steps[-1]
    of_config = _of_config(config)
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
    known = {step.step: step for step in steps}
    last = steps[-1].step
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    files = sample_files(run_dir, "rollouts")
    records = sample_files(run_dir, "record")
    for folder, held, key in (("rollouts", files, "save_rollouts"), ("record", records, "record_rollouts")):
        absent = [step for step in known if step not in held and step != last]
        if absent and trainer.get(key, bool(held)):
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
        drawn = of_prompt.get(prompt, [])
        stated = groups.get(prompt, [])
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
    shown = ", ".join(map(str, steps[:MAX_STEPS]))
    more = f" and {len(steps) - MAX_STEPS} more" if len(steps) > MAX_STEPS else ""
    return f"step{'s' * (len(steps) > 1)} {shown}{more}"
