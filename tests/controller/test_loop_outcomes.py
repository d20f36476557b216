"""In which order a role that learns from outcomes is scored and trained, and what it is handed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.config.compose import compose
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Pass, Update
from mcore_rl.config.step_plan import step_plan
from mcore_rl.controller.loop import StepState, run_stage
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.updates import send
from mcore_rl.ground.types import TrainBatch
from mcore_rl.runtime.shard import WorkerInput
from mcore_rl.tracking.clock import Clock
from tests.controller.step.test_updates import Ranks
from tests.support.batches import LENGTHS, ragged

ROLE = ROLES["process_reward"]
ALL = list(range(len(LENGTHS)))


class Calls(Ranks):
    """Ranks that write down what they are asked: (fields, snapshot, temperature) of a pass, or "train"."""

    def __init__(self, dp: int) -> None:
        super().__init__(dp)
        self.calls: list[Any] = []

    def _score(self, rank: int, given: WorkerInput[None], makes: Sequence[str], *args: Any) -> Any:
        temperature, (snapshot,) = args
        self.calls += [(makes[0], snapshot, temperature)] * (rank == 0)
        return super()._score(rank, given, makes, *args)

    def _train(self, rank: int, given: WorkerInput[Any], *args: Any) -> Any:
        self.calls += ["train"] * (rank == 0)
        return super()._train(rank, given, *args)


class Screen:
    """Where a run says what it does."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def now(self, what: str) -> None:
        self.said.append(what)


LIVE, COPY = ("process_logprobs_T", None, 1.0), ("process_ref_logprobs_T", "process_reward_copy", 1.0)


@pytest.mark.parametrize(
    ("when", "calls", "told"),
    [("before", [COPY, "train", LIVE], ["rest"]), ("after", [COPY, LIVE, "train"], [])],
)
def test_before_and_after(when: str, calls: list[Any], told: list[str]) -> None:
    """At temperature 1, whatever the sampling's; after ``before``, what was scored with leaves the device."""
    run = object.__new__(Run)  # without processes
    overrides = ["algorithm=prime", "model.path=m", f"process_reward.update={when}", "rollout.temperature=0.7"]
    run.config = compose(RunConfig, "train", overrides)
    group, run.clock, run.tracker = Calls(2), Clock(), Screen()  # type: ignore[assignment]
    run.groups, run.preemption = {ROLE.name: group}, Preemption()
    run.losses = {ROLE.name: ROLE.make_loss(run.config.role_config(ROLE))}
    plain, outcome_S = ragged(101), torch.arange(len(LENGTHS)).float() / 10
    batch = TrainBatch(
        lengths_S=LENGTHS, tokens_T=plain.tokens_T, mask_T=plain.mask_T, extra_S={"outcome_S": outcome_S}
    )
    outcomes = Outcomes(scores_S=outcome_S, truncated_S=outcome_S > 1)
    groups = StepBatch(batch=batch, group_S=torch.arange(len(LENGTHS)) // 2, outcomes=outcomes)
    shared = send(group, batch, [ALL])
    state = StepState(step=1, shared=shared, groups=groups, minibatches={ROLE.name: [ALL]})

    async def run_own() -> None:
        for stage in step_plan(run.config):
            if isinstance(stage, Pass | Update) and stage.role == ROLE.name:
                await run_stage(run, stage, state)

    asyncio.run(run_own())
    updated = state.updated[ROLE.name]
    assert group.calls == calls and group.told == told
    assert "process_logprobs_T" in shared and "process_ref_logprobs_T" in shared
    assert updated.trained == [int(plain.mask_T.sum())]
    handed = [each for rank in range(2) for each in group.trained[rank][0].batches]
    assert all({name for name, _ in each.token_fields()} == {"tokens_T", "mask_T", COPY[0]} for each in handed)
    assert sorted(x for each in handed for x in each.extra_S["outcome_S"].tolist()) == sorted(outcome_S.tolist())
    (counts,), temperature = group.trained[0][1][1], group.trained[0][1][2]
    assert (counts.loss, temperature) == (7.0, 1.0), "a mean over the responses that have a trained token"
