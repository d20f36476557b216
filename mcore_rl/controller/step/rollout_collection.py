"""Responses are drawn and graded: each is graded while others are still drawn.

Dynamic sampling (arXiv:2503.14476, section 3.2) is here too: groups without signal make room for those of fresh
prompts, up to a bound; what is still missing then is filled with groups without signal, so that a step is always whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.rollout import RolloutConfig, ValidationConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.step.batch_assembly import Trajectory, reward_request
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import Score
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.protocol import Prompt, Sample, SampleSource, Sampling, requests_of

Report = Callable[[int, int], None]  # responses finished, responses in all
STEPS_APART = 1_000_003  # seeds of neighbouring steps and runs do not meet


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Of one step.  greedy: score of each prompt's greedy response.  num_batches: of prompts.  num_dropped: groups."""

    trajectories: list[Trajectory]
    greedy: list[float] | None
    num_batches: int
    num_dropped: int


class RolloutCollector:
    """Draws from ``engine`` and grades with ``scorer`` or ``reward_model``, as the row asks, and as ``run`` says."""

    def __init__(
        self, engine: SampleSource, scorer: Scorer, run: RunConfig, reward_model: RewardModel | None = None
    ) -> None:
        self.engine, self.scorer, self._run, self._reward_model = engine, scorer, run, reward_model

    async def step(self, step: int, next_rows: Callable[[int], list[PromptRow]], report: Report) -> Drawn:
        """The groups of training step ``step``, of rows that ``next_rows(count)`` gives, in their order."""
        run = self._run
        kept: list[list[Trajectory]] = []
        spare: list[list[Trajectory]] = []
        wanted, batches = run.data.train_batch_size, 0
        while len(kept) < wanted and (batches == 0 or self._may_draw_more(batches)):
            rows = next_rows(wanted if run.data.gen_batch_size is None else run.data.gen_batch_size)
            groups = await self._groups(step, batches, rows, report)
            batches += 1
            for group in groups:
                (kept if self._teaches(group) else spare).append(group)
        dropped = len(spare) if len(kept) >= wanted else len(spare) - (wanted - len(kept))
        chosen = [*kept, *spare][:wanted]
        numbered = [[replace(each, group=number) for each in group] for number, group in enumerate(chosen)]
        greedy = [group.pop().score.value for group in numbered] if run.needs_greedy else None
        return Drawn(
            trajectories=[each for group in numbered for each in group],
            greedy=greedy,
            num_batches=batches,
            num_dropped=dropped,
        )

    async def validation(self, rows: Sequence[PromptRow], report: Report) -> list[Trajectory]:
        """``rollout.val_kwargs.n`` responses to each of ``rows``, drawn as validation draws; the same every time."""
        draw = self._run.rollout.val_kwargs
        sampling = sampling_of(self._run.rollout, draw, self._run.rollout.seed)
        groups = await self._draw([(row.id, row) for row in rows], draw.n, sampling, report)
        return [each for group in groups for each in group]

    def _may_draw_more(self, batches: int) -> bool:
        filtering = self._run.algorithm.filter_groups
        return filtering.enable and batches < filtering.max_num_gen_batches

    def _teaches(self, group: Sequence[Trajectory]) -> bool:
        if not self._run.algorithm.filter_groups.enable:
            return True
        scores = [each.score.value for each in group[: self._run.rollout.n]]
        return min(scores) < max(scores)

    async def _groups(self, step: int, batch: int, rows: Sequence[PromptRow], report: Report) -> list[list[Trajectory]]:
        rollout = self._run.rollout
        sampling = sampling_of(rollout, rollout, rollout.seed * STEPS_APART + step)
        # A small data set may give a prompt twice in a step: its place in the step tells the two apart.
        named = [(f"{batch}.{place}/{row.id}", row) for place, row in enumerate(rows)]
        if not self._run.needs_greedy:
            return await self._draw(named, rollout.n, sampling, report)
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        sampled, baselines = await asyncio.gather(
            self._draw(named, rollout.n, sampling, report),
            self._draw([(f"greedy/{name}", row) for name, row in named], 1, greedy, lambda done, of: None),
        )
        return [[*group, *baseline] for group, baseline in zip(sampled, baselines, strict=True)]

    async def _draw(
        self, named: Sequence[tuple[str, PromptRow]], n: int, sampling: Sampling, report: Report
    ) -> list[list[Trajectory]]:
        prompts = [Prompt(id=name, tokens=row.tokens) for name, row in named]
        rows = {name: (place, row) for place, (name, row) in enumerate(named)}
        requests = requests_of(prompts, n)
        graded: list[asyncio.Task[tuple[Sample, Score]]] = []
        try:
            async with asyncio.TaskGroup() as grading:  # a reward model that dies ends the drawing, and the reverse
                async for sample in self.engine.generate(requests, sampling):
                    graded.append(grading.create_task(self._grade(rows[sample.prompt_id][1], sample, sampling)))
                    report(len(graded), len(requests))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        groups: list[list[Trajectory]] = [[] for _ in named]
        for sample, score in (task.result() for task in graded):
            place, row = rows[sample.prompt_id]
            groups[place].append(Trajectory(row=row, group=place, sample=sample, score=score))
        return [sorted(group, key=lambda each: each.sample.index) for group in groups]

    async def _grade(self, row: PromptRow, sample: Sample, sampling: Sampling) -> tuple[Sample, Score]:
        request = reward_request(row, sample, sampling.max_tokens)
        if self._reward_model is not None and row.scored_by_model:
            return sample, await self._reward_model.score(row.messages, request)
        return sample, await self.scorer.score(request)


def sampling_of(rollout: RolloutConfig, draw: RolloutConfig | ValidationConfig, seed: int) -> Sampling:
    """How an engine draws: ``draw``'s distribution, ``rollout``'s ends, ``seed``."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=draw.temperature,
        top_p=draw.top_p,
        top_k=draw.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        seed=seed,
    )
