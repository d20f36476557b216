"""Rollout collection: episodes are drawn and graded, each while others are still drawn.

Dynamic sampling (arXiv:2503.14476, section 3.2) is here too: groups without signal make room for those of fresh
prompts, up to a bound; what is still missing then is filled with groups without signal, so that a step is always whole.
A group has a signal where answers differ in being right, as far as training will see them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mcore_rl.algorithms.shaping import has_signal
from mcore_rl.config.algorithm import FilterMetric
from mcore_rl.config.rollout import RolloutConfig, ValidationConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.data.prompts import PromptRow
from mcore_rl.episodes import Episode, prompt_segment, reward_request
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.protocol import Prompt, SampleSource, Sampling, requests_of
from mcore_rl.rollout.single_turn import single_turn

CollectProgress = Callable[[int, int], None]  # is told of episodes finished, of episodes in all
STEPS_APART = 1_000_003  # seeds of neighbouring steps and runs do not meet


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What one step collected.

    episodes: graded, prompt by prompt; ``Episode.group`` counts the prompts from 0.
    greedy: reward of the greedy response to each prompt, by group number; None where nobody asks for it.
    num_batches: batches of prompts that were drawn.
    num_dropped: groups that were drawn and are not trained.
    """

    episodes: list[Episode]
    greedy: list[float] | None
    num_batches: int
    num_dropped: int


class RolloutCollector:
    """Draws from ``engine`` as ``run`` says; ``scorer`` grades, or ``reward_model`` where the row asks for it."""

    def __init__(
        self, engine: SampleSource, scorer: Scorer, run: RunConfig, reward_model: RewardModel | None = None
    ) -> None:
        self.engine, self.scorer, self._run, self._reward_model = engine, scorer, run, reward_model

    async def collect(
        self, step: int, next_rows: Callable[[int], list[PromptRow]], progress: CollectProgress
    ) -> RolloutBatch:
        """The groups of training step ``step``, of rows that ``next_rows(count)`` gives, in their order."""
        run = self._run
        kept: list[list[Episode]] = []
        spare: list[list[Episode]] = []
        wanted, batches = run.data.train_batch_size, 0
        while len(kept) < wanted and (batches == 0 or self._may_draw_more(batches)):
            rows = next_rows(wanted if run.data.gen_batch_size is None else run.data.gen_batch_size)
            groups = await self._collect_groups(step, batches, rows, progress)
            batches += 1
            for group in groups:
                (kept if self._teaches(group) else spare).append(group)
        dropped = len(spare) if len(kept) >= wanted else len(spare) - (wanted - len(kept))
        chosen = [*kept, *spare][:wanted]
        numbered = [[replace(each, group=number) for each in group] for number, group in enumerate(chosen)]
        greedy = [group.pop().reward for group in numbered] if run.needs_greedy else None
        return RolloutBatch(
            episodes=[each for group in numbered for each in group],
            greedy=greedy,
            num_batches=batches,
            num_dropped=dropped,
        )

    async def collect_validation(self, rows: Sequence[PromptRow], progress: CollectProgress) -> list[Episode]:
        """``rollout.val_kwargs.n`` episodes of each of ``rows``, drawn as validation draws; the same every time."""
        draw = self._run.rollout.val_kwargs
        sampling = sampling_of(self._run.rollout, draw, self._run.rollout.seed)
        groups = await self._collect([(row.id, row) for row in rows], draw.n, sampling, progress)
        return [each for group in groups for each in group]

    def _may_draw_more(self, batches: int) -> bool:
        filtering = self._run.algorithm.filter_groups
        return filtering.enable and batches < filtering.max_num_gen_batches

    def _teaches(self, group: Sequence[Episode]) -> bool:
        algorithm, sampled = self._run.algorithm, group[: self._run.rollout.n]
        if not algorithm.filter_groups.enable:
            return True
        scores = [filter_score(each, algorithm.filter_groups.metric) for each in sampled]
        return has_signal(scores, [each.truncated for each in sampled], algorithm)

    async def _collect_groups(
        self, step: int, batch: int, rows: Sequence[PromptRow], progress: CollectProgress
    ) -> list[list[Episode]]:
        """The samples of each row, and after them its greedy one where the algorithm needs it.

        batch: number of this batch of prompts within the step.
        """
        rollout = self._run.rollout
        sampling = sampling_of(rollout, rollout, rollout.seed * STEPS_APART + step)
        # A small data set may give a prompt twice in a step: its place in the step tells the two apart.
        named = [(f"{batch}.{place}/{row.id}", row) for place, row in enumerate(rows)]
        if not self._run.needs_greedy:
            return await self._collect(named, rollout.n, sampling, progress)
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        sampled, baselines = await asyncio.gather(
            self._collect(named, rollout.n, sampling, progress),
            self._collect([(f"greedy/{name}", row) for name, row in named], 1, greedy, lambda done, of: None),
        )
        return [[*group, *baseline] for group, baseline in zip(sampled, baselines, strict=True)]

    async def _collect(
        self, named: Sequence[tuple[str, PromptRow]], n: int, sampling: Sampling, progress: CollectProgress
    ) -> list[list[Episode]]:
        """``n`` graded episodes of each row, in order; each row comes with the name that it is drawn under."""
        places = {name: place for place, (name, _) in enumerate(named)}
        prompts = [prompt_segment(row) for _, row in named]
        requests = requests_of([Prompt(id=name, tokens=row.tokens) for name, row in named], n)
        graded: list[asyncio.Task[Episode]] = []
        try:
            async with asyncio.TaskGroup() as grading:  # a reward model that dies ends the drawing, and the reverse
                async for sample in self.engine.generate(requests, sampling):
                    place = places[sample.prompt_id]
                    episode = single_turn(named[place][1], prompts[place], sample, place)
                    assert episode.num_response_tokens <= sampling.max_tokens, f"{sample.prompt_id} is too long"
                    graded.append(grading.create_task(self._grade(episode, sampling.max_tokens)))
                    progress(len(graded), len(requests))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        groups: list[list[Episode]] = [[] for _ in named]
        for task in graded:
            groups[task.result().group].append(task.result())
        return [sorted(group, key=lambda each: each.index) for group in groups]

    async def _grade(self, episode: Episode, max_tokens: int) -> Episode:
        request = reward_request(episode, max_tokens)
        if self._reward_model is not None and episode.row.scored_by_model:
            return episode.with_score(await self._reward_model.score(request))
        return episode.with_score(await self.scorer.score(request))


def filter_score(episode: Episode, metric: FilterMetric) -> float:
    """What must differ within a group: whether the answer is right, or where nobody says it what it earned.

    The overlong penalty is left out: it differs within any group of long responses, right or wrong.
    """
    score = episode.graded
    if metric is FilterMetric.acc and score.correct is not None:
        return score.correct
    return episode.reward - score.overlong


def sampling_of(rollout: RolloutConfig, draw: RolloutConfig | ValidationConfig, seed: int) -> Sampling:
    """How an engine draws.

    rollout: says what ends a response.  draw: says the distribution; training's is ``rollout`` itself.  seed: of all
    draws.
    """
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
