"""All rows, by section, and the row of a key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mcore_rl.from_verl.facts import PROGRAM, keys_of
from mcore_rl.from_verl.row import KeyRow
from mcore_rl.from_verl.rows_roles import ACTOR_ROWS, CRITIC_ROWS, MODEL_ROWS, REFERENCE_ROWS
from mcore_rl.from_verl.rows_rollout import EVALUATION_ROWS, GENERATION_ROWS, REWARD_ROWS, ROLLOUT_ROWS
from mcore_rl.from_verl.rows_run import ALGORITHM_ROWS, DATA_ROWS, SFT_ROWS, TRAINER_ROWS


@dataclass(frozen=True)
class Section:
    """Rows that belong together.  prefix: of verl's keys, left out on the page.  program: ours that reads the keys."""

    title: str
    prefix: str
    rows: list[KeyRow]
    program: str = "train"


SECTIONS = (
    Section("Data", "data.", DATA_ROWS),
    Section("Model", "actor_rollout_ref.model.", MODEL_ROWS),
    Section("Actor", "actor_rollout_ref.actor.", ACTOR_ROWS),
    Section("Reference", "actor_rollout_ref.ref.", REFERENCE_ROWS),
    Section("Rollout", "actor_rollout_ref.rollout.", ROLLOUT_ROWS),
    Section("Algorithm", "algorithm.", ALGORITHM_ROWS),
    Section("Critic", "critic.", CRITIC_ROWS),
    Section("Rewards", "", REWARD_ROWS),
    Section("Trainer", "", TRAINER_ROWS),
    Section("Supervised fine-tuning", "", SFT_ROWS, "sft"),
    Section("Generation", "", GENERATION_ROWS, "generate"),
    Section("Evaluation", "", EVALUATION_ROWS, "evaluate"),
)


@cache
def rows_of(program: str) -> tuple[KeyRow, ...]:
    """Every row of a program of ours."""
    return tuple(row for section in SECTIONS if section.program == program for row in section.rows)


def rows_for(key: str, program: str = "train") -> list[KeyRow]:
    """The rows about a key of verl's: the ones that name it, else those of the narrowest pattern that has it."""
    if named := _named(program).get(key):
        return named
    rows = [row for row in rows_of(program) if "*" in row.verl and row.matches(key)]
    if not rows:
        return []
    narrowest = max(map(_narrowness, rows))
    return [row for row in rows if _narrowness(row) == narrowest]


def _narrowness(row: KeyRow) -> tuple[int, int]:
    """What a pattern says before its first asterisk, then all that it says."""
    return len(row.verl.partition("*")[0]), len(row.verl)


@cache
def _named(program: str) -> dict[str, list[KeyRow]]:
    """Key -> the rows that name it."""
    named: dict[str, list[KeyRow]] = {}
    for row in rows_of(program):
        for name in row.names if "*" not in row.verl else ():
            named.setdefault(name, []).append(row)
    return named


def row_for(key: str, program: str = "train") -> KeyRow | None:
    """The row about a key of verl's; None: there is no such key of verl's."""
    return next(iter(rows_for(key, program)), None)


def config_of(program: str, keys: set[str]) -> str:
    """verl's configuration that a program of ours stands for: of several, the one that has most of ``keys``."""
    configs = [config for config, each in PROGRAM.items() if each == program]
    return max(configs, key=lambda config: len(keys & keys_of(config).keys()))
