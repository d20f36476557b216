"""All that one run of a user's program made the model say, as conversations that share their beginnings.

A request says a whole conversation again.  Here it is found by its content: the longest beginning that this run knows,
up to the end of a drawn turn, keeps its tokens, and what is new after it is rendered by the chat template
(``rendering``).  A conversation that nothing is known of, or that the program rewrote, is rendered as a whole.

Turns are the nodes of a tree.  Each leaf is an episode: what leads to it, end to end.  A turn that several leaves share
is trained in the first of them, and stands in the others as context.

Invariants: every drawn token is trained in exactly one episode, after exactly the tokens that it was drawn after; and
no trained token was ever decoded and encoded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mcore_rl.agents.openai_requests import ApiError, after, digested
from mcore_rl.agents.rendering import TOOL
from mcore_rl.agents.session import ABORTED, OPENING, RESPONSE_TOKENS, TURNS, DrawnTurn, SessionParts, drawn, read_turn
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.errors import DataError, DeadEngineError, WeightsIncompleteError
from mcore_rl.rollout.episodes import AgentCounts, Author, Episode, FinishReason, Segment
from mcore_rl.rollout.protocol import Sample, SampleSource, Sampling
from mcore_rl.rollout.single_turn import drawn_segment

FIRST, SEPARATE, BRANCH, REWRITTEN = "first", "separate", "branch", "rewritten"  # ``AgentCounts.begins``
TOO_LONG, OVER = "context_length_exceeded", "episode_over"  # codes of refusals


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelTurn:
    """What was drawn, a node of the tree.

    parent: the turn before it; None: it answers a prompt.  before: what stands between the two, or the prompt.
    tokens: all from the prompt's first to its own last.  said: for whoever asked.  last: see ``read_turn``.
    cut: a limit ended it.  end: ``length`` if that was the room of the conversation.
    begins: how its conversation begins; "" if it goes on from ``parent``.  messages: the prompt's, of a first turn.
    """

    parent: ModelTurn | None
    before: Segment | None
    segment: Segment
    tokens: tuple[int, ...]
    said: DrawnTurn
    last: int | None
    end: FinishReason
    cut: bool
    cached_tokens: int
    begins: str
    messages: tuple[Mapping[str, Any], ...]
    text: str = ""

    @property
    def line(self) -> list[ModelTurn]:
        """The turns that lead to it, and itself."""
        turns = list[ModelTurn]()
        turn = self
        while True:
            turns.append(turn)
            if turn.parent is None:
                return turns[::-1]
            turn = turn.parent

    @property
    def prompt(self) -> Segment:
        """The prompt of its conversation."""
        first = self.line[0].before
        assert first is not None
        return first


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """What a turn is drawn after.

    parent, before, begins, messages: see ``ModelTurn``.  tokens: all.  key: the digest of what was said.  text: of a
    prompt of the completions.
    """

    parent: ModelTurn | None
    before: Segment | None
    tokens: tuple[int, ...]
    begins: str
    messages: tuple[Mapping[str, Any], ...] = ()
    key: bytes = b""
    text: str = ""

    @property
    def prompt_length(self) -> int:
        """The tokens of the prompt of its conversation."""
        prompt = self.before if self.parent is None else self.parent.prompt
        assert prompt is not None
        return len(prompt.tokens)


class Conversations:
    """The conversations of one run of a program.

    Arguments: see ``Session``.  max_prompt_tokens: of a conversation's prompt.

    limit: the name of the last limit that refused a turn; "" if none did.
    failure: the engine's death, or an abort, which ends the run of the program; or that a request failed.
    problem: what a request failed of, which loses the episode; "".
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
        max_prompt_tokens: int,
    ) -> None:
        self._parts = parts
        self._source = source
        self.sampling = sampling
        self.row = row
        self.prompt_id = prompt_id
        self._group = group
        self.index = index
        self._max_prompt_tokens = max_prompt_tokens
        self._after: dict[bytes, ModelTurn] = {}  # by the digest of what was said, the turn with which it ends
        self._prompts: dict[bytes, tuple[Segment, str]] = {}  # by the digest, conversations without a drawn turn
        self._drawn = set[bytes]()  # digests of what the model said
        self.turns: list[ModelTurn] = []  # as they ended
        self._num_asked = self._num_drawing = self.num_calls = self.num_failed = 0
        self._since = self._drew_since = time.monotonic()
        self._drawing_s = 0.0
        self._is_longer = parts.renderer.encoder.is_longer
        self.limit = self.problem = ""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure.add_done_callback(_read)

    @property
    def seconds(self) -> float:
        """Since the beginning, in which nothing was being drawn: the program's own."""
        now = time.monotonic()
        return now - self._since - self._drawing_s - (now - self._drew_since if self._num_drawing else 0.0)

    @property
    def max_tokens(self) -> int:
        """The most that a conversation may have."""
        return self._max_prompt_tokens + self.sampling.max_tokens

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Context:
        """What a turn after ``messages`` is drawn after.  ApiError: it is too long, or the template refuses it."""
        self._demand_turn()
        keys = [digested(list(tools))]
        for message in messages:
            keys.append(after(keys[-1], message))
        for length in range(len(messages) - 1, 0, -1):
            if (turn := self._after.get(keys[length])) is not None:
                if (known := self._continued(turn, messages, length, keys[-1])) is not None:
                    return known
                break
        rendered = self._prompts.get(keys[-1])
        prompt, begins = rendered or (self._opened(messages, tools), self._beginning(keys, messages))
        context = self._fitting(
            Context(
                parent=None,
                before=prompt,
                tokens=tuple(prompt.tokens.tolist()),
                begins=begins,
                messages=tuple(messages),
                key=keys[-1],
            )
        )
        self._prompts[keys[-1]] = prompt, begins  # of those that fit alone: others may come without end
        return context

    def completion(self, prompt: str | Sequence[int]) -> Context:
        """What a turn after a text, in which control tokens are what they spell, or after tokens is drawn after."""
        self._demand_turn()
        if isinstance(prompt, str):
            return self._after_text(prompt)
        if len(prompt) > self.max_tokens:
            raise self._too_long(len(prompt))
        tokens = tuple(prompt)
        size = len(self._parts.tokenizer)
        if not all(0 <= each < size for each in tokens):
            raise ApiError(400, f"prompt has a token that is not of 0 to {size - 1}", param="prompt")
        known = [turn for turn in self.turns if tokens[: len(turn.tokens)] == turn.tokens]
        turn = max(known, key=lambda each: len(each.tokens), default=None)
        if turn is None:
            return self._fitting(self._root(tokens, str(self._parts.tokenizer.decode(list(tokens)))))
        added = tokens[len(turn.tokens) :]
        return self._fitting(self._grown(turn, added, Author.user, ""))

    async def draw(self, context: Context, max_tokens: int | None, stop: Sequence[str]) -> ModelTurn:
        """The model's turn after ``context``.

        max_tokens: the most of it.  stop: strings that end it, besides those of the run.
        ApiError: the run of the program is at a limit, or over.
        """
        self._demand_turn()
        turn = self._num_asked
        self._num_asked += 1
        room = self._room(context)
        limit = min(room, self._parts.config.max_turn_tokens or room, max_tokens or room)
        sampling = replace(self.sampling, max_tokens=limit)
        if self._num_drawing == 0:
            self._drew_since = time.monotonic()
        self._num_drawing += 1
        try:
            sample = await drawn(self._source, self.prompt_id, turn, context.tokens, self.index, sampling, stop)
        except (DeadEngineError, WeightsIncompleteError) as error:
            self._fail(error)
            raise ApiError(503, "the engines are gone, and the run of the program is over", code=OVER) from error
        except Exception as error:
            self._lose(f"a request failed: {error or type(error).__name__}")
            raise ApiError(500, f"{self.problem}. The run of the program is over", code=OVER) from error
        finally:
            self._num_drawing -= 1
            if self._num_drawing == 0:
                self._drawing_s += time.monotonic() - self._drew_since
        if sample.finish is FinishReason.abort:
            self._fail(None)
            raise ApiError(503, "the run was interrupted", code=OVER)
        return self._turn(context, sample, room)

    def keep(self, context: Context, turn: ModelTurn, message: Mapping[str, Any] | None) -> None:
        """Takes ``turn`` into the tree.  message: as the program was told it, of chat completions."""
        self.turns.append(turn)
        if message is not None:
            self._after[after(context.key, message)] = turn
            self._drawn.add(after(b"", message))

    def episodes(self, reason: str, end: FinishReason) -> list[Episode]:
        """An episode of each conversation: the first is that in which the model spoke last.

        reason: why the run of the program ended.  end: ``abort``: nothing of it is trained.  The seconds of the program
        are told of the first.
        """
        if not self.turns:
            return [self._episode([], reason, FinishReason.abort, 0, set[ModelTurn | Segment]())]
        parents = {turn.parent for turn in self.turns}
        last = self.turns[-1]
        leaves = [last]
        if end is not FinishReason.abort:
            leaves += [turn for turn in self.turns if turn not in parents and turn is not last]
        trained = set[ModelTurn | Segment]()
        return [self._episode(leaf.line, reason, end, part, trained) for part, leaf in enumerate(leaves)]

    def _episode(
        self, line: Sequence[ModelTurn], reason: str, end: FinishReason, part: int, trained: set[ModelTurn | Segment]
    ) -> Episode:
        """trained: the turns that another episode trains, and the prompts that one has; those of ``line`` are added."""
        lost = end is FinishReason.abort
        if not line:
            segments = [_prompt(self.row.tokens)]
            row = self.row
        else:
            segments = [line[0].prompt]
            row = replace(self.row, tokens=tuple(segments[0].tokens.tolist()), messages=[*map(dict, line[0].messages)])
        for turn in line:
            if turn.parent is not None and turn.before is not None:
                segments.append(turn.before)
            segments.append(turn.segment if not lost and turn not in trained else replace(turn.segment, trained=False))
        own = [turn for turn in line if turn not in trained]
        begins = line[0].begins if line else FIRST
        if segments[0] in trained:
            begins = BRANCH
        trained.update([segments[0], *line])
        if end is FinishReason.stop and line and line[-1].end is FinishReason.length:
            end = FinishReason.length
        return Episode(
            row=row,
            prompt_id=self.prompt_id,
            group=self._group,
            index=self.index,
            part=part,
            segments=tuple(segments),
            end=end,
            agent=AgentCounts(
                reason=reason,
                turns=len(own),
                begins=begins,
                calls=0 if part else self.num_calls,
                failed_calls=0 if part else self.num_failed,
                tool_s=0.0 if part else self.seconds,
                cached_tokens=sum(turn.cached_tokens for turn in own),
            ),
        )

    def _beginning(self, keys: Sequence[bytes], messages: Sequence[Mapping[str, Any]]) -> str:
        """How a conversation begins that continues none that is known."""
        if not self._num_asked:
            return FIRST
        repeats = any(key in self._prompts for key in keys[1:-1])
        quotes = any(after(b"", each) in self._drawn for each in messages if each["role"] == "assistant")
        return REWRITTEN if repeats or quotes else SEPARATE

    def _continued(
        self, turn: ModelTurn, conversation: Sequence[Mapping[str, Any]], length: int, key: bytes
    ) -> Context | None:
        """``turn`` with the messages after the first ``length``; None if the chat template cannot write them there."""
        messages = conversation[length:]
        calls = [call for message in conversation[:length] for call in message.get("tool_calls", ())]
        called = {call["id"]: call["function"]["name"] for call in calls}
        if any(each["role"] == "assistant" for each in messages):
            return None
        text = "\n".join(each["content"] for each in messages)
        if self._is_longer(text, self.sampling.max_tokens):
            raise self._full()
        try:
            added = self._parts.renderer.appended(messages, turn.last, called)
        except DataError:
            return None
        author = Author.tool if messages[0]["role"] == TOOL else Author.user
        return self._fitting(replace(self._grown(turn, added, author, text), key=key))

    def _opened(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Segment:
        """The prompt that ``messages`` begin.  ApiError: it is too long, or the template refuses it."""

        def judge(text: str) -> None:
            if self._is_longer(text, self._max_prompt_tokens):
                raise self._too_long()

        judge("".join(each["content"] for each in messages if each["role"] != "assistant"))  # rendering takes time, too
        try:
            return _prompt(self._parts.renderer.opening(messages, tools, judge))
        except DataError as error:
            raise ApiError(400, "; ".join(error.problems), param="messages") from error

    def _after_text(self, text: str) -> Context:
        if self._is_longer(text, self.max_tokens):
            raise self._too_long()
        known = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        turn = max(known, key=lambda each: len(each.text), default=None)
        if turn is None:
            tokens = self._parts.tokenizer(text)["input_ids"]
            return self._fitting(self._root(tuple(tokens), text))
        rest = text[len(turn.text) :]
        added = self._parts.renderer.encoder.encode([(rest, True)], after=turn.last) if rest else []
        return self._fitting(replace(self._grown(turn, added, Author.user, rest), text=text))

    def _root(self, tokens: tuple[int, ...], text: str) -> Context:
        begins = SEPARATE if self._num_asked else FIRST
        said = ({"role": "user", "content": text},)
        return Context(parent=None, before=_prompt(tokens), tokens=tokens, begins=begins, messages=said, text=text)

    def _grown(self, turn: ModelTurn, added: Sequence[int], author: Author, text: str) -> Context:
        """``turn`` with tokens of ``author`` after it."""
        segment = Segment(author=author, tokens=np.asarray(added, dtype=np.int32), text=text) if added else None
        return Context(parent=turn, before=segment, tokens=(*turn.tokens, *added), begins="")

    def _fitting(self, context: Context) -> Context:
        """``context``, after which there is room for a token.  ApiError: there is none."""
        if not context.prompt_length:
            raise ApiError(400, "the prompt has no token. Write some text", param="prompt")
        if context.prompt_length > self._max_prompt_tokens:
            raise self._too_long(context.prompt_length)
        if self._room(context) < 1:
            raise self._full()
        return context

    def _room(self, context: Context) -> int:
        return self.sampling.max_tokens - (len(context.tokens) - context.prompt_length)

    def _demand_turn(self) -> None:
        """ApiError: the episode has had its turns."""
        most = self._parts.config.max_turns
        if self._num_asked >= most:
            raise self._refusal(TURNS, OVER, f"the episode has had its {most} turns (max_turns)")

    def _too_long(self, count: int | None = None) -> ApiError:
        """The refusal of a prompt.  count: its tokens; None: more than fit."""
        begins = f"more than {self._max_prompt_tokens}" if count is None else count
        said = f"the conversation begins with {begins} tokens, and data.max_prompt_length is {self._max_prompt_tokens}"
        return self._refusal(RESPONSE_TOKENS, TOO_LONG, said)

    def _full(self) -> ApiError:
        """The refusal of another turn."""
        said = f"no token of another turn fits into data.max_response_length, {self.sampling.max_tokens}"
        return self._refusal(RESPONSE_TOKENS, TOO_LONG, said)

    def _refusal(self, limit: str, code: str, message: str) -> ApiError:
        self.limit = limit
        return ApiError(400, f"{message}. End the program, or go on with less", code=code)

    def _fail(self, error: Exception | None) -> None:
        if not self.failure.done():
            if error is None:
                self.limit = ABORTED
                self.failure.set_result(None)
            else:
                self.failure.set_exception(error)

    def _lose(self, problem: str) -> None:
        """Ends the run of the program, and nothing else: a request of its own failed."""
        if not self.failure.done():
            self.problem = problem
            self.failure.set_result(None)

    def _turn(self, context: Context, sample: Sample, room: int) -> ModelTurn:
        """room: that the conversation had."""
        cut = sample.finish is FinishReason.length
        said, last = read_turn(self._parts, self.sampling, sample, context.tokens[-OPENING:])
        tokens = sample.tokens.tolist()
        whole = str(self._parts.tokenizer.decode(tokens, skip_special_tokens=False))
        return ModelTurn(
            parent=context.parent,
            before=context.before,
            segment=drawn_segment(sample),
            tokens=(*context.tokens, *tokens),
            said=said,
            last=last,
            end=FinishReason.length if cut and len(sample.tokens) == room else FinishReason.stop,
            cut=cut,
            cached_tokens=sample.cached_tokens,
            begins=context.begins,
            messages=context.messages,
            text=context.text and context.text + whole,
        )


def _prompt(tokens: Sequence[int]) -> Segment:
    return Segment(author=Author.prompt, tokens=np.asarray(tokens, dtype=np.int32))


def _read(failure: asyncio.Future[None]) -> None:
    """Reads it, so that asyncio does not log what nobody asks for: the run may have ended for another reason."""
    if not failure.cancelled():
        failure.exception()
