"""The conversation of one episode: it draws turns, appends what others say, and keeps every token as it was drawn.

A loop (``loops``) says what happens next; the session holds the tokens and the limits.  Each limit ends the episode
with a reason of its own.

Invariant: a trained token is a token that the engine drew; the prompt of a turn is all tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.agents.engine_waits import EngineWaits
from mcore_rl.agents.episode_calls import EpisodeCalls
from mcore_rl.agents.rendering import TOOL, ChatMessage, TurnRenderer, call_id
from mcore_rl.agents.tools import ToolCall, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.data.prompts import PromptRow
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, FinishReason, Segment, prompt_segment
from mcore_rl.rollout.protocol import Prompt, Request, Sample, SampleSource, Sampling
from mcore_rl.rollout.single_turn import drawn_segment
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why episodes end.  A loop of one's own may name others.
ANSWERED = "answered"
INTERACTION = "interaction"
INTERACTION_FAILED = "interaction_failed"
ABORTED = "aborted"
TURNS = "max_turns"
TURN_TOKENS = "max_turn_tokens"
RESPONSE_TOKENS = "max_response_length"
CALLS = "max_calls_per_turn"
TOOL_TIME = "max_tool_s"
PROGRAM_FAILED = "program_failed"
PROGRAM_TIMEOUT = "program_timeout"
PROGRAM_NO_TURNS = "program_no_turns"
PROGRAM_NO_REWARD = "program_no_reward"
END_REASONS = (
    *(ANSWERED, INTERACTION, TURNS, TURN_TOKENS, RESPONSE_TOKENS),
    *(CALLS, TOOL_TIME, INTERACTION_FAILED, ABORTED),
    *(PROGRAM_FAILED, PROGRAM_TIMEOUT, PROGRAM_NO_TURNS, PROGRAM_NO_REWARD),
)
OPENING = 16  # tokens of a context in which the opening of a thought ends
UNREADABLE = "The call could not be read. Write it in the form that was asked for, with arguments as valid JSON."


class EpisodeOverError(Exception):
    """A limit ended the episode.  reason: its name.  end: what it means for training."""

    def __init__(self, reason: str, end: FinishReason = FinishReason.length) -> None:
        super().__init__(reason)
        self.reason = reason
        self.end = end


@dataclass(frozen=True, kw_only=True)
class DrawnTurn:
    """What the model drew.

    text: without special tokens and stop string.
    raw: with special tokens, but for the one that ended it; what calls are read from.
    stop: the stop string that ended it; None: the model ended its turn.
    after: the end of what it was drawn after, with special tokens: a prompt may open a thought.
    """

    text: str
    raw: str
    stop: str | None = None
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    """What all sessions of a run share.

    read_calls: reads the calls in a turn's ``raw`` and ``after``; None: the model has no tools.
    waits: measures how long engines are idle.
    """

    config: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer
    tools: ToolSet
    read_calls: Any = None
    waits: EngineWaits = field(default_factory=EngineWaits)


class Session:
    """One episode while it runs.

    source: draws.  row: the prompt.  prompt_id, group, index: of the ``Episode``.  sampling: of a turn; its
    ``max_tokens`` limits all that follows the prompt.
    """

    def __init__(
        self,
        parts: SessionParts,
        source: SampleSource,
        row: PromptRow,
        prompt_id: str,
        group: int,
        index: int,
        sampling: Sampling,
    ) -> None:
        self._parts = parts
        self._source = source
        self._sampling = sampling
        self.row = row
        self.prompt_id = prompt_id
        self.group = group
        self.index = index
        self.tool_calls = EpisodeCalls(parts.tools, parts.config, f"{prompt_id}#{index}", tools_kwargs(row))
        self._segments = [prompt_segment(row)]
        self._tokens = list(row.tokens)
        self._last: int | None = None  # the drawn token that ended the last turn
        self.num_turns = self._cached_tokens = 0
        self._seconds_told = 0.0  # of tools, by the segments so far

    @property
    def waits(self) -> EngineWaits:
        """Is told when the episode waits for somebody else than the engine."""
        return self._parts.waits

    @property
    def tools(self) -> ToolSet:
        """What the model may call."""
        return self._parts.tools

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far: the prompt's messages, and one for each segment after it."""
        return self.episode().messages

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._sampling.max_tokens - (len(self._tokens) - len(self.row.tokens))

    async def draw(self, stop: Sequence[str] = ()) -> DrawnTurn:
        """The model's next turn.  stop: strings that end it, besides those of the run.

        EpisodeOverError: the episode or the turn is at a limit; what was drawn of it is kept.
        """
        config = self._parts.config
        if self.num_turns >= config.max_turns:
            raise EpisodeOverError(TURNS)
        if self.room < 1:
            raise EpisodeOverError(RESPONSE_TOKENS)
        limit = min(self.room, config.max_turn_tokens or self.room)
        before = self._tokens[-OPENING:]
        with self.waits.drawing():
            sample = await drawn(
                self._source,
                self.prompt_id,
                self.num_turns,
                self._tokens,
                self.index,
                replace(self._sampling, max_tokens=limit),
                stop,
            )
        self._keep(sample)
        if sample.finish is FinishReason.abort:
            raise EpisodeOverError(ABORTED, FinishReason.abort)
        if sample.finish is FinishReason.length:
            raise EpisodeOverError(RESPONSE_TOKENS if self.room < 1 else TURN_TOKENS)
        turn, self._last = read_turn(self._parts, self._sampling, sample, before)
        return turn

    def append(self, messages: Sequence[ChatMessage]) -> None:
        """Appends {role, content} of tools or a user, after the model's turn, and opens its next.

        EpisodeOverError: no token of another turn would fit; then nothing is appended.
        """
        role = messages[0]["role"]
        if self.num_turns >= self._parts.config.max_turns:
            raise EpisodeOverError(TURNS)
        text = "\n".join(str(message["content"]) for message in messages)
        author = Author.tool if role == TOOL else Author.user
        self._add(author, self._parts.renderer.appended(messages, self._last), text)

    def observe(self, text: str) -> None:
        """Continues the model's turn with ``text`` that is not its own, as an observation of ReAct.  As ``append``."""
        self._add(Author.tool, self._parts.renderer.continued(text), text)

    def reward(self, value: float | None) -> None:
        """Adds to the reward of the model's last turn.  None: nothing is said of it."""
        if value is None:
            return
        place = max(place for place, each in enumerate(self._segments) if each.trained)
        segment = self._segments[place]
        scaled = self._parts.config.tool_reward_coef * value
        self._segments[place] = replace(segment, reward=(segment.reward or 0.0) + scaled)

    def calls_of(self, turn: DrawnTurn) -> list[ToolCall]:
        """The calls in ``turn``; one that cannot be read has a problem."""
        if self._parts.read_calls is None:
            return []
        read: ReadCalls = self._parts.read_calls(turn.raw, turn.after)
        if read.unreadable:
            return [ToolCall(name="", problem=UNREADABLE)]
        ids = read.ids or ("",) * len(read.calls)
        return [
            ToolCall(name=name, arguments=arguments, id=own)
            for (name, arguments), own in zip(read.calls, ids, strict=True)
        ]

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[str]:
        """Runs ``calls`` of the last turn, which their rewards are of; returns the text of each result.

        EpisodeOverError: there are too many calls or turns, or the tools have had their time.
        """
        config = self._parts.config
        if len(calls) > config.max_calls_per_turn:
            raise EpisodeOverError(CALLS)
        with self.waits.waiting():
            results = await self.tool_calls.run(calls)
        for result in results:
            self.reward(result.reward)
        if self.tool_calls.is_out_of_time:
            raise EpisodeOverError(TOOL_TIME)
        return [result.text for result in results]

    async def answer_calls(self, calls: Sequence[ToolCall]) -> None:
        """``call_tools``, and appends the results."""
        texts = await self.call_tools(calls)
        self.append(
            [
                {
                    "role": TOOL,
                    "content": text,
                    "name": call.name or TOOL,
                    "tool_call_id": call.id or call_id(number),
                }
                for number, (call, text) in enumerate(zip(calls, texts, strict=True))
            ]
        )

    def episode(self, reason: str = ANSWERED, end: FinishReason = FinishReason.stop) -> Episode:
        """The episode as it is.  reason: why it ended.  end: what that means for training; ``abort``: it has none."""
        calls = self.tool_calls
        segments = tuple(self._segments)
        if end is FinishReason.abort:
            segments = tuple(replace(each, trained=False, reward=None) for each in segments)
        return Episode(
            row=self.row,
            prompt_id=self.prompt_id,
            group=self.group,
            index=self.index,
            segments=segments,
            end=end,
            agent=AgentCounts(
                reason=reason,
                turns=self.num_turns,
                calls=calls.num_calls,
                failed_calls=calls.num_failed,
                tool_s=calls.seconds,
                cached_tokens=self._cached_tokens,
            ),
        )

    def _keep(self, sample: Sample) -> None:
        self.num_turns += 1
        self._last = None
        self._cached_tokens += sample.cached_tokens
        self._tokens += sample.tokens.tolist()
        self._segments.append(drawn_segment(sample))

    def _add(self, author: Author, tokens: Sequence[int], text: str) -> None:
        if len(tokens) >= self.room:
            raise EpisodeOverError(RESPONSE_TOKENS)
        self._tokens += tokens
        seconds = self.tool_calls.seconds - self._seconds_told if author is Author.tool else 0.0
        self._seconds_told += seconds
        added = Segment(author=author, tokens=np.asarray(tokens, dtype=np.int32), text=text, tool_s=seconds)
        self._segments.append(added)


async def drawn(
    source: SampleSource,
    prompt_id: str,
    turn: int,
    tokens: Sequence[int],
    index: int,
    sampling: Sampling,
    stop: Sequence[str],
) -> Sample:
    """What ``source`` draws as turn ``turn`` of an episode, from 0, after ``tokens``.

    stop: strings that end it, besides those of ``sampling``.
    """
    name = prompt_id if turn == 0 else f"{prompt_id}/turn{turn}"
    request = Request(prompt=Prompt(id=name, tokens=tuple(tokens), opening=prompt_id), index=index)
    asked = replace(sampling, stop=(*sampling.stop, *stop))
    (sample,) = [each async for each in source.generate([request], asked)]
    return sample


def read_turn(
    parts: SessionParts, sampling: Sampling, sample: Sample, before: Sequence[int]
) -> tuple[DrawnTurn, int | None]:
    """(what was drawn, the token that ended it; None: the chat template has to write the end of the turn).

    before: the last tokens that it was drawn after.
    """
    tokens: list[int] = sample.tokens.tolist()
    stop = sample.stop if isinstance(sample.stop, str) else None
    renderer = parts.renderer
    last = tokens[-1]
    ended = stop is None and sample.finish is FinishReason.stop and last in renderer.encoder.control_ids
    if last in sampling.stop_token_ids:  # as </tool_call>: the run's choice, not the end of a turn
        ended = ended and last in renderer.ending_ids
    raw = str(parts.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False))
    after = str(parts.tokenizer.decode(list(before), skip_special_tokens=False))
    return DrawnTurn(text=sample.text, raw=raw, stop=stop, after=after), last if ended else None


def tools_kwargs(row: PromptRow) -> dict[str, Any]:
    """``tools_kwargs`` of a row, its column or a field of ``extra_info``; {} if it has none."""
    return _kwargs(row, "tools_kwargs")


def interaction_kwargs(row: PromptRow) -> dict[str, Any]:
    """``interaction_kwargs`` of a row, as ``tools_kwargs``."""
    return _kwargs(row, "interaction_kwargs")


def _kwargs(row: PromptRow, name: str) -> dict[str, Any]:
    value = row.columns.get(name) or row.extra_info.get(name) or {}
    return dict(value) if any(each is not None for each in value.values()) else {}
