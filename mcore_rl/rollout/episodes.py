"""What is drawn and trained: an episode, which is a row's prompt and all that was said after it, segment by segment.

One answer to one prompt is an episode of two segments: the prompt, and one segment of the model's that is trained.  A
conversation with tools has more.  Nothing here draws, grades or trains, and arrays are numpy's: no torch is needed.

Invariant: the tokens of a sequence are the segments' tokens, laid end to end.  What else holds of a segment and of an
episode is checked when one is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.data.media.placed import Placed, misplaced
from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.rewards.score import RewardRequest, Score

if TYPE_CHECKING:
    from mcore_rl.data.prompts import PromptRow  # and with it pyarrow, which no engine's process needs


class Author(Enum):
    """Who wrote a segment: the data set, the model, a tool that the model called, or somebody who answers it."""

    prompt = "prompt"
    model = "model"
    tool = "tool"
    user = "user"


ROLES = {Author.model: "assistant", Author.tool: "tool", Author.user: "user"}  # of messages


class FinishReason(Enum):
    """Why a sample or an episode ended: the model ended it, it reached its token limit, or it was aborted."""

    stop = "stop"
    length = "length"
    abort = "abort"


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of a segment were drawn with weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Consecutive tokens of one author.

    author: who wrote them.
    tokens: [N] int32; of the model's with the token that ended it.  N may be 0.
    trained: whether the policy loss is taken at these tokens, all or none.  Only the model's can be.
    logprobs: [N] float32, each token's log-prob under the distribution that it was drawn from; a trained segment has
        them.
    versions: the weights that drew the tokens: spans that cover them in order, or () where the engine names none.  Only
        the model's have some.
    reward: what this turn earned by itself, finite; None where nothing was said of it.  It becomes the reward of the
        segment's last token, so the segment is trained; that of an empty one goes nowhere, since no action could have
        earned it.  What the whole earned is the episode's score.
    text: the tokens as graders and people read them, without special tokens and stop string.  Empty for the prompt,
        whose messages are in its row.
    tool_s: seconds in which the calls ran whose results these are; 0 for others.
    media: the pictures among the tokens, in order, each whole, at places counted from the segment's first token.  The
        model draws none.
    """

    author: Author
    tokens: NDArray[np.int32]
    trained: bool = False
    logprobs: NDArray[np.float32] | None = None
    versions: tuple[VersionSpan, ...] = ()
    reward: float | None = None
    text: str = ""
    tool_s: float = 0.0
    media: tuple[Placed, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.tokens)
        author = self.author.value
        assert self.tokens.dtype == np.int32, f"tokens are {self.tokens.dtype}, not int32"
        assert self.author is Author.model or not (self.trained or self.versions), f"a {author} segment is not trained"
        assert self.logprobs is not None or not self.trained, "a trained segment has log-probs"
        if self.logprobs is not None:
            assert len(self.logprobs) == count, f"{len(self.logprobs)} log-probs of {count} tokens"
        if self.versions:
            end = 0
            for span in self.versions:
                assert span.start == end <= span.end, f"the versions {self.versions} do not follow one another"
                end = span.end
            assert end == count, f"the versions {self.versions} are not of {count} tokens"
        if self.reward is not None:
            assert self.trained, f"a {author} segment that is not trained has a reward"
            assert math.isfinite(self.reward), f"the reward {self.reward} is not finite"
        if self.media:
            assert self.author is not Author.model, "a model segment has pictures"
            problem = misplaced(self.media, self.tokens)
            assert problem is None, problem


@dataclass(frozen=True, kw_only=True)
class AgentCounts:
    """What an agent's episode did beside its tokens.

    reason: why it ended, one of ``agents.session.END_REASONS`` or the loop's own.
    turns: of the model.
    calls, failed_calls: of tools; those that failed or were wrong.
    tool_s: seconds in which tools ran.
    cached_tokens: tokens before a turn that the engine's prefix cache had, over all turns.
    begins: how a conversation of a user's program begins: ``first``, ``separate`` (another one of the same run),
        ``branch`` (it goes on elsewhere where another did), ``rewritten`` (the program changed what was said); else "".
    """

    reason: str
    turns: int
    calls: int = 0
    failed_calls: int = 0
    tool_s: float = 0.0
    cached_tokens: int = 0
    begins: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """A prompt and all that followed it; graded once it has a score.

    row: the prompt's row.
    prompt_id: the name under which the prompt was drawn, in seeds and messages; it differs from ``row.id``, since a
        step may ask a prompt twice.
    group: number of the prompt within the step.  Episodes of one group are samples of one prompt.
    index: number of the sample within its group.
    part: number of the conversation within the sample.  One run of a user's program may have several: part 0 is what
        is graded, and the others, which follow it, share its score and its advantage.
    segments: the prompt's first, with at least a token, and no other of the prompt's.
    end: why nothing follows.
    score: what the whole is worth; None before it is graded.
    experts: [num_tokens - 1, L, K], the experts that the sampler sent each token to; it never read the last one.  None
        where they are not repeated in training.
    agent: what its agent did; None where one answer to the prompt is all.
    pair: key that two episodes of one group share whose loss looks at both (DPO, SPIN), and which are therefore trained
        together; None for any other.
    """

    row: PromptRow
    prompt_id: str
    group: int
    index: int
    segments: tuple[Segment, ...]
    end: FinishReason
    score: Score | None = None
    experts: RoutesArray | None = None
    agent: AgentCounts | None = None
    pair: int | None = None
    part: int = 0

    def __post_init__(self) -> None:
        authors = [segment.author for segment in self.segments]
        assert authors and authors[0] is Author.prompt, f"{self.prompt_id}: the first segment is the prompt"
        assert len(self.segments[0].tokens), f"{self.prompt_id}: the prompt has no token"
        assert Author.prompt not in authors[1:], f"{self.prompt_id}: one segment is the prompt"
        if self.experts is not None:
            count = len(self.experts)
            assert count == self.num_tokens - 1, f"{self.prompt_id}: experts of {count} of {self.num_tokens} tokens"

    @property
    def media(self) -> list[Placed]:
        """The pictures of all segments, at their places in the whole."""
        placed = list[Placed]()
        end = 0
        for segment in self.segments:
            placed += [each.moved(end) for each in segment.media]
            end += len(segment.tokens)
        return placed

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt, which ``data.max_prompt_length`` limits."""
        return len(self.segments[0].tokens)

    @property
    def num_response_tokens(self) -> int:
        """Of all that follows the prompt, whoever wrote it, which ``data.max_response_length`` limits."""
        return sum(len(segment.tokens) for segment in self.segments[1:])

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence, which ``max_model_len`` limits: the context of engines and trainer."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def truncated(self) -> bool:
        """Cut off at its limit."""
        return self.end is FinishReason.length

    @property
    def lost(self) -> bool:
        """Its environment or its engine failed: no grade could be the model's, and nothing of it is trained."""
        return self.end is FinishReason.abort and not any(segment.trained for segment in self.segments)

    @property
    def is_single_turn(self) -> bool:
        """A prompt and one segment of the model's."""
        return len(self.segments) == 2 and self.segments[1].author is Author.model

    @property
    def response(self) -> str:
        """What the model said last, which is what graders look for an answer in."""
        return next((segment.text for segment in reversed(self.segments) if segment.author is Author.model), "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as {role, content}: the prompt's messages, and one for each segment after it."""
        said = [{"role": ROLES[each.author], "content": each.text} for each in self.segments[1:]]
        return [*self.row.messages, *said]

    @property
    def transcript(self) -> str:
        """All that follows the prompt, for people: the text alone where the model said all of it, else with roles."""
        if self.is_single_turn:
            return self.response
        return "\n\n".join(f"{ROLES[each.author]}: {each.text}" for each in self.segments[1:])

    @property
    def graded(self) -> Score:
        """The score of an episode that has one."""
        assert self.score is not None, f"{self.prompt_id}: not graded yet"
        return self.score

    @property
    def turn_rewards(self) -> list[float]:
        """Of the segments that have one."""
        return [segment.reward for segment in self.segments if segment.reward is not None]

    @property
    def reward(self) -> float:
        """All that it earned: the score's value and the rewards of its turns."""
        value = self.graded.value
        return math.fsum([value, *turns]) if (turns := self.turn_rewards) else value

    def with_score(self, score: Score) -> Episode:
        """Graded.  ``score.turn_rewards``, where it has some, are added to those of the trained segments, one each."""
        segments = list(self.segments)
        if score.turn_rewards:
            trained = [place for place, each in enumerate(segments) if each.trained]
            for place, reward in zip(trained, score.turn_rewards, strict=True):
                segments[place] = replace(segments[place], reward=(segments[place].reward or 0.0) + reward)
        return replace(self, segments=tuple(segments), score=score)


def prompt_segment(row: PromptRow) -> Segment:
    """The prompt of ``row``; one record serves all episodes that begin with it."""
    return Segment(author=Author.prompt, tokens=np.asarray(row.tokens, dtype=np.int32), media=row.media)


def reward_request(episode: Episode, max_tokens: int) -> RewardRequest:
    """What a grader is told.  max_tokens: that could have followed the prompt."""
    row = episode.row
    return RewardRequest(
        key=(episode.prompt_id, episode.index),
        data_source=row.data_source,
        response=episode.response,
        ground_truth=row.ground_truth,
        extra_info={**row.columns, **row.extra_info},
        num_tokens=episode.num_response_tokens,
        max_tokens=max_tokens,
        truncated=episode.truncated,
        messages=episode.messages,
        num_turns=sum(segment.trained for segment in episode.segments),
    )
