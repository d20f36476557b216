"""Writes what was drawn in OpenAI's form: one object, or events of a stream (chat completions and completions)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.conversations import Context, ModelTurn
from mcore_rl.agents.openai_requests import AskedSampling
from mcore_rl.rollout.tool_parsers import ReadCalls

MODEL = "policy"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice.  message: of chat completions, as the program is told it; None: a completion.  called: it calls."""

    turn: ModelTurn
    message: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str:
        """By OpenAI's names: ``stop``, ``length`` or ``tool_calls``."""
        if self.message is not None and self.message.get("tool_calls"):
            return "tool_calls"
        cut = self.turn.said.stop is None and self.turn.cut
        return "length" if cut else "stop"


def message_of(turn: ModelTurn, read: ReadCalls | None, new_id: Callable[[], str]) -> dict[str, Any]:
    """The assistant's message.  read: the calls of the turn; None: none are looked for.  new_id: of one without."""
    if read is None or not read.calls:
        return {"role": "assistant", "content": turn.said.text}
    ids = read.ids or ("",) * len(read.calls)
    calls = [
        {"id": own or new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        for own, (name, arguments) in zip(ids, read.calls, strict=True)
    ]
    return {"role": "assistant", "content": read.content or None, "tool_calls": calls}


class AnswerWriter:
    """Writes the answers to one request.  context: what they were drawn after.  number: of the request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, asked: AskedSampling, context: Context, number: str) -> None:
        self._tokenizer = tokenizer
        self._asked = asked
        self._context = context
        self._head = {"id": number, "created": int(time.time()), "model": MODEL}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer as one JSON object."""
        choices = [self._choice(number, answer) for number, answer in enumerate(answers)]
        chat = answers[0].message is not None
        body = {**self._head, "object": "chat.completion" if chat else "text_completion", "choices": choices}
        if self._asked.token_ids:
            body["prompt_token_ids"] = list(self._context.tokens)
        return body | {"usage": self._usage(answers)}

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """The events of a stream: what is drawn is known as a whole, so each choice has one, and one that ends it."""
        chat = answers[0].message is not None
        head = {**self._head, "object": "chat.completion.chunk" if chat else "text_completion"}
        for number, answer in enumerate(answers):
            choice = self._choice(number, answer)
            ended = {"index": number, "finish_reason": choice.pop("finish_reason")}
            if chat:
                message = choice.pop("message")
                calls = [{"index": place, **each} for place, each in enumerate(message.pop("tool_calls", []))]
                choice["delta"] = message | ({"tool_calls": calls} if calls else {})
                ended["delta"] = {}
            else:
                ended["text"] = ""
            yield _event({**head, "choices": [{**choice, "finish_reason": None}]})
            yield _event({**head, "choices": [ended]})
        if self._asked.with_usage:
            yield _event({**head, "choices": [], "usage": self._usage(answers)})
        yield DONE

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "finish_reason": answer.finish_reason, "logprobs": None}
        if answer.message is None:
            choice["text"] = answer.turn.said.text
        else:
            choice["message"] = dict(answer.message)
        if self._asked.logprobs:
            choice["logprobs"] = self._logprobs(answer)
        if self._asked.token_ids:
            choice["token_ids"] = answer.turn.segment.tokens.tolist()
        return choice

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        segment = answer.turn.segment
        assert segment.logprobs is not None
        texts = [str(self._tokenizer.decode([each])) for each in segment.tokens.tolist()]
        values = [float(each) for each in segment.logprobs]
        if answer.message is None:
            offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
        entries = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompt = len(self._context.tokens)
        drawn = sum(len(each.turn.segment.tokens) for each in answers)
        cached = max(each.turn.cached_tokens for each in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def models() -> dict[str, Any]:
    """The list of models: the one that is trained."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mcore_rl"}]}


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
