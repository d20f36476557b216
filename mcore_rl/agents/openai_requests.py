"""Reads requests in OpenAI's form: what is asked, in the form of the chat template, and what of it cannot be had.

Nothing here draws or answers.  ``ApiError`` is the refusal of one request, in OpenAI's form.

Invariant: what a program may decide is what it says and where a turn ends.  The distribution that tokens are drawn from
is the run's: whatever would change it is named in ``overridden``, and has no effect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mcore_rl.ground.json_text import read_json
from mcore_rl.rollout.protocol import Sampling

MAX_CHOICES, MAX_STOPS, MAX_STOP = 16, 16, 1000  # MAX_STOP: characters of a stop string
MAX_DEPTH = 64  # of lists and objects within each other: what reads them may recurse
ROLES = ("system", "developer", "user", "assistant", "tool")
HALF = "half a character (a lone surrogate), of which there are no tokens. Cut texts between characters"
# Fields that would change what is drawn, and what they are when they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "seed": (),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
}
UNSUPPORTED = (
    "functions",
    "function_call",
    "audio",
    "modalities",
    "suffix",
    "echo",
    "prediction",
    "web_search_options",
)


class ApiError(Exception):
    """A refusal.  status: of HTTP.  code, param: OpenAI's."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The answer in OpenAI's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class AskedSampling:
    """What both kinds of requests say.

    max_tokens: the most of an answer; None: as many as there is room for.  stop: strings that end it.  n: answers.
    stream, with_usage: send the answer as events; with the counts at the end.  logprobs, token_ids: tell them.
    overridden: what has no effect, as ``name=value``.
    """

    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    with_usage: bool
    logprobs: bool
    token_ids: bool
    overridden: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of chat completions.

    messages: as the chat template reads them: contents are texts, arguments of calls are JSON values.
    tools: in OpenAI's form.  calls: whether calls are read in the answer (``tool_choice`` is not ``none``).
    """

    asked: AskedSampling
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    calls: bool


def chat_request(body: Mapping[str, Any], sampling: Sampling) -> ChatRequest:
    """The request in ``body``.  sampling: the run's.  ApiError: it is none, or asks for what there is not."""
    messages = _of_type(body, "messages", list, required=True)
    if not messages:
        raise ApiError(400, "messages is empty. Write at least one", param="messages")
    tools = _of_type(body, "tools", list) or []
    for number, tool in enumerate(tools):
        if _function(tool) is None:
            raise ApiError(400, f"tools[{number}] is no function with a name", param=f"tools[{number}]")
    more = []
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        more.append(f"tool_choice={_shown(choice)}")
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        more.append(f"response_format={_shown(form)}")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    read = tuple(read_message(each, f"messages[{number}]") for number, each in enumerate(messages))
    if read[-1]["role"] == "assistant":
        said = "the last message is the assistant's, and there is nothing to answer. End with one of a user or a tool"
        raise ApiError(400, said, param="messages")
    return ChatRequest(
        asked=_asked(body, sampling, limit, logprobs=bool(body.get("logprobs")), more=more),
        messages=read,
        tools=tuple(tools),
        calls=bool(tools) and choice != "none",
    )


def completion_request(body: Mapping[str, Any], sampling: Sampling) -> tuple[AskedSampling, str | list[int]]:
    """(what is asked, the prompt: a text or tokens) of ``body``.  As ``chat_request``."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise ApiError(400, "prompt is no text and no list of tokens. Ask for one prompt at a time", param="prompt")
    if isinstance(prompt, str) and not _is_text(prompt):
        raise ApiError(400, f"prompt has {HALF}", param="prompt")
    more = [f"best_of={body['best_of']}"] if body.get("best_of") not in (None, 1, body.get("n")) else []
    asked = _asked(body, sampling, "max_tokens", logprobs=body.get("logprobs") is not None, more=more)
    return asked, prompt


def _asked(
    body: Mapping[str, Any], sampling: Sampling, limit: str, *, logprobs: bool, more: list[str]
) -> AskedSampling:
    for name in UNSUPPORTED:
        if body.get(name) not in (None, False, ["text"]):
            raise ApiError(400, f"{name} is not supported. Leave it out", param=name)
    n = _integer(body, "n", most=MAX_CHOICES)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else ([] if stop is None else stop)
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop is no text and no list of up to {MAX_STOPS} texts", param="stop")
    if not all(len(each) <= MAX_STOP and _is_text(each) for each in stops):
        raise ApiError(400, f"stop has a text of more than {MAX_STOP} characters, or {HALF}", param="stop")
    own = {"temperature": (sampling.temperature,), "top_p": (sampling.top_p,), "top_k": (sampling.top_k,)}
    overridden = [
        f"{name}={_shown(body[name])}"
        for name, values in (own | NEUTRAL).items()
        if body.get(name) is not None and body[name] not in values
    ]
    options = _of_type(body, "stream_options", dict) or {}
    return AskedSampling(
        max_tokens=_integer(body, limit),
        stop=tuple(stops),
        n=1 if n is None else n,
        stream=bool(body.get("stream")),
        with_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        token_ids=bool(body.get("return_token_ids")),
        overridden=(*overridden, *more),
    )


def read_message(message: Any, where: str = "message") -> dict[str, Any]:
    """A message as the chat template reads it.  where: it stands, for ApiError."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ApiError(400, f"{where} has no role of {', '.join(ROLES)}", param=where)
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    if role == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls is no list", param=where)
        read["tool_calls"] = [_call(each, f"{where}.tool_calls[{place}]") for place, each in enumerate(calls)]
    if role == "tool":
        read |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key) is not None}
    return read


def _function(given: Any) -> dict[str, Any] | None:
    """The function of a tool or a call; None: there is none with a name."""
    function = given.get("function") if isinstance(given, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _call(call: Any, where: str) -> dict[str, Any]:
    function = _function(call)
    if function is None:
        raise ApiError(400, f"{where} is no call of a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # what cannot be read, or is too deep, stays as the model wrote it
            read = read_json(arguments)
            if not _is_deep(read):
                arguments = read
    called = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


def _text(content: Any, where: str) -> str:
    """The text of a content: None, a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content is no text", param=where)
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(400, f"{where}.content has a part of type {kind}, and only text is supported", param=where)
        texts.append(text)
    return "".join(texts)


def after(so_far: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest of a conversation that goes on with ``message``, by what is said.

    Ids of calls are not part of it, nor is white space around what the assistant says: programs change them.
    """
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [[each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls", ())]
    return hashlib.blake2b(so_far + digested([message["role"], text, calls])).digest()


def digested(value: Any) -> bytes:
    """The digest of a JSON value, whatever the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode()).digest()


def parsed_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``.  ApiError: there is none."""
    try:
        body = read_json(raw)
    except ValueError as error:
        raise ApiError(400, f"the request is no JSON: {error}"[:200]) from error
    if not isinstance(body, dict):
        raise ApiError(400, "the request is no JSON object")
    if _is_deep(body):
        raise ApiError(400, f"the request has more than {MAX_DEPTH} lists and objects within each other")
    return body


def _is_deep(value: Any) -> bool:
    """Whether ``value`` is nested deeper than ``MAX_DEPTH``."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


def _is_text(text: str) -> bool:
    """Whether ``text`` can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_type(body: Mapping[str, Any], name: str, kind: Callable[..., Any], *, required: bool = False) -> Any:
    value = body.get(name)
    if (value is None and not required) or isinstance(value, kind):  # type: ignore[arg-type]
        return value
    raise ApiError(400, f"{name} is missing, or of a wrong type", param=name)


def _integer(body: Mapping[str, Any], name: str, most: int = 2**31 - 1) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ApiError(400, f"{name}={_shown(value)} is no whole number of 1 to {most}", param=name)
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
