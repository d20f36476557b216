"""The ledger of a run: what holds is proven, and each thing that is wrong with it is named.

A run is played with the sampler itself, in random orders of arrival; then its lines are changed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking.ledger import audit
from mcore_rl.tracking.schedule import (
    SCHEDULE,
    ScheduledDrop,
    ScheduledGroup,
    ScheduledStep,
    ScheduleFile,
    as_row,
    read_schedule,
)

PROMPTS, BATCH, STEPS, BOUND, SAMPLES = 10, 4, 8, 2, 2


def played(seed: int, drops: bool = True) -> list[ScheduledStep]:
    """Steps that take groups in any order, with some dropped; 32 groups and more of 10 prompts: three epochs."""
    draw, sampler = random.Random(seed), PromptSampler(PROMPTS, seed, shuffle=True)
    live: list[tuple[int, int]] = []
    steps = list[ScheduledStep]()
    for step in range(1, STEPS + 1):
        dropped = list[ScheduledDrop]()
        while len(live) < BATCH * (1 + BOUND):
            (place,) = sampler.next_of_epochs(1)
            if drops and draw.random() < 0.15:
                reason = draw.choice(["filter_groups", "surplus"])
                dropped.append(ScheduledDrop(id=name(place[1]), number=place[1], epoch=place[0], reason=reason))
            else:
                live.append(place)
        chosen = sorted(draw.sample(range(len(live)), BATCH))
        groups = [_group(live[each], step, draw) for each in chosen]
        live = [place for each, place in enumerate(live) if each not in chosen]
        state = sampler.state_with(live)
        steps.append(
            ScheduledStep(
                step=step,
                version=step - 1,
                mode="async",
                batch=BATCH,
                bound=BOUND,
                num_prompts=PROMPTS,
                groups=groups,
                dropped=dropped,
                epoch=state["epoch"],
                position=state["position"],
                again=[(epoch, number) for epoch, number in state["again"]],
                updates={"actor": 2},
                settings="xxh3:1",
            )
        )
    return steps


def name(number: int) -> str:
    return f"train.parquet:{number}"


def _group(place: tuple[int, int], step: int, draw: random.Random) -> ScheduledGroup:
    newest = draw.randint(max(0, step - 1 - BOUND), step - 1)
    lost = draw.choice([0, 0, 0, 1, 2])
    return ScheduledGroup(
        id=name(place[1]), number=place[1], epoch=place[0], oldest=max(0, newest - 0), newest=newest,
        samples=SAMPLES, lost=lost, trained=draw.choice([0, SAMPLES - lost, SAMPLES - lost]),
    )  # fmt: skip


def write(directory: Path, steps: list[ScheduledStep]) -> Path:
    directory.mkdir(exist_ok=True)
    file = ScheduleFile(directory / SCHEDULE, keep=-1)
    for step in steps:
        file.write(step)
    file.close()
    lines = [{"step": step.step, "reward/mean": 0.0} for step in steps]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.mark.parametrize("seed", range(20))
def test_a_ledger_that_holds_is_proven_and_comes_back_as_it_was(tmp_path: Path, seed: int) -> None:
    steps = played(seed)
    got = audit(write(tmp_path, steps))
    assert got.violations == (), got.violations
    assert read_schedule(tmp_path / SCHEDULE) == (steps, [])
    of_groups = [group for step in steps for group in step.groups]
    assert got.steps == STEPS and got.trained == sum(group.trained > 0 for group in of_groups)
    assert sum(got.untrained.values()) == sum(len(step.dropped) for step in steps) + sum(
        group.trained == 0 for group in of_groups
    )
    assert got.untrained.get("lost", 0) == sum(group.lost == group.samples for group in of_groups)


def test_every_prefix_of_a_run_holds(tmp_path: Path) -> None:
    steps = played(3)
    for count in range(1, STEPS + 1):
        assert audit(write(tmp_path, steps[:count])).violations == ()


def test_a_line_that_a_kill_cut_short_is_no_line(tmp_path: Path) -> None:
    steps = played(5)
    whole = write(tmp_path, steps).joinpath(SCHEDULE).read_bytes()
    last = len(whole) - len(json.dumps(as_row(steps[-1]))) - 1
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(metrics[:-1]))
    for length in [last, last + 1, *range(last + 2, len(whole) - 1, 97), len(whole) - 2]:
        (tmp_path / SCHEDULE).write_bytes(whole[:length])
        got = audit(tmp_path)
        assert got.violations == () and got.steps == STEPS - 1
        file = ScheduleFile(tmp_path / SCHEDULE, keep=STEPS - 2)  # a resume from the step before
        for step in steps[-2:]:
            file.write(step)
        file.close()
        assert (tmp_path / SCHEDULE).read_bytes() == whole


def test_steps_that_are_trained_again_after_a_resume_count_once(tmp_path: Path) -> None:
    """The abandoned continuation drew in another order."""
    steps, other = played(1), played(1)
    other[4:] = [replace(step, groups=[*step.groups][::-1]) for step in other[4:]]
    write(tmp_path, other)
    file = ScheduleFile(tmp_path / SCHEDULE, keep=4)
    for step in steps[4:]:
        file.write(step)
    file.close()
    assert audit(tmp_path).violations == ()
    assert read_schedule(tmp_path / SCHEDULE)[0] == steps


def with_groups(steps: list[ScheduledStep], at: int, *groups: ScheduledGroup) -> list[ScheduledStep]:
    return [replace(step, groups=groups) if step.step == at else step for step in steps]


def changed(steps: list[ScheduledStep], at: int, **fields: Any) -> list[ScheduledStep]:
    """The first group of step ``at`` with other fields."""
    first, *others = steps[at - 1].groups
    return with_groups(steps, at, replace(first, **fields), *others)


def of_line(steps: list[ScheduledStep], at: int, **fields: Any) -> list[ScheduledStep]:
    return [replace(step, **fields) if step.step == at else step for step in steps]


def doubled(steps: list[ScheduledStep]) -> list[ScheduledStep]:
    """A group of step 2 is trained again in step 4, in place of the one that should have been."""
    return with_groups(steps, 4, steps[1].groups[0], *steps[3].groups[1:])


def trained_and_dropped(steps: list[ScheduledStep]) -> list[ScheduledStep]:
    of = steps[1].groups[0]
    drop = ScheduledDrop(id=of.id, number=of.number, epoch=of.epoch, reason="filter_groups")
    return of_line(steps, 3, dropped=[*steps[2].dropped, drop])


Mutant = Callable[[list[ScheduledStep]], list[ScheduledStep]]
MUTANTS: dict[str, tuple[Mutant, str]] = {
    "a prompt twice": (doubled, "is there twice, in step 2 and 4"),
    "a prompt missing": (doubled, "was neither trained nor dropped for a reason"),
    "a place too many": (doubled, "step 4: .* 1 missing"),
    "trained and dropped": (trained_and_dropped, "is there twice, in step 2 and 3"),
    "a later epoch": (lambda steps: changed(steps, 1, epoch=2), "is of epoch 2, and epoch 1 goes on"),
    "the wrong epoch": (lambda steps: changed(steps, 1, epoch=1), "epoch 0: .* was neither trained nor dropped"),
    "a negative epoch": (lambda steps: changed(steps, 1, epoch=-1), "is of epoch -1"),
    "a step missing": (lambda steps: steps[:2] + steps[3:], "step 3: schedule.jsonl has no line of it"),
    "steps missing": (lambda steps: steps[:2] + steps[5:], "steps 3 to 5: schedule.jsonl has no line of them"),
    "the first step missing": (lambda steps: steps[1:], "step 1: schedule.jsonl has no line of it"),
    "a group missing": (lambda steps: with_groups(steps, 3, *steps[2].groups[1:]), "step 3: 3 groups, and data.train_"),
    "a drop missing": (
        lambda steps: [replace(step, dropped=[]) for step in steps],
        "prompts were drawn, and .* were trained, dropped or are under way: . missing",
    ),
    "a drop without a reason": (
        lambda steps: [replace(step, dropped=[replace(each, reason="")for each in step.dropped]) for step in steps],
        "was dropped for no known reason",
    ),
    "too old": (lambda steps: changed(steps, 5, oldest=1, newest=1), "version 1, more than 2 before 4"),
    "of the future": (lambda steps: changed(steps, 5, newest=5), "version 5, which was not there yet"),
    "a version skipped": (lambda steps: of_line(steps, 4, version=4), "step 4: began with weights of version 4, not 3"),
    "no such prompt": (lambda steps: changed(steps, 2, number=PROMPTS), "is number 10 of 10"),
    "another name": (lambda steps: changed(steps, 2, id="other:1"), "is prompt other:1, and was|and was other:1"),
    "too many trained": (lambda steps: changed(steps, 2, trained=3, lost=0), "0 lost and 3 trained of 2 responses"),
    "lost and trained": (lambda steps: changed(steps, 2, trained=2, lost=1), "1 lost and 2 trained of 2 responses"),
    "given back and trained": (
        lambda steps: of_line(steps, 8, again=[*steps[7].again, (0, steps[0].groups[0].number)]),
        "is under way, and is there 1 times or done",
    ),
    "given back twice": (
        lambda steps: of_line(steps, 8, again=[*steps[7].again, steps[7].again[0]]),
        "is under way, and is there 2 times or done",
    ),
    "lost on the way": (lambda steps: of_line(steps, 8, again=steps[7].again[1:]), "step 8: .*: 1 missing"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_is_named(tmp_path: Path, mutant: str) -> None:
    change, says = MUTANTS[mutant]
    seed = next(seed for seed in range(50) if played(seed)[0].epoch == 1 and played(seed)[1].dropped)
    got = audit(write(tmp_path, change(played(seed)))).violations
    assert any(re.search(says, each) for each in got), got


def test_other_records_are_compared(tmp_path: Path) -> None:
    steps = played(0)
    write(tmp_path, steps)
    (tmp_path / "config.yaml").write_text("trainer: {save_rollouts: false}")  # from step 3 on
    (tmp_path / "rollouts").mkdir()
    ids = [group.id for group in steps[1].groups for _ in range(SAMPLES)]
    path = tmp_path / "rollouts" / "step_2.parquet"
    pq.write_table(pa.table({"prompt_id": ids}), path)
    assert audit(tmp_path).violations == ()
    pq.write_table(pa.table({"prompt_id": [ids[0], *ids[:-1]]}), path)
    (said,) = audit(tmp_path).violations
    assert said.startswith("step 2: rollouts/step_2.parquet has other responses than the ledger, of train.parquet:")
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in audit(tmp_path).violations[0]
    path.unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS + 1}) + "\n")
    assert audit(tmp_path).violations == (f"step {STEPS + 1}: metrics.jsonl tells of it, and the ledger does not",)


@pytest.mark.parametrize("line", ['{"step": 3}', '{"step": 3, "groups": 7}', '{"step": 3, "groups": {"id": [1]}}'])
def test_a_line_of_another_form_is_told_of_by_its_step(tmp_path: Path, line: str) -> None:
    write(tmp_path, played(0))
    with (tmp_path / SCHEDULE).open("a") as file:
        file.write(line + "\n")
    assert audit(tmp_path).violations[0].startswith("step 3: its line of schedule.jsonl is not of this form")


def test_the_command_says_what_holds_and_what_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, played(2))
    assert main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("8 steps, ") and "is there exactly once" in said
    write(tmp_path, doubled(played(2)))
    assert main(["audit", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("3 violations:\n  - epoch 0: prompt train.parquet:") and "  - step 4: " in said
    (tmp_path / SCHEDULE).unlink()
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no schedule.jsonl" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ConfigError):
        audit(tmp_path)


def test_what_is_missing_is_named_in_every_epoch_that_is_over(tmp_path: Path) -> None:
    steps = played(0, drops=False)
    over = [(step.step, group) for step in steps for group in step.groups if group.epoch < steps[-1].epoch]
    assert {group.epoch for _, group in over} == {0, 1, 2}
    for at, group in over:
        fewer = [each for each in steps[at - 1].groups if each is not group]
        got = audit(write(tmp_path, with_groups(steps, at, *fewer))).violations
        names = (f"prompt {group.id}", f"prompt number {group.number}")  # by number if it is nowhere else
        assert {f"epoch {group.epoch}: {name} was neither trained nor dropped for a reason" for name in names} & {*got}
