"""Each sequence is scored by its own teacher, whatever ranks there are, and by nobody else's."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mcore_rl.config.role_table import ROLES, TEACHER_HIDDEN, TEACHER_SCORED
from mcore_rl.config.roles import Teachers
from mcore_rl.config.stages import TOKENS
from mcore_rl.controller.step.updates import assignments, run_pass, send
from mcore_rl.ground.types import TAUGHT_BY, TrainBatch
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput
from tests.support.batches import LENGTHS, ragged
from tests.support.in_process_group import InProcessGroup

TEACHERS = Teachers("rest", {"math": "math", "sums": "math", "code": "code", "logic": "logic"})
# Of teachers 0, 1, 2 and 3: the rest, "math" and "sums", nothing of "code", and one of "logic".
NAMES = (0, 1, 2, 0, 1, 4, 2, 0, 0, 1)
NUMBERS = [TEACHERS.numbers[name] for name in NAMES]
DRAWN, HIDDEN = ("teacher_logprobs_T",), (TEACHER_HIDDEN, TEACHER_SCORED)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_rank_has_some_of_every_teacher_that_has_any(num_ranks: int) -> None:
    taught = assignments(LENGTHS, np.array(NUMBERS), num_ranks)
    assert list(taught) == [0, 1, 3], "one that teaches nothing in the step is left out"
    for teacher, ranks in taught.items():
        own = [index for index, number in enumerate(NUMBERS) if number == teacher]
        scored = [index for of_rank in ranks for index in of_rank]
        assert len(ranks) == num_ranks and all(ranks) and set(scored) == set(own)
        assert len(scored) == max(len(own), num_ranks), "none more often than the ranks need"


def test_tokens_are_balanced_within_a_teacher() -> None:
    lengths, teacher_S = [10, 10, 1, 1, 7, 4, 4, 1], np.array([0, 0, 0, 0, 1, 1, 1, 1])
    for ranks in assignments(lengths, teacher_S, 2).values():
        first, second = (sum(lengths[index] for index in of_rank) for of_rank in ranks)
        assert abs(first - second) <= 1


class Ranks(InProcessGroup):
    """They answer with numbers that tell a token and the weights that scored it."""

    def __init__(self, dp: int) -> None:
        super().__init__(dp, score=self._score)
        self.snapshots: list[Sequence[str | None]] = []
        self.num_sequences = 0

    def _score(
        self,
        _: int,
        given: WorkerInput[None],
        makes: Sequence[str],
        temperature: float,
        snapshots: Sequence[str | None],
    ) -> WorkerOutput[None]:
        assert temperature == 0.7
        each = self._each(given, snapshots)
        if makes == HIDDEN:
            made = [
                Shard.of_hidden(batch, says(batch, by)[batch.mask_T].unsqueeze(1).expand(-1, 3).bfloat16())
                for batch, by in each
            ]
        else:
            made = [Shard.of(batch.lengths_S, **{makes[0]: says(batch, by)}) for batch, by in each]
        return WorkerOutput(None, Shard.joined(made))

    def _each(self, given: WorkerInput[None], snapshots: Sequence[str | None]) -> list[tuple[TrainBatch, str | None]]:
        self.snapshots.append(snapshots)
        self.num_sequences += sum(len(batch.lengths_S) for batch in given.batches)
        assert all({name for name, _ in batch.token_fields()} == set(TOKENS) for batch in given.batches)
        return list(zip(given.batches, snapshots, strict=True))


def says(batch: TrainBatch, snapshot: str | None) -> torch.Tensor:
    """Exact in bfloat16."""
    number = 0 if snapshot is None else int(snapshot.removeprefix("teacher_"))
    return (batch.tokens_T % 32 + 32 * number).float()


def whole() -> TrainBatch:
    batch = ragged(101)
    return TrainBatch(
        lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T,
        extra_S={TAUGHT_BY: torch.tensor(NAMES, dtype=torch.float32)},
    )  # fmt: skip


def scored_batch(makes: tuple[str, ...], group: InProcessGroup) -> TrainBatch:
    """What an update that reads what the teachers make is handed, in the order of the batch."""
    batch = whole()
    shared = send(Ranks(2), batch, [range(len(LENGTHS))])
    stage = ROLES["teacher"].scores(*makes)
    assert asyncio.run(run_pass(group, shared, stage, temperature=0.7, teachers=TEACHERS)) is None
    (refs,) = shared.shard_refs([[range(len(LENGTHS))]], (*TOKENS, *makes), [None])
    portion: Portion[None] = pickle.loads(refs.portion)
    (handed,) = portion.join([pickle.loads(shard) for shard in refs.shards])  # type: ignore[arg-type]
    return handed


@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("makes", [DRAWN, HIDDEN], ids=["drawn", "hidden"])
def test_the_columns_are_those_of_each_sequence_s_own_teacher(makes: tuple[str, ...], dp: int) -> None:
    group = Ranks(dp)
    batch = scored_batch(makes, group)
    assert group.snapshots == [[None, "teacher_1", "teacher_3"]] * dp, "all ranks in one order"
    parts = [whole().select([index]) for index in range(len(LENGTHS))]
    names = [None if number == 0 else f"teacher_{number}" for number in NUMBERS]
    expected_T = torch.cat([says(part, name) for part, name in zip(parts, names, strict=True)])
    if makes == HIDDEN:
        assert batch.teacher_hidden_MH is not None and torch.equal(
            batch.teacher_hidden_MH[:, 0].float(), expected_T[batch.mask_T]
        )
    else:
        assert torch.equal(batch.extra_T["teacher_logprobs_T"], expected_T)
    counts = [NUMBERS.count(number) for number in (0, 1, 3)]
    assert group.num_sequences == sum(max(count, dp) for count in counts), "not every teacher scores everything"
    assert torch.equal(batch.extra_S[TAUGHT_BY], whole().extra_S[TAUGHT_BY])
