"""Rollout collection: samples episodes and grades each while others are still being sampled.

Dynamic sampling (arXiv:2503.14476, section 3.2) is here, too: groups of fresh prompts replace groups without a signal,
up to a limit; then groups without a signal fill the step, so that it is always complete.  A group has a signal if some
of its answers that are trained are right and others wrong.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.algorithms.shaping import has_signal
from mcore_rl.config.agent import ProgramReward
from mcore_rl.config.algorithm import FilterMetric
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.reward import Style
from mcore_rl.config.rollout import RolloutConfig, ValidationConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rewards.llm_judge import Judge
from mcore_rl.rewards.score import Score
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.episodes import Episode, prompt_segment, reward_request
from mcore_rl.rollout.pool import PrefixHits
from mcore_rl.rollout.prompt_pictures import PictureShelf, SeeingSource
from mcore_rl.rollout.protocol import Prompt, SampleSource, Sampling, requests_of
from mcore_rl.rollout.routes import checked_routes
from mcore_rl.rollout.single_turn import single_turn

CollectProgress = Callable[[int, int], None]  # receives (episodes finished, episodes in all)
STEPS_APART = 1_000_003  # so that no step has the seed of a step of another run
# Why a group that was drawn is not trained: it has no signal; or more groups had one than a step trains.
FILTERED = "filter_groups"
SURPLUS = "surplus"


@dataclass(frozen=True)
class DroppedGroup:
    """A group that was drawn and that no step trains.  number, epoch, id: of its prompt.  reason: ``FILTERED``, say."""

    number: int
    epoch: int
    id: str
    reason: str

    @classmethod
    def of(cls, row: PromptRow, reason: str) -> DroppedGroup:
        """The group of ``row``."""
        return cls(row.number, row.epoch, row.id, reason)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The episodes that one step collected.

    episodes: graded, prompt by prompt; ``Episode.group`` counts the prompts from 0.
    greedy: the reward of the greedy response to each prompt, by group number; None if the algorithm needs none.
    num_batches: the batches of prompts that were sampled.
    seconds: that sampling and grading took.
    dropped: the groups that were sampled since the last step got its own, and that no step trains.
    metrics: of how it came together, where drawing is ahead of training.
    """

    episodes: list[Episode]
    greedy: list[float] | None
    num_batches: int
    seconds: float
    dropped: tuple[DroppedGroup, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """The groups that were dropped because they have no signal."""
        return sum(each.reason == FILTERED for each in self.dropped)


class RolloutCollector:
    """Samples from ``engine`` as ``run`` says; ``scorer`` grades, or ``reward_model`` if the row asks for it.

    model: the policy's, if the updates repeat the experts that engines report (``actor.router_replay=r3``); else None.
    agents: run the rows that ask for an agent; None: one answer to the prompt is all.
    judge: grades the rows that ask for it.
    hits: of the prefix caches of the engines behind ``engine``.
    shelf: has the pictures of rows; None: no row has some.
    """

    def __init__(
        self,
        engine: SampleSource,
        scorer: Scorer,
        run: RunConfig,
        reward_model: RewardModel | None = None,
        model: ModelConfig | None = None,
        agents: AgentRunner | None = None,
        judge: Judge | None = None,
        hits: PrefixHits | None = None,
        shelf: PictureShelf | None = None,
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self._run = run
        self._reward_model = reward_model
        self._model = model
        self._agents = agents
        self._judge = judge
        self._hits = hits
        self._shelf = shelf

    async def collect(
        self, step: int, next_rows: Callable[[int], list[PromptRow]], progress: CollectProgress
    ) -> RolloutBatch:
        """Collects the groups of training step ``step``, in the order of the rows that ``next_rows(count)`` returns."""
        run = self._run
        begun = time.perf_counter()
        kept: list[list[Episode]] = []
        spare: list[list[Episode]] = []
        wanted = run.data.train_batch_size
        batches = 0
        while len(kept) < wanted and (batches == 0 or self._may_draw_more(batches)):
            rows = next_rows(wanted if run.data.gen_batch_size is None else run.data.gen_batch_size)
            groups = await self._collect_groups(step, batches, rows, progress)
            batches += 1
            for group in groups:
                (kept if self.teaches(group) else spare).append(group)
        chosen = [*kept, *spare][:wanted]
        missing = max(0, wanted - len(kept))
        dropped = [
            *(DroppedGroup.of(group[0].row, FILTERED) for group in spare[missing:]),
            *(DroppedGroup.of(group[0].row, SURPLUS) for group in kept[wanted:]),
        ]
        episodes, greedy = numbered(step, chosen, needs_greedy=run.needs_greedy)
        return RolloutBatch(
            episodes=episodes,
            greedy=greedy,
            num_batches=batches,
            seconds=time.perf_counter() - begun,
            dropped=tuple(dropped),
            metrics=self.metrics(episodes),
        )

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Since the last call: seconds in which engines were idle for tools, hits of their caches, what the judge did.

        Without the first where no agent ran ``episodes``, and without the last where there is no judge.
        """
        idle_s = 0.0 if self._agents is None else self._agents.waits.take()
        waits = {"agent/engines_idle_s": idle_s} if any(each.agent is not None for each in episodes) else {}
        hits = {} if self._hits is None else self._hits.take()
        return waits | hits | ({} if self._judge is None else self._judge.take())

    def over(self, engine: SampleSource) -> RolloutCollector:
        """A collector that differs from this one in nothing but its engine."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def can_replay(self, row: PromptRow) -> bool:
        """Whether unfinished episodes of ``row`` may go on with the samples that they have."""
        return self._agents is None or not self._agents.runs(row) or self._agents.can_replay(row)

    async def collect_group(self, ordinal: int, row: PromptRow) -> list[Episode]:
        """The group of one prompt; as the last its greedy sample if the algorithm needs one.

        ordinal: the number of the group among all of the run.  Its random draws depend on nothing else: neither on the
        step that trains it nor on when it is drawn.
        """
        rollout = self._run.rollout
        sampling = sampling_of(rollout, rollout, rollout.seed * STEPS_APART)
        (group,) = await self._with_greedy([(f"{ordinal}/{row.id}", row)], sampling, lambda done, of: None)
        return group

    async def collect_validation(self, rows: Sequence[PromptRow], progress: CollectProgress) -> list[Episode]:
        """``rollout.val_kwargs.n`` episodes of each of ``rows``, sampled as in validation; the seed never changes."""
        draw = self._run.rollout.val_kwargs
        sampling = sampling_of(self._run.rollout, draw, self._run.rollout.seed)
        groups = await self._collect([(row.id, row) for row in rows], draw.n, sampling, progress, trained=False)
        return [each for group in groups for each in group]

    def _may_draw_more(self, batches: int) -> bool:
        filtering = self._run.algorithm.filter_groups
        return filtering.enable and batches < filtering.max_num_gen_batches

    def teaches(self, group: Sequence[Episode]) -> bool:
        """Whether a group has a signal, or all groups are trained.  group: as ``collect_group`` returns it."""
        algorithm = self._run.algorithm
        drawn = group[:-1] if self._run.needs_greedy else group
        sampled = [each for each in drawn if not each.lost and each.part == 0]
        if not algorithm.filter_groups.enable:
            return True
        scores = [filter_score(each, algorithm.filter_groups.metric) for each in sampled]
        return has_signal(scores, [each.truncated for each in sampled], algorithm)

    async def _collect_groups(
        self, step: int, batch: int, rows: Sequence[PromptRow], progress: CollectProgress
    ) -> list[list[Episode]]:
        """The groups of ``rows``.  batch: the number of this batch of prompts within the step."""
        rollout = self._run.rollout
        sampling = sampling_of(rollout, rollout, rollout.seed * STEPS_APART + step)
        # A small data set may give a prompt twice in a step: its place in the step distinguishes the two.
        named = [(f"{batch}.{place}/{row.id}", row) for place, row in enumerate(rows)]
        return await self._with_greedy(named, sampling, progress)

    async def _with_greedy(
        self, named: Sequence[tuple[str, PromptRow]], sampling: Sampling, progress: CollectProgress
    ) -> list[list[Episode]]:
        """The samples of each row, and as the last its greedy sample if the algorithm needs one."""
        rollout = self._run.rollout
        if not self._run.needs_greedy:
            return await self._collect(named, rollout.n, sampling, progress)
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        alone = [(f"greedy/{name}", row) for name, row in named]
        try:
            async with asyncio.TaskGroup() as drawing:  # an error of one ends the other
                sampled = drawing.create_task(self._collect(named, rollout.n, sampling, progress))
                baselines = drawing.create_task(self._collect(alone, 1, greedy, lambda done, of: None, trained=False))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [[*group, baseline[0]] for group, baseline in zip(sampled.result(), baselines.result(), strict=True)]

    async def _collect(
        self,
        named: Sequence[tuple[str, PromptRow]],
        n: int,
        sampling: Sampling,
        progress: CollectProgress,
        *,
        trained: bool = True,
    ) -> list[list[Episode]]:
        """``n`` graded episodes of each row, in order.

        named: (the prompt id for the engine, the row).  trained: not for a baseline or validation alone.
        """
        prompts = [prompt_segment(row) for _, row in named]
        of_agents = {
            place for place, (_, row) in enumerate(named) if self._agents is not None and self._agents.runs(row)
        }
        places = {name: place for place, (name, _) in enumerate(named) if place not in of_agents}
        requests = requests_of([Prompt(id=name, tokens=named[place][1].tokens) for name, place in places.items()], n)
        source: SampleSource = self.engine
        if self._shelf is not None:
            source = SeeingSource(source, dict(named), self._shelf)
        graded: list[asyncio.Task[list[Episode]]] = []
        total, finished = n * len(named), itertools.count(1)
        try:
            async with asyncio.TaskGroup() as grading:  # an error of grading ends the sampling, and the reverse
                for place in sorted(of_agents):
                    for index in range(n):
                        work = self._run_agent(source, *named[place], place, index, sampling)
                        graded.append(grading.create_task(work))
                        graded[-1].add_done_callback(lambda _: progress(next(finished), total))
                with self._drawing() if requests else nullcontext():
                    async for sample in source.generate(requests, sampling):
                        place = places[sample.prompt_id]
                        experts = None
                        if trained and self._model is not None:
                            experts = checked_routes(sample, len(prompts[place].tokens), self._model)
                        episode = single_turn(named[place][1], prompts[place], sample, place, experts)
                        assert episode.num_response_tokens <= sampling.max_tokens, f"{sample.prompt_id} is too long"
                        graded.append(grading.create_task(self._graded([episode], sampling.max_tokens)))
                        progress(next(finished), total)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        groups: list[list[Episode]] = [[] for _ in named]
        for task in graded:
            groups[task.result()[0].group] += task.result()
        return [sorted(group, key=lambda each: (each.index, each.part)) for group in groups]

    def _drawing(self) -> AbstractContextManager[None]:
        """While open: engines are not idle, whatever agents do."""
        return nullcontext() if self._agents is None else self._agents.waits.drawing()

    async def _run_agent(
        self, source: SampleSource, name: str, row: PromptRow, place: int, index: int, sampling: Sampling
    ) -> list[Episode]:
        """The graded episode of an agent, or those of a user's program.

        source: draws its turns.  name: the prompt id for the engine.
        """
        assert self._agents is not None
        episodes = await self._agents.conversations(source, row, name, place, index, sampling)
        assert all(each.num_response_tokens <= sampling.max_tokens for each in episodes), f"{name} is too long"
        return await self._graded(episodes, sampling.max_tokens)

    async def _graded(self, episodes: Sequence[Episode], max_tokens: int) -> list[Episode]:
        """The conversations of one sample: the first is graded, and all have its score."""
        first = await self._grade(episodes[0], max_tokens)
        score = replace(first.graded, turn_rewards=())
        return [first, *(each.with_score(score) for each in episodes[1:])]

    async def _grade(self, episode: Episode, max_tokens: int) -> Episode:
        if episode.lost:
            return episode.with_score(Score(0.0))
        given = episode.score  # by a user's program
        if given is not None and self._agents is not None and self._agents.scores(episode.row) is ProgramReward.program:
            return episode
        graded = await self._by_grader(episode, max_tokens)
        if given is None:
            return graded
        score = graded.graded
        parts = given.parts | graded.graded.parts
        return replace(graded, score=replace(score, value=score.value + given.value, parts=parts))

    async def _by_grader(self, episode: Episode, max_tokens: int) -> Episode:
        request = reward_request(episode, max_tokens)
        by_style: dict[Style, Scorer | RewardModel | Judge | None] = {
            Style.rule: self.scorer,
            Style.model: self._reward_model,
            Style.judge: self._judge,
        }
        grader = by_style[episode.row.style] or self.scorer  # the user's function grades what nobody else does
        return episode.with_score(await grader.score(request))


def numbered(
    step: int, groups: Sequence[Sequence[Episode]], *, needs_greedy: bool
) -> tuple[list[Episode], list[float] | None]:
    """The episodes of ``groups``, which they are numbered by, and the reward of each group's greedy sample.

    needs_greedy: whether the last of each group is greedy, and therefore not among the episodes.
    Raises RolloutError if every episode was lost.
    """
    if all(each.lost for group in groups for each in group):
        ends = {each.agent.reason for group in groups for each in group if each.agent is not None}
        raise RolloutError(f"step {step}: every episode was lost ({', '.join(sorted(ends))}); nothing can be trained")
    of_groups = [[replace(each, group=number) for each in group] for number, group in enumerate(groups)]
    greedy = [group.pop().reward for group in of_groups] if needs_greedy else None
    return [each for group in of_groups for each in group], greedy


def filter_score(episode: Episode, metric: FilterMetric) -> float:
    """The value that must differ within a group: whether the answer is right, else the reward.

    It excludes the overlong penalty, which differs within any group of long responses, right or wrong.
    """
    score = episode.graded
    if metric is FilterMetric.acc and score.correct is not None:
        return score.correct
    return episode.reward - score.overlong


def sampling_of(rollout: RolloutConfig, draw: RolloutConfig | ValidationConfig, seed: int) -> Sampling:
    """The sampling parameters for an engine.

    rollout: what ends a response.  draw: the distribution; for training it is ``rollout`` itself.  seed: of the
    sampling.
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
