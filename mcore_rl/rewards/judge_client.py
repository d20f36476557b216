"""Asks a server with OpenAI's chat completions, and asks again where that helps.

What comes back is a stranger's: it is read up to a limit and by schema, from the address that was written and from no
other, and only the text and the counts of tokens are taken.  The key is in the header alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from mcore_rl.config.judge import JudgeConfig
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.secrets import secret
from mcore_rl.rewards.judgements import Judgement, Tokens

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER = 1 << 20  # bytes
SHOWN = 200  # characters of an answer that is none
CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # between a request and the same once more
AGAIN = (408, 429)  # and what is above 499: the server may answer the same request later


class JudgeError(Exception):
    """A request has no answer.  again: the same request may have one later, after ``wait_s`` if the server said so."""

    def __init__(self, problem: str, *, again: bool = False, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.again = again
        self.wait_s = wait_s


class JudgeTimeoutError(JudgeError):
    """A request took longer than ``reward.judge.timeout_s``."""


class AnswersJudge(Protocol):
    """Who answers a judge's requests; an async context manager.

    asked_of: a part of every request, which says whose answer it is.  num_retries: requests that were sent once more.
    """

    asked_of: Mapping[str, Any]
    num_retries: int

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def ask(self, request: Mapping[str, Any], retries: int) -> Judgement:
        """The answer to ``request``.  JudgeError: there is none after ``retries`` further attempts."""
        ...


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class JudgeClient:
    """Requests to ``config.address``; an async context manager.

    num_retries: requests that were sent once more.  ConfigError: the variable of its key is not set, or is no header.
    """

    def __init__(self, config: JudgeConfig) -> None:
        assert config.address is not None
        self._config = config
        self._url = f"{config.address.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | _authorization(config)
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0
        self.asked_of: Mapping[str, Any] = {"model": config.model}

    async def __aenter__(self) -> Self:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self._config.timeout_s, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            timeout=limit,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=self._config.concurrency),
            trust_env=False,  # neither a proxy nor a password out of .netrc
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, request: Mapping[str, Any], retries: int) -> Judgement:
        """The answer to ``request``.  JudgeError: there is none after ``retries`` further attempts."""
        for attempt in range(retries + 1):
            try:
                return await self._once(request)
            except JudgeError as error:
                if not error.again or attempt == retries:
                    raise
                wait_s = error.wait_s
            self.num_retries += 1
            await asyncio.sleep(backoff_s(attempt) if wait_s is None else min(wait_s, LONGEST_WAIT_S))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, request: Mapping[str, Any]) -> Judgement:
        import aiohttp

        assert self._session is not None
        try:
            async with self._session.post(
                self._url, json=dict(request), headers=self._headers, allow_redirects=False
            ) as response:
                body = await _limited(response.content)
                if response.status != 200:
                    raise _refusal(response.status, body, response.headers.get("Retry-After"))
        except TimeoutError as error:
            problem = f"took longer than {self._config.timeout_s:g} s (reward.judge.timeout_s)"
            raise JudgeTimeoutError(f"{self._url} {problem}", again=True) from error
        except aiohttp.ClientSSLError as error:
            raise JudgeError(f"{self._url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise JudgeError(f"{self._url}: {type(error).__name__}: {error}", again=True) from error
        return read_completion(body)


def read_completion(body: bytes) -> Judgement:
    """The text and the tokens of an answer of chat completions.  JudgeError: it is no such answer."""
    try:
        read = msgspec.json.decode(body, type=_Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JudgeError(f"answered with no chat completion ({error}): {_shown(body)}") from error
    if not read.choices:
        raise JudgeError(f"answered without a choice: {_shown(body)}")
    usage = read.usage or _Usage()
    choice = read.choices[0]
    return Judgement(
        text=choice.message.content or "",
        truncated=choice.finish_reason == "length",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


def backoff_s(attempt: int) -> float:
    """Seconds before a request is sent once more, the ``attempt``-th time from 0: doubled, less a random part."""
    return min(FIRST_WAIT_S * 2.0 ** min(attempt, 16), LONGEST_WAIT_S) * random.uniform(0.5, 1)


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a header Retry-After, which has seconds or a date; None: it says nothing."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header.strip()[:9])
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


async def _limited(content: aiohttp.StreamReader) -> bytes:
    body = b""
    while piece := await content.read(1 << 16):
        body += piece
        if len(body) > MAX_ANSWER:
            raise JudgeError(f"answered more than {MAX_ANSWER:,} bytes")
    return body


def _refusal(status: int, body: bytes, retry_after: str | None) -> JudgeError:
    again = status in AGAIN or status >= 500
    moved = " and its redirects are not followed" if 300 <= status < 400 else ""
    return JudgeError(f"answered {status}{moved}: {_shown(body)}", again=again, wait_s=retry_after_s(retry_after))


def _shown(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "(nothing)"


def _authorization(config: JudgeConfig) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = secret(config.api_key_env)
    problem = ""
    if not key:
        problem = "is not set in the environment"
    elif not (key.isascii() and key.isprintable()):
        problem = "holds what no header can, such as a line break"
    if problem:
        remedy = "Set it to the judge's key where the run is started"
        raise ConfigError([Violation("reward.judge.api_key_env", config.api_key_env, problem, remedy)])
    return {"Authorization": f"Bearer {key}"}
