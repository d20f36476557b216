"""The ledger of a run: every prompt is trained exactly once in each epoch, or dropped or lost for a reason with a name.

``audit`` proves it from schedule.jsonl, against the place in the data that each line states, and against what
config.yaml, metrics.jsonl and the samples say (``other_records``).  It trusts no counter of the run but that place, and
knows nothing of how prompts are drawn: it only counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from mcore_rl.errors import ConfigError, Violation
from mcore_rl.tracking.other_records import record_violations, unproven
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledDrop, ScheduledGroup, ScheduledStep, read_schedule

REASONS = ("filter_groups", "surplus")  # for which a group that was drawn may be dropped
SHOWN = 100  # prompts that are missing in one epoch, and named
LOST, MASKED = "lost", "mask"  # why nothing of a group that was trained is in the loss
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
    violations += [*_step_violations(steps, wrong), *_prompt_violations(steps), *record_violations(run_dir, steps)]
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
        unproven=tuple(unproven(run_dir, steps)),
    )


def _step_violations(steps: Sequence[ScheduledStep], wrong: Sequence[int]) -> Iterator[str]:
    """Steps that are missing, and what lines contradict by themselves."""
    present, end = {step.step for step in steps} | {*wrong}, 0
    for step in sorted(present):
        if step > end + 1:
            missing = f"step {end + 1}" if step == end + 2 else f"steps {end + 1} to {step - 1}"
            yield f"{missing}: {SCHEDULE} has no line of {'it' if step == end + 2 else 'them'}"
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
    ids, told, gap = dict[int, str](), set[DataPlace](), 0  # more prompts that were drawn than are known of
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
