"""A group, the responses to one prompt, from the moment at which it is begun until a step trains it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from mcore_rl.controller.rollouts.drawn_file import DrawnGroup
from mcore_rl.data.prompts import PromptRow
from mcore_rl.episodes import Episode, FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Request, Sample, SampleSource, Sampling


class KeptSamples:
    """A ``SampleSource`` over ``source`` that keeps the samples of one group, until the group is finished.

    A request that was answered before is answered the same way, and not sent again: what an engine drew before it died
    is not lost.  An agent may ask for the same turn after other tokens; then it is drawn.

    A sample that was given back unfinished (finish ``abort``) is kept too, and goes on from its tokens.  Who draws sees
    finished samples alone, and an agent's loop lives on while its turn waits.

    kept: of the group before the run was resumed, as ``kept`` gives them.
    going: set while requests may be sent; those that come else wait.  None: always.
    """

    def __init__(
        self,
        source: SampleSource,
        kept: Iterable[tuple[tuple[int, ...], Sample]] = (),
        going: asyncio.Event | None = None,
    ) -> None:
        self._source, self._going = source, going
        self._kept: dict[tuple[tuple[str, int], tuple[int, ...]], Sample] = {
            ((sample.prompt_id, sample.index), asked): sample for asked, sample in kept
        }
        self._num_calls = 0  # of ``source`` that go on

    @property
    def kept(self) -> tuple[tuple[tuple[int, ...], Sample], ...]:
        """Each sample with the model's input that it answers, for another ``KeptSamples``."""
        return tuple((asked, sample) for (_, asked), sample in self._kept.items())

    @property
    def oldest(self) -> int | None:
        """The version of the oldest token that is kept; None: there is none."""
        return oldest_of(sample.versions for sample in self._kept.values())

    @property
    def is_drawing(self) -> bool:
        """Whether ``source`` has requests of this group."""
        return self._num_calls > 0

    @property
    def num_unfinished_tokens(self) -> int:
        """The tokens of the samples that are kept unfinished."""
        return sum(len(sample.tokens) for sample in self._kept.values() if sample.finish is FinishReason.abort)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``SampleSource.generate``."""
        asked = {request.key: (request.key, tuple(request.tokens)) for request in requests}
        missing = dict[tuple[str, int], Request]()
        for request in requests:
            kept = self._kept.get(asked[request.key])
            if kept is None or kept.finish is FinishReason.abort:
                missing[request.key] = request if kept is None else replace(request, so_far=kept)
            else:
                yield kept
        while missing:
            while self._going is not None and not self._going.is_set():
                await self._going.wait()  # it may be cleared again before who waited runs
            self._num_calls += 1
            try:
                async for sample in self._source.generate([*missing.values()], sampling):
                    key = sample.prompt_id, sample.index
                    if sample.finish is FinishReason.abort and not len(sample.tokens):
                        continue  # nothing of it was drawn
                    self._kept[asked[key]] = sample
                    if sample.finish is FinishReason.abort:
                        missing[key] = replace(missing[key], so_far=sample)
                    else:
                        del missing[key]
                        yield sample
            finally:
                self._num_calls -= 1

    def forget(self) -> None:
        """Keep nothing of what was drawn so far."""
        self._kept.clear()


@dataclass(kw_only=True, eq=False)
class Group:
    """One group; a ``Standing`` of ``admission``.

    ordinal: its number in the order in which groups are begun.  row: the prompt.  samples: what is drawn for it.
    oldest: the version of its oldest token; until it is finished, the oldest that it can be.
    episodes: when it is finished, graded, a greedy one last if the algorithm needs it.
    """

    ordinal: int
    row: PromptRow
    samples: KeptSamples
    oldest: int
    episodes: list[Episode] | None = None

    @classmethod
    def of(cls, kept: DrawnGroup, source: SampleSource, going: asyncio.Event | None = None) -> Group:
        """The group that ``kept`` was made of, which goes on to draw from ``source``.  going: see ``KeptSamples``."""
        ordinal, oldest = kept.facts["ordinal"], kept.facts["oldest"]
        samples, episodes = KeptSamples(source, kept.samples, going), [*kept.episodes] or None
        return cls(ordinal=ordinal, row=kept.row, samples=samples, oldest=oldest, episodes=episodes)

    @property
    def kept(self) -> DrawnGroup:
        """The group as a checkpoint has it."""
        episodes, facts = tuple(self.episodes or ()), {"ordinal": self.ordinal, "oldest": self.oldest}
        return DrawnGroup(row=self.row, episodes=episodes, samples=self.samples.kept, facts=facts)

    @property
    def finished(self) -> bool:
        """Whether a step can train it."""
        return self.episodes is not None

    def finish(self, episodes: list[Episode]) -> None:
        """Take its graded responses."""
        self.episodes = episodes
        self.samples.forget()
        drawn = oldest_of(part.versions for each in episodes for part in each.segments if part.trained)
        assert drawn is None or drawn >= self.oldest, f"{self.row.id} has tokens of version {drawn}"
        self.oldest = self.oldest if drawn is None else drawn

    def begin_again(self, version: int, *, whole: bool) -> None:
        """Draw on with ``version`` after an engine died.  whole: draw the finished responses again, too."""
        if whole:
            self.samples.forget()
        kept = self.samples.oldest
        self.oldest = version if kept is None else min(kept, version)


def oldest_of(spans: Iterable[Sequence[VersionSpan]]) -> int | None:
    """The lowest version of any token; None: there are no tokens whose version is known."""
    return min((span.version for of_one in spans for span in of_one if span.end > span.start), default=None)
