"""The records of a run against its ledger, both ways: each mutant of a recorded run is named.

The run is written by the package's own files, from steps that a sampler played.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mcore_rl.tracking.ledger import audit
from mcore_rl.tracking.samples import write_samples
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledStep
from tests.tracking.test_ledger import BATCH, BOUND, PROMPTS, STEPS, played, write

CONFIG = {
    "trainer": {"mode": "async", "save_rollouts": True, "record_rollouts": True},
    "data": {"train_batch_size": BATCH},
    "async": {"max_staleness": BOUND},
    "rollout": {"partial": False},
}


def rows_of(step: ScheduledStep) -> list[dict[str, Any]]:
    """Samples as a run writes them: the first of a group has its oldest tokens, and the last its newest."""
    rows = []
    for group in step.groups:
        for sample in range(group.samples):
            version = group.newest if sample == group.samples - 1 else group.oldest
            finish = "abort" if sample < group.lost else "stop"
            if group.lost and finish == "stop":
                spans = [{"version": each, "num_tokens": 3} for each in (group.oldest, group.newest)]
            else:
                spans = [{"version": version, "num_tokens": 3}]
            rows.append(
                {"step": step.step, "prompt_id": group.id, "sample": sample, "finish": finish, "versions": spans}
            )
    return rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    steps = played(3)
    write(tmp_path, steps)
    for step in steps:
        write_samples(tmp_path, step.step, "rollouts", rows_of(step))
        write_samples(tmp_path, step.step, "record", [{"step": step.step}])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def test_the_run_itself_holds_and_what_is_not_proven_is_said(run: Path) -> None:
    got = audit(run)
    assert got.violations == ()
    computed, masked = got.unproven
    assert computed.startswith("what the steps computed") and "updates" in computed and "masked" in masked
    (run / "config.yaml").unlink()
    (run / "rollouts" / f"step_{STEPS}.parquet").unlink()  # it may not have been written yet
    got = audit(run)
    assert got.violations == ()
    said = "\n".join(got.lines())
    assert "not proven: mode, batch and bound of the lines" in said
    assert f"not proven: what was drawn in step {STEPS}" in said


def test_a_run_that_was_killed_before_it_wrote_all_of_its_last_step_holds(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    (run / "rollouts" / f"step_{STEPS}.parquet").unlink()
    write_samples(run, STEPS + 1, "record", [{"step": STEPS + 1}])
    assert audit(run).violations == ()


def of_lines(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """A mutant of the lines of a file."""

    def mutate(run: Path) -> None:
        lines = (run / name).read_text().splitlines()
        (run / name).write_text("".join(f"{line}\n" for line in change(lines)))

    return mutate


def of_line(name: str, at: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A mutant of the line ``at`` of a file."""

    def mutate(lines: list[str]) -> list[str]:
        row = json.loads(lines[at])
        change(row)
        return [*lines[:at], json.dumps(row), *lines[at + 1 :]]

    return of_lines(name, mutate)


def column(name: str, at: int, values: Callable[[list[Any]], None]) -> Callable[[Path], None]:
    """A mutant of a column of the groups of the line ``at`` of the ledger."""
    return of_line(SCHEDULE, at, lambda row: values(row["groups"][name]))


def of_rollouts(step: int, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    """A mutant of the samples of a step."""

    def mutate(run: Path) -> None:
        path = run / "rollouts" / f"step_{step}.parquet"
        pq.write_table(pa.Table.from_pylist(change(pq.read_table(path).to_pylist())), path)

    return mutate


def of_config(**changes: dict[str, Any]) -> Callable[[Path], None]:
    def mutate(run: Path) -> None:
        config = {key: {**value, **changes.get(key, {})} for key, value in CONFIG.items()}  # type: ignore[dict-item]
        (run / "config.yaml").write_text(yaml.safe_dump(config))

    return mutate


def set_at(place: int, value: Any) -> Callable[[list[Any]], None]:
    def change(values: list[Any]) -> None:
        values[place] = value

    return change


def put(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update(fields)


def again_at(place: tuple[int, int]) -> Callable[[Path], None]:
    """The first prompt that is under way after step 4 is another one; before, it was under way, too."""

    def mutate(row: dict[str, Any]) -> None:
        assert row["again"]
        row["again"][0] = list(place)

    return of_line(SCHEDULE, 3, mutate)


def all_bounds(lines: list[str]) -> list[str]:
    return [json.dumps({**json.loads(line), "bound": 9}) for line in lines]


def of_first(**fields: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [{**rows[0], **fields}, *rows[1:]]


def delete(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def extra(kind: Any, step: int) -> Callable[[Path], None]:
    def mutate(run: Path) -> None:
        write_samples(run, step, kind, [{"step": step, "prompt_id": "x"}])

    return mutate


MUTANTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "ledger: a line missing": (of_lines(SCHEDULE, lambda lines: lines[:3] + lines[4:]), "step 4: "),
    "ledger: the first line missing": (of_lines(SCHEDULE, lambda lines: lines[1:]), "step 1: "),
    "ledger: the last line missing": (of_lines(SCHEDULE, lambda lines: lines[:-1]), "metrics.jsonl tells of it"),
    "ledger: a line doubled": (of_lines(SCHEDULE, lambda lines: [*lines[:3], *lines[2:]]), "has 2 lines of it"),
    "ledger: a line is no JSON": (of_lines(SCHEDULE, lambda lines: [*lines[:2], "{", *lines[3:]]), "step 3: "),
    "ledger: bound raised": (of_line(SCHEDULE, 3, put(bound=9)), "has bound 9, not 2"),
    "ledger: bound raised in all": (of_lines(SCHEDULE, all_bounds), "has bound 9, and config.yaml says 2"),
    "ledger: bound is a text": (of_line(SCHEDULE, 3, put(bound="2")), "step 4: its line"),
    "ledger: mode": (of_line(SCHEDULE, 3, put(mode="sync")), "has mode sync, not async"),
    "ledger: another batch": (of_line(SCHEDULE, 3, put(batch=BATCH + 1)), "step 4: "),
    "ledger: more prompts": (of_line(SCHEDULE, 3, put(num_prompts=11)), "has num_prompts 11, not 10"),
    "ledger: a million million prompts": (
        of_lines(SCHEDULE, lambda lines: [json.dumps({**json.loads(line), "num_prompts": 10**12}) for line in lines]),
        f"{10**12 - PROMPTS - 100} more were neither trained",
    ),
    "ledger: a thousand million epochs": (of_line(SCHEDULE, STEPS - 1, put(epoch=10**9)), "has no prompt of 9999999"),
    "ledger: version": (of_line(SCHEDULE, 3, put(version=7)), "began with weights of version 7"),
    "ledger: version is a text": (of_line(SCHEDULE, 3, put(version="3")), "step 4: its line"),
    "ledger: position": (of_line(SCHEDULE, 3, lambda row: row.update(position=row["position"] + 1)), "1 missing"),
    "ledger: epoch is null": (of_line(SCHEDULE, 3, put(epoch=None)), "step 4: its line"),
    "ledger: a field missing": (of_line(SCHEDULE, 3, lambda row: row.pop("groups")), "step 4: its line"),
    "ledger: a field too many": (of_line(SCHEDULE, 3, put(more=1)), "step 4: its line"),
    "ledger: the number of a prompt is a text": (column("number", 2, set_at(0, "3")), "step 3: its line"),
    "ledger: the samples are a text": (column("samples", 2, set_at(0, "2")), "step 3: its line"),
    "ledger: more samples": (column("samples", 2, set_at(0, 3)), "other responses than the ledger"),
    "ledger: another prompt": (column("id", 2, set_at(0, "train.parquet:77")), "is prompt train.parquet:77"),
    "ledger: newer tokens": (column("newest", 4, set_at(0, 9)), "version 9, which was not there yet"),
    "ledger: other lost": (column("lost", 2, lambda values: set_at(0, 1 - min(1, values[0]))(values)), "step 3: "),
    "ledger: versions are null": (
        of_line(SCHEDULE, 2, lambda row: row["groups"].update(oldest=[None] * BATCH, newest=[None] * BATCH)),
        "and the ledger says none",
    ),
    "ledger: the oldest version is null": (column("oldest", 2, set_at(0, None)), "and the ledger says none"),
    "ledger: another prompt under way": (again_at((9, 9)), "of epoch 9 is under way, and cannot have been drawn"),
    "ledger: a prompt of a number too high is under way": (again_at((0, PROMPTS)), "cannot have been drawn"),
    "ledger: a prompt that is under way vanishes": (again_at((0, 0)), "is neither done nor under way"),
    "metrics: a number is NaN": (
        of_lines("metrics.jsonl", lambda lines: [*lines[:3], lines[3][:-1] + ', "x": NaN}', *lines[4:]]),
        "has x that is no number",
    ),
    "metrics: the file missing": (delete("metrics.jsonl"), "metrics.jsonl does not"),
    "metrics: a line missing": (of_lines("metrics.jsonl", lambda lines: lines[:3] + lines[4:]), "step 4: the ledger"),
    "metrics: a line doubled": (of_lines("metrics.jsonl", lambda lines: [*lines[:3], *lines[2:]]), "has 2 lines"),
    "metrics: a line of a later step": (
        of_lines("metrics.jsonl", lambda lines: [*lines, '{"step": 99}']), "step 99: metrics.jsonl tells of it",
    ),
    "metrics: a number is a text": (of_line("metrics.jsonl", 3, put(**{"reward/mean": "0.5"})), "that is no number"),
    "metrics: a step is a text": (of_line("metrics.jsonl", 3, put(step="4")), "step 4: the ledger tells of it"),
    "rollouts: a file missing": (delete("rollouts/step_3.parquet"), "step 3: rollouts/ has no file of it"),
    "rollouts: a file too many": (extra("rollouts", STEPS + 2), "the ledger ends with step 8"),
    "rollouts: a file cut": (lambda run: _cut(run / "rollouts" / "step_3.parquet"), "cannot be read"),
    "rollouts: a response missing": (of_rollouts(3, lambda rows: rows[1:]), "other responses than the ledger"),
    "rollouts: a response doubled": (of_rollouts(3, lambda rows: [rows[0], *rows]), "other responses"),
    "rollouts: another prompt": (of_rollouts(3, of_first(prompt_id="x")), "other responses than the ledger"),
    "rollouts: another step": (of_rollouts(3, of_first(step=2)), "has responses of step 2"),
    "rollouts: of another version": (
        of_rollouts(3, lambda rows: [{**row, "versions": '[{"version": 40, "num_tokens": 3}]'} for row in rows]),
        "has tokens of versions 40 to 40",
    ),
    "record: a file missing": (delete("record/step_3.parquet"), "step 3: record/ has no file of it"),
    "config: another mode": (of_config(trainer={"mode": "one_step_off"}), "config.yaml says one_step_off"),
    "config: another batch": (of_config(data={"train_batch_size": 8}), "config.yaml says 8"),
    "config: a lower bound": (of_config(**{"async": {"max_staleness": 1}}), "config.yaml says 1"),
}  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_no_mutant_survives(run: Path, mutant: str) -> None:
    mutate, said = MUTANTS[mutant]
    mutate(run)
    got = audit(run)
    assert any(said in each for each in got.violations), got.violations
    assert next(iter(got.lines())).endswith(":")
