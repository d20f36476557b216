"""Episodes of any turns, with hostile text between them, are the tokens of an independent construction, and its masks.

The engine draws random tokens, control tokens and halves of characters among them, as no tokenizer would make them of a
text.  The oracle renders each whole conversation with transformers, cuts it by hand, and encodes what lies between
control tokens with the parts of the tokenizer (normaliser, pre-tokeniser, BPE), none of which knows a control token.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from mcore_rl.agents.conversations import Conversations
from mcore_rl.agents.openai_answers import message_of
from mcore_rl.agents.openai_requests import read_message
from mcore_rl.agents.rendering import TurnRenderer, call_id
from mcore_rl.agents.session import EpisodeOverError, Session, SessionParts
from mcore_rl.agents.tools import ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode, FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls
from tests.support.chat_styles import style
from tests.support.drawn_turns import agent_row

STYLES = ("qwen2.5", "qwen3", "llama3", "mistral", "deepseek")
ENDS = dict(zip(STYLES, ("<|im_end|>", "<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>"), strict=True))  # noqa: RUF001
FEW, ALL = 20, 2000  # of each style: 10,000 in all
MEGABYTE = 1 << 20
LOOP = asyncio.new_event_loop()  # ``asyncio.run`` writes the result of each run for a signal handler
WORDS = (
    "42",
    "apples",
    "  two",
    "\nline",
    "é",
    "日本",
    "🙂",
    "a  b\n\n c",
    "'s",
    "{'k': 1}",
    "x\ty",
    "\\n",
    '"',
    "\0",
    "",
)
CALLED = ReadCalls(calls=(("tool", '{"w": 1}'),), content="")


class RandomEngine:
    """Draws random tokens; every tenth turn is cut off.  samples: by what each was asked after, in order."""

    def __init__(self, tokenizer: Any, end: int, rng: random.Random) -> None:
        self._tokenizer, self._end, self._rng = tokenizer, end, rng
        self.asked: list[tuple[tuple[int, ...], Sample]] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        (request,) = requests
        tokens = [self._rng.randrange(len(self._tokenizer)) for _ in range(self._rng.randint(1, 9))]
        tokens = [each for each in tokens if each != self._end] + [self._end]
        finish = FinishReason.stop
        if self._rng.random() < 0.1:
            tokens, finish = tokens[:-1] or [5], FinishReason.length
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        sample = Sample(
            prompt_id=request.prompt.id, index=request.index, tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([-self._rng.random() for _ in tokens], dtype=np.float32),
            versions=(VersionSpan(version=1, start=0, end=len(tokens)),), finish=finish, text=text,
        )  # fmt: skip
        self.asked.append((request.prompt.tokens, sample))
        yield sample


def hostile(rng: random.Random, spelled: Sequence[str]) -> str:
    """A tool's text: words, control tokens, half characters; once in a while a megabyte."""
    parts = [
        rng.choice([*WORDS, *spelled, "\ud83d", "\udc80", b"\xe6\x97".decode(errors="replace")])
        for _ in range(rng.randint(0, 12))
    ]
    text = "x" + " ".join(parts) + rng.choice(spelled) + "x"
    return text * (MEGABYTE // len(text)) if rng.random() < 1 / 3000 else text


@dataclass
class Oracle:
    """Independent of the package: transformers' rendering, a cut by hand, and the parts of the tokenizer."""

    name: str
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = style(self.name)
        self.control = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        self._split = re.compile(
            "(" + "|".join(re.escape(each) for each in sorted(self.control, key=len, reverse=True)) + ")"
        )

    def plain(self, text: str) -> list[int]:
        """The ids of a text in which nothing is a control token."""
        backend = self.tokenizer.backend_tokenizer
        if self.name == "mistral":
            return [each.id for each in backend.model.tokenize(text.replace(" ", "▁"))] if text else []
        text = backend.normalizer.normalize_str(text)
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [each.id for word in words for each in backend.model.tokenize(word)]

    def written(self, message: dict[str, Any]) -> str:
        """A content as the template writes it: by hand from the templates."""
        text = message["content"].encode(errors="replace").decode()
        if self.name == "llama3":
            return json.dumps(text, ensure_ascii=False) if message["role"] == "tool" else text.strip()
        return str(text)

    def ids(self, text: str, contents: dict[str, str]) -> list[int]:
        """The ids of a text of the template, in which the words of ``contents`` stand for what others wrote."""
        made, run = list[int](), ""
        for piece in self._split.split(text):
            if piece in self.control:
                made += [*self.plain(run), self.control[piece]]
                run = ""
            else:
                for word, content in contents.items():
                    piece = piece.replace(word, content)
                run += piece
        return made + self.plain(run)

    def appended(
        self, before: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]], *, ended: bool
    ) -> list[int]:
        """What stands behind the last turn of ``before``.  ended: the model drew the token that ends it."""
        words = {f"zqslot{number}zq": self.written(each) for number, each in enumerate(messages)}
        if self.name == "llama3":
            words = {f'"{word}"' if each["role"] == "tool" else word: text
                     for (word, text), each in zip(words.items(), messages, strict=True)}  # fmt: skip
        asked = [
            {**each, "content": f"zqslot{number}zq"}
            | ({"name": "tool", "tool_call_id": call_id(number)} if each["role"] == "tool" else {})
            for number, each in enumerate(messages)
        ]
        text = self.tokenizer.apply_chat_template([*before, *asked], tokenize=False, add_generation_prompt=True)
        end = ENDS[self.name]
        behind = text.rpartition("zqlastzq")[2]
        behind = behind[behind.index(end) :]
        return self.ids(behind[len(end) :] if ended else behind, words)


@cache
def parts_of(name: str) -> SessionParts:
    tokenizer = style(name)
    config = AgentConfig(max_turns=100)
    return SessionParts(config=config, tokenizer=tokenizer, renderer=TurnRenderer(tokenizer), tools=ToolSet())


def stub(name: str, last: bool, calls: bool) -> dict[str, Any]:
    """A turn of the model's in the oracle's rendering, in which only the last is looked for."""
    word = "zqlastzq" if last else "zqsaidzq"
    if name == "mistral" and calls:
        call = {"id": "a" * 9, "function": {"name": "tool", "arguments": {"w": word}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": "assistant", "content": word}


class Script:
    """One linear episode: what is said after each turn, and the oracle's tokens of all of it."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.oracle, self.rng, self.name = Oracle(name), rng, name
        self.row = agent_row(style(name), f"question {rng.random()}", number=rng.randrange(1 << 30))
        self.num_turns = rng.randint(1, 12)
        spelled = list(self.oracle.control)
        self.after = []
        for _ in range(self.num_turns - 1):
            tools = rng.random() < 0.8
            count = rng.randint(1, 3) if tools else 1
            self.after.append(
                [{"role": "tool" if tools else "user", "content": hostile(rng, spelled)} for _ in range(count)]
            )

    def expected(self, drawn: Sequence[Sample], end: int) -> tuple[list[int], list[bool], list[float]]:
        """(tokens, masks, log-probs) of the episode."""
        tokens = list(self.row.tokens)
        masks, logprobs = [False] * len(tokens), [0.0] * len(tokens)
        before: list[dict[str, Any]] = list(self.row.messages)
        for turn, sample in enumerate(drawn):
            own = sample.tokens.tolist()
            tokens += own
            masks += [True] * len(own)
            logprobs += sample.logprobs.tolist()
            if turn == len(self.after):
                break
            calls = self.after[turn][0]["role"] == "tool"
            so_far = [*before, stub(self.name, True, calls)]
            added = self.oracle.appended(so_far, self.after[turn], ended=own[-1] == end)
            tokens += added
            masks += [False] * len(added)
            logprobs += [0.0] * len(added)
            named = [
                {"role": "tool", "content": "r", "name": "tool", "tool_call_id": call_id(0)}
                if each["role"] == "tool"
                else {"role": "user", "content": "u"}
                for each in self.after[turn]
            ]
            before = [*before, stub(self.name, False, calls), *named]
        return tokens, masks, logprobs


def as_trained(episode: Episode) -> tuple[list[int], list[bool], list[float]]:
    batch = assemble([episode.with_score(Score(1.0))]).batch
    assert batch.rollout_logprobs_T is not None
    return batch.tokens_T.tolist(), batch.mask_T.tolist(), batch.rollout_logprobs_T.tolist()


async def by_session(script: Script, engine: RandomEngine) -> Episode:
    """As the built-in loops do."""
    one = Session(parts_of(script.name), engine, script.row, "p", 0, 0, Sampling(max_tokens=100 << 20))
    for messages in script.after:
        await _drawn(one)
        one.append(messages)
    await _drawn(one)
    return one.episode()


async def _drawn(one: Session) -> None:
    with suppress(EpisodeOverError):  # cut off by the engine; a loop of one's own may go on
        await one.draw()


async def by_program(script: Script, engine: RandomEngine) -> Episode:
    """As a program does: the whole conversation each time, as JSON."""
    made = conversations(script, engine)
    said: list[dict[str, Any]] = list(script.row.messages)
    for messages in [*script.after, []]:
        calls = bool(messages) and messages[0]["role"] == "tool"
        message = await request(made, said, calls=calls)
        said = json.loads(json.dumps([*said, message, *messages]))
    (episode,) = made.episodes("answered", FinishReason.stop)
    return episode


def conversations(script: Script, engine: RandomEngine) -> Conversations:
    arguments = (parts_of(script.name), engine, script.row, "p", 0, 0, Sampling(max_tokens=100 << 20), 100 << 20)
    return Conversations(*arguments)


async def request(
    made: Conversations, said: Sequence[dict[str, Any]], *, calls: bool, max_tokens: int | None = None
) -> dict[str, Any]:
    """What the gateway does with a request: the assistant's message.  calls: the model's turn is read as one."""
    context = made.chat([read_message(each) for each in said], ())
    turn = await made.draw(context, max_tokens, ())
    message = message_of(turn, CALLED if calls else None, lambda: call_id(7))
    made.keep(context, turn, read_message(message))
    return message


@pytest.mark.parametrize("count", [FEW, pytest.param(ALL, marks=[pytest.mark.tier("full"), pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", STYLES)
def test_tokens_masks_and_logprobs_are_those_of_an_independent_construction(name: str, count: int) -> None:
    end = style(name).convert_tokens_to_ids(ENDS[name])
    num_control = 0
    for number in range(count):
        rng = random.Random(f"{name}/{number}")
        script, engine = Script(name, rng), RandomEngine(style(name), end, rng)
        episode = LOOP.run_until_complete((by_session if number % 2 else by_program)(script, engine))
        samples = [sample for _, sample in engine.asked]
        assert len(samples) == script.num_turns
        tokens, masks, logprobs = as_trained(episode)
        expected = script.expected(samples, end)
        assert (tokens, masks) == expected[:2], f"{name}/{number}"
        assert logprobs == np.array(expected[2], dtype=np.float32).tolist()
        start = 0
        for segment in episode.segments:  # what each turn was asked after is what stands before it
            if segment.author is Author.model:
                asked, _ = engine.asked[start]
                place = sum(len(each.tokens) for each in episode.segments[: episode.segments.index(segment)])
                assert list(asked) == tokens[:place]
                start += 1
        control = set(script.oracle.control.values())
        for segment, messages in zip(episode.segments[2::2], script.after, strict=True):
            control_ids = [each for each in segment.tokens.tolist() if each in control]
            plain = script.oracle.appended([*script.row.messages, stub(name, True, messages[0]["role"] == "tool")],
                                           [{**each, "content": "r"} for each in messages], ended=True)  # fmt: skip
            clean = [each for each in plain if each in control]
            assert control_ids in (clean, [end, *clean]), "text of a tool made a control token"
            num_control += sum(each in message["content"] for message in messages for each in script.oracle.control)
    assert num_control > count // 2  # there was something to be refused


@pytest.mark.parametrize("count", [FEW, pytest.param(ALL, marks=[pytest.mark.tier("full"), pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_every_drawn_token_of_a_program_is_trained_once_after_what_it_was_drawn_after(name: str, count: int) -> None:
    """Programs that branch, rewrite, repeat themselves and begin others, at random."""
    end = style(name).convert_tokens_to_ids(ENDS[name])
    seen = set[str]()
    for number in range(count):
        rng = random.Random(f"tree/{name}/{number}")
        script, engine = Script(name, rng), RandomEngine(style(name), end, rng)
        known: list[list[dict[str, Any]]] = [list(script.row.messages)]

        async def play(
            script: Script = script, engine: RandomEngine = engine, known: list[Any] = known, rng: random.Random = rng
        ) -> list[Episode]:
            made = conversations(script, engine)
            for turn in range(rng.randint(1, 12)):
                said = list(rng.choice(known[-2:]))
                what = rng.random()
                if what < 0.15 and len(said) > 2:
                    said = [{"role": "user", "content": "summary"}, *said[2:]]  # rewritten
                elif what < 0.25:
                    said = [{"role": "user", "content": f"other {turn}"}]
                message = await request(made, said, calls=False)
                known.append([*said, message, {"role": "user", "content": f"and {turn}?"}])
            return made.episodes("answered", FinishReason.stop)

        trained = list[tuple[tuple[int, ...], tuple[int, ...]]]()
        for episode in LOOP.run_until_complete(play()):
            so_far = list[int]()
            for segment in episode.segments:
                if segment.trained:
                    trained.append((tuple(so_far), tuple(segment.tokens.tolist())))
                so_far += segment.tokens.tolist()
            assert episode.agent is not None
            seen.add(episode.agent.begins)
        drawn = [(asked, tuple(sample.tokens.tolist())) for asked, sample in engine.asked]
        assert sorted(trained) == sorted(drawn), f"{name}/{number}"
    assert {"first", "branch", "rewritten"} <= seen <= {"first", "branch", "rewritten", "separate"}
